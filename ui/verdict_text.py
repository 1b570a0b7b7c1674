"""The verdict that opens ``plan`` and ``show``: four lines on weights, context, speed and what would make it better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_local.app.recommending import PairPlans, Summary
from dflash_local.planner import cards
from dflash_local.planner.acceptance_record import MEASURED
from dflash_local.planner.machine import DISPLAY
from dflash_local.planner.plan import ROOMY
from dflash_local.planner.recommend import Recommendation
from dflash_local.planner.reported import measured_by_others
from dflash_local.planner.speed import TYPICAL
from dflash_local.tables import GIB, UNKNOWN, amount, field, gib, rate, tokens, wrapped
from dflash_local.ui.plan_text import HELPS, speed_range

if TYPE_CHECKING:
    from dflash_local.app.load_choices import LoadChoice, LoadChoices
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.recommend import Option
    from dflash_local.planner.speed import Prediction

LABEL = 11  # columns of the labels, two of them in front
NO_SHAPE = "unknown: no source tells the target's shape"
LACKS_SPEED = {
    "fused": "unknown: nothing is known of this card's speed; --gpu NAME plans for one that is known",
    "reference": "not predicted: the reference engine runs it, which is slow",
    "cpu": "unknown: this CPU was not measured yet; dflash plan does that once",
}


def verdict_lines(name: str, plans: PairPlans, width: int, server: str = "") -> list[str]:
    """Say in a heading and four lines what a pair comes to on a machine.

    Args:
        server: why it does not run in this process; empty where it does.
    """
    head, lines = verdict(name, plans, server)
    return [*wrapped(head, width), *_laid_out(lines, width)]


def _laid_out(lines: Iterable[tuple[str, str]], width: int) -> list[str]:
    return [line for label, text in lines for line in field(f"  {label}", text, width, LABEL)]


def verdict(name: str, plans: PairPlans, server: str = "") -> tuple[str, Sequence[tuple[str, str]]]:
    """Return the heading, and the lines' labels and texts; see ``verdict_lines``."""
    word, lines = _verdict(plans, server)
    return (f"{name}: {word}" if server else f"{name} on {card_name(plans.where)}: {word}"), lines


def verdict_on_way(choices: LoadChoices, choice: LoadChoice, width: int) -> tuple[str, list[str]]:
    """Say the same of one way to load a pair, heading and lines; what is nearest is another way where one fits."""
    head, lines = verdict_of_way(choices, choice)
    return head, _laid_out(lines, width)


def verdict_of_way(choices: LoadChoices, choice: LoadChoice) -> tuple[str, Sequence[tuple[str, str]]]:
    """Return what ``verdict_on_way`` lays out."""
    fitting = [each.option for each in choices.choices if each.fits and each is not choice]
    rest = tuple(each.option for each in choices.choices if not each.fits)
    ways = Recommendation("balanced", (choice.option, *fitting) if choice.fits else (), rest)
    if not choice.fits and choice.option is not ways.smallest:
        ways = replace(ways, rest=(choice.option,))
    found = Summary(choices.name, "", ways, choice.plan, choice.download_gib, choice.computed)
    to_fetch = choice.download_gib, choice.computed
    word, lines = _verdict(PairPlans(choices.machine, None, found, choice.plan, choices.nearest, to_fetch=to_fetch), "")
    if not choice.fits and fitting:
        lines = [*list(lines)[:-1], ("nearest", f"{fitting[0].name}, which fits")]
    alone = "" if choices.asked.draft else " without its drafter"
    return f"{choices.name}{alone} on {card_name(choices.machine)}: {word}", lines


def card_name(where: Machine) -> str:
    """Write ``RTX 4090 (24 GiB, 1,008 GB/s)``; of main memory what a plan may use."""
    if where.free_now is not None:
        return f"{where.name} ({amount(where.free)} {where.room})"
    speed = cards.find_bandwidth(where.name)
    return f"{where.name} ({where.memory / GIB:.0f} GiB{f', {speed:,.0f} GB/s' if speed else ''})"


def _verdict(plans: PairPlans, server: str) -> tuple[str, Sequence[tuple[str, str]]]:
    """Return a word or two, and the lines' labels and texts."""
    found, summary, known = plans.plan, plans.summary, plans.known
    size = f"{gib(summary.download_gib, summary.computed)} to download"
    if server:
        stored = None if known is None else known.target.quantization
        form = stored.name if stored else NO_SHAPE if found is None else found.format
        return "on a server only", (
            ("weights", f"{form}; {size}"),
            ("context", f"{tokens(found.context)} tokens" if found else UNKNOWN),
            ("speed", "not predicted for servers"),
            ("here", f"no: {server}"),
        )
    if found is None:
        return UNKNOWN, (
            ("weights", f"{NO_SHAPE}; {size}"),
            ("context", UNKNOWN),
            ("speed", UNKNOWN),
            ("better", f"dflash pull {summary.pair} brings the file that tells it"),
        )
    best = summary.best
    if best is not None:
        others = measured_by_others(summary.pair, best.plan)
        return "fits", (
            ("weights", f"{_weights(best)}, {_download(plans)}"),
            ("context", _context(best)),
            ("speed", _speed(best)),
            *([("measured", f"by others on this card: {others}")] if others else []),
            ("better", _better(plans, best)),
        )
    if (total := found.ledger.total) is None or not found.lacking:
        return UNKNOWN, (
            ("weights", f"{found.format}, {size}"),
            ("needs", amount(total)),
            ("missing", f"unknown: {found.reason}"),
            ("nearest", _nearest(plans, found)),
        )
    ways = summary.recommendation
    least = found.format if ways is None or ways.smallest is None else _weights(ways.smallest)
    if ways is not None and len(ways.rest) > 1:
        least = f"{least}, the smallest"
    return "does not fit", (
        ("weights", f"{least}; {size}"),
        ("needs", f"{amount(total)} with {tokens(found.context)} tokens of context"),
        ("missing", f"{amount(found.lacking)}: {amount(found.machine.free)} is {found.machine.room}"),
        ("nearest", _nearest(plans, found)),
    )


