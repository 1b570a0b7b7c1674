"""``dflash bench --fidelity``: a quantised target against its original, one loaded after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_local.app.resolve import choose
from dflash_local.catalog.bundled import Pair
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.measuring import save_report
from dflash_local.errors import UsageError
from dflash_local.load_config import LoadConfig

if TYPE_CHECKING:
    from dflash_local.bench.prompts import Prompt

ALONE = LoadConfig(draft=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the original answers, and where the figures go."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    thinking: bool
    report: Path | None
    as_json: bool


def original_of(call: Invocation, model: str, pair: Pair, named: str | None, load: LoadConfig) -> Pair:
    """The plain target that a quantised one was made of: itself, before it was rounded; or another.

    Args:
        named: with ``--original``.

    Raises:
        UsageError: nothing tells which. DownloadError: it is not on this machine.
    """
    if named is not None:
        return call.pair(named, None, ALONE)
    if load.quantize is not None:
        return pair
    choice = choose(model, None, call.user)
    if choice.row is None or choice.row.target is None or choice.target == choice.row.target:
        raise UsageError(
            f"{pair.name} is not known as a quantised target",
            "give --quantize, or a quantised checkpoint with --original MODEL",
        )
    return call.pair(choice.row.name, None, ALONE)


def measure_fidelity(call: Invocation, pair: Pair, original: Pair, load: LoadConfig, asked: Asked) -> None:
    """Load the original, then the quantised target, both without a drafter; tell how far apart they are."""
    console, alone = call.console, replace(load, draft=False)
    with call.session(original, replace(alone, quantize=None)) as session:
        from dflash_local.bench import fidelity, fidelity_report

        with console.progress() as line:
            texts = fidelity.score_original(session, asked.prompts, asked.max_new_tokens, asked.thinking, line)
        before = session.facts
    del session
    fidelity.give_back()
    with call.session(pair, alone) as session:
        with console.progress() as line:
            found = fidelity.distances(session, texts, line)
        facts = session.facts
    result = fidelity_report.fidelity_report(pair, facts, original, before, texts, found)
    if asked.as_json:
        console.json(result)
    else:
        for text in fidelity_report.fidelity_lines(pair, facts, before, texts, found):
            console.data(text)
    if asked.report is not None:
        save_report(asked.report, result, console)
