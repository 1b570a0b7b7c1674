"""The ways to load a pair in words, for the load dialogs of the terminal and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dflash_local.load_config import FUSED
from dflash_local.tables import Column, amount, gib, rate, tokens
from dflash_local.ui.plan_text import drafted_speed

if TYPE_CHECKING:
    from dflash_local.app.load_choices import LoadChoice, LoadChoices

NO_DRAFTER = "no drafter"
COLUMNS = (
    Column("Weights", shrinks=True),
    Column("Context", right=True),
    Column("Memory", right=True),
    Column("Plain", right=True),  # tokens/s, as ``basis`` says below
    Column("Drafted", right=True),
    Column("Engine"),
    Column("Download", right=True),
)


class ChoiceRow(NamedTuple):
    """Holds one way to load a pair: a text for each of ``COLUMNS``, and what is to be known beside them."""

    cells: tuple[str, ...]
    remark: str


def choice_row(choice: LoadChoice) -> ChoiceRow:
    """Word one way; that which does not fit has its reason as the remark, else what its weights are."""
    plan, prediction = choice.plan, choice.option.prediction
    engine = plan.engine if plan.engine == FUSED else f"{plan.engine} (slow)"
    download = "here" if choice.here else gib(choice.download_gib, choice.computed)
    cells = (
        choice.option.name,
        tokens(plan.context) if choice.fits else "does not fit",
        amount(plan.ledger.total),
        "-" if prediction is None else rate(prediction.times[0].plain_tokens_per_s),
        _drafted(choice),
        engine,
        download,
    )
    return ChoiceRow(cells, choice.option.fidelity if choice.fits else plan.reason)


def _drafted(choice: LoadChoice) -> str:
    prediction = choice.option.prediction
    if not choice.plan.load.draft:
        return NO_DRAFTER
    return "-" if prediction is None else drafted_speed(prediction, prediction.times[0])


def basis(choices: LoadChoices) -> str:
    """Say what the predicted speeds rest on; empty where there are none."""
    found = next((each.option.prediction for each in choices.choices if each.option.prediction is not None), None)
    if found is None:
        return ""
    context = tokens(found.times[0].context)
    lengths = f"; acceptance: {found.acceptance.source}" if choices.asked.draft and found.acceptance else ""
    return f"tokens/s behind {context} tokens of context, predicted: {found.basis}{lengths}"