def _weights(option: Option) -> str:
    """Name the format, and whose weights are in it."""
    variant = "" if option.weights.variant is None else "variant "
    kept = ", KV cache in 8 bits" if option.coded_kv else ""
    form, name = option.plan.format.partition(" ")[0], option.weights.name
    return f"{name if name.startswith(form) else f'{form}, {variant}{name}'}{kept}"


def _download(plans: PairPlans) -> str:
    lacking, computed = plans.to_fetch
    whole = plans.summary.download_gib
    if lacking == 0:
        return "nothing to download"
    if lacking is not None and whole is not None and lacking < whole:
        return f"{gib(lacking, computed)} of {gib(whole, computed)} to download"
    return f"{gib(lacking, computed)} to download"


def _context(best: Option) -> str:
    context = best.plan.context
    if best.config.context is not None:
        return f"{tokens(context)} tokens, as asked"
    of = "all that the models were made for" if context == best.limit else f"of {tokens(best.limit)}"
    return f"{tokens(context)} tokens{',' if context == best.limit else ''} {of}"


def _speed(best: Option) -> str:
    if best.prediction is not None:
        return f"about {_rates(best.prediction)}{_source(best.prediction)}"
    why = LACKS_SPEED["cpu" if best.plan.machine.kind == "cpu" else best.plan.engine]
    return f"{why}: {best.plan.slow}" if best.plan.slow else why


def _rates(found: Prediction) -> str:
    """Write ``54 tok/s plain, 231 to 359 drafted``."""
    plain, drafted = found.times[0].plain_tokens_per_s, found.drafted_tokens_per_s(found.times[0])
    return f"{rate(plain)} tok/s plain{f', {speed_range(drafted)} drafted' if drafted else ''}"


def _source(found: Prediction) -> str:
    """Say in brackets whose acceptance lengths the drafted figures rest on."""
    lengths = found.acceptance
    if lengths is None:
        return ""
    if lengths.source.startswith(TYPICAL):
        return " (acceptance of similar pairs)"
    return " (acceptance measured here)" if lengths.source.startswith(MEASURED) else " (published acceptance)"


def _better(plans: PairPlans, best: Option) -> str:
    """Name the one thing that would make it better: the first of these that there is."""
    found, recommendation = best.plan, plans.summary.recommendation
    assert recommendation is not None  # it has the best
    if plans.summary.slow or found.crowded:
        return f"{plans.summary.slow}; dflash models shows what is faster" if plans.summary.slow else found.crowded
    if found.slow:
        return "--mode ar: the fused engine runs the target alone"
    more, short = plans.more_context, (found.context or 0) < min(ROOMY, best.limit)
    if more is not None and short:
        return more.short_line
    if best.prediction is not None and best.prediction.gain is not None and best.prediction.gain[1] < HELPS:
        return "--mode ar: drafting does not help here"
    faster = recommendation.faster
    if faster is not None and faster.prediction is not None:
        return f"{faster.arguments or 'the published weights'}: about {_rates(faster.prediction)}, {faster.fidelity}"
    if more is not None:
        return more.short_line
    finer = recommendation.next_better
    if finer is not None and finer.plan.lacking:
        return f"{amount(finer.plan.lacking)} more memory for finer weights: {_weights(finer)}"
    return "nothing that this program knows"


def _nearest(plans: PairPlans, found: Plan) -> str:
    """Say what fits: less of this pair, the card once others leave it, two of them, or a larger one."""
    two = "" if plans.over_two is None else f"two cards like this one with --device balanced ({plans.over_two.name})"
    if (near := plans.nearest) is not None:
        options = replace(near, load=replace(near.load, context=None)).options()
        alone = "" if near.load.draft else " without its drafter"
        less = f"{near.format}{alone}, {tokens(near.context)} tokens of context: {options}"
        return f"{less}; or {two}" if two else less
    where, total = found.machine, found.ledger.total
    if total is None:
        return "dflash models lists what fits here"
    if where.kind == "cuda" and total <= where.memory:
        return f"this card, once other programs leave {amount(found.lacking)} more of it"
    larger = next((card for card in cards.TYPICAL if card[1] * GIB - DISPLAY >= total), None)
    if larger is None and not two:
        return "several cards behind a server; dflash models lists what fits here"
    one = "" if larger is None else f"a card of {larger[1]:.0f} GiB ({larger[0]})"
    return f"{' or '.join(filter(None, (one, two)))}; dflash models lists what fits here"
