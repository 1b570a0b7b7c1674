"""A plan in words, for show, plan and the page: machine, engine, ledger, what fits, and what the figures leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_local.app.fitting import Shapes, inferred, per_token, too_big
from dflash_local.loaded import BASICS
from dflash_local.tables import UNKNOWN, Column, amount, gib, indented, rate, table, tokens, wrapped

if TYPE_CHECKING:
    from dflash_local.app.recommending import PairPlans, VariantPlan
    from dflash_local.planner.machine import Machine
    from dflash_local.planner.plan import Plan
    from dflash_local.planner.speed import ExpectedAcceptance, Prediction, Times

MEASURED_PROMPT = 8192  # tokens of the prompts that predictions were fitted to
HELPS = 1.1  # times plain speed from which drafting is said to help: predictions are no finer


def machine_line(where: Machine) -> str:
    """Write ``CPU, 13.5 GiB usable of 15.6 GiB (no GPU was found)``."""
    why = f" ({where.why})" if where.why else ""
    return f"{where.name}, {amount(where.free)} {where.room} of {amount(where.memory)}{why}"


def engine_line(found: Plan) -> str:
    """Write ``engine: fused``, whether that has run on such a card, and when all of its context is taken."""
    from dflash_local.planner.reported import standing

    verified = [standing(found)] if standing(found) else []
    if found.engine != "fused":
        remark = rounding_remark(found)
        line = ", ".join([f"engine: {found.engine}", *verified, *([remark] if remark else [])])
        slow = f"{line}; {found.slow}, which is slow: with --mode ar the fused engine runs the target alone"
        return slow if found.slow else line
    words = ["engine: fused", *verified, *found.load.described(BASICS)]
    return f"{', '.join(words)}; it reserves the whole context when it is loaded"


def detail_lines(name: str, plans: PairPlans, width: int, details: bool = True) -> list[str]:
    """Tell what stands behind the verdict: engine, speeds by context, every row of memory, what fits and why not.

    Args:
        details: False only says how to see them.
    """
    found, known = plans.plan, plans.known
    if found is None or known is None:
        return []
    if not details:
        return wrapped("--details shows every row of memory, all that fits, and speeds by context", width)
    lines = []
    if found.runs_on == "local":
        context = f"context {found.context:,}" if found.context else "context unknown"
        drafting = f"block {found.block_size or UNKNOWN}" if found.load.draft else "no drafter"
        word = "fits" if found.fits else "does not fit"
        lines += wrapped(f"{plans.summary.pair} in {found.format}, {context}, {drafting}: {word}", width)
        lines += wrapped(f"on {machine_line(found.machine)}", width)
        lines += [*wrapped(engine_line(found), width), *summary_lines(name, plans, width), ""]
    lines += indented(ledger_lines(found, width - 2))
    lines += indented(wrapped(per_token_text(known), width - 2))
    if plans.table:
        lines += ["", "what fits", *indented(fit_lines(known, plans.table, width - 2))]
    if plans.variants:
        lines += ["", "pre-quantised", *indented(variant_lines(plans.variants, width - 2))]
    texts = remarks(known, width - 2)
    return [*lines, *([""] if texts else []), *indented(texts)]


def summary_lines(name: str, plans: PairPlans, width: int) -> list[str]:
    """Tell how to take the best weights, what is fetched, why finer ones do not fit, and how fast they will be."""
    from dflash_local.planner.room import described, room_made

    found = plans.summary
    best = found.best
    if best is None or found.recommendation is None:
        return []
    lines, better = [], found.recommendation.next_better
    if best.arguments:
        lines += wrapped(f"weights: {best.weights.name}, {best.fidelity}; their fidelity is not known", width)
        lines += wrapped(f"take them with: dflash chat {name} {best.arguments}", width)
    if made := described(room_made(best.plan.load)):
        lines += wrapped(f"for this context: {made}", width)
    more = plans.more_context
    if more is not None:
        lines += wrapped(f"more context: {more.line}", width)
    lacking, computed = plans.to_fetch
    if lacking != 0:
        lines += wrapped(f"to fetch: {gib(lacking, computed)}{', computed from shapes' if computed else ''}", width)
    elif found.download_gib != 0:
        lines += wrapped("to fetch: nothing, it is on this machine", width)
    if better is not None:
        lines += wrapped(f"{better.weights.name}: {better.plan.reason}", width)
    return [*lines, *speed_lines(best.prediction, width)]


def speed_lines(found: Prediction | None, width: int) -> list[str]:
    """Predict tokens per second by context, and say what that rests on."""
    if found is None:
        return []
    titles = ("CONTEXT", "PLAIN", "DRAFTED", "FIRST TOKEN")
    columns = tuple(Column(title, right=True) for title in titles)
    rows = []
    for one in found.times:
        plain, drafted = f"{rate(one.plain_tokens_per_s)} tok/s", drafted_speed(found, one)
        first = "-" if one.prompt_ms is None else f"{seconds(one.prompt_ms / 1e3)} s"
        rows.append((tokens(one.context), plain, drafted if drafted == "-" else f"{drafted} tok/s", first))
    lengths = found.acceptance
    source = [] if lengths is None else [f"acceptance length {_span(lengths)}: {lengths.source}"]
    if any(one.prompt_ms is not None for one in found.times):
        source.append(f"first token: of a prompt as long as the context; beyond {tokens(MEASURED_PROMPT)} extrapolated")
    return [
        "",
        *wrapped(f"predicted speed, {found.basis}", width),
        *indented(table(columns, rows, width - 2)),
        *(line for text in (*source, *_verdict(found)) for line in indented(wrapped(text, width - 2))),
    ]


def seconds(count: float) -> str:
    return f"{count:.2g}" if count < 10 else f"{count:.0f}"


def _verdict(found: Prediction) -> list[str]:
    """Say in a sentence whether drafting helps; none where that is not known."""
    if found.gain is None:
        return []
    low, high = found.gain
    span = f"{low:.1f} to {high:.1f} times plain speed"
    if high < HELPS:
        return [f"drafting does not help here: {span}; --mode ar is faster"]
    return [f"drafting helps here: {span}" if low >= HELPS else f"drafting helps with some texts only: {span}"]


def _span(lengths: ExpectedAcceptance) -> str:
    low, high = f"{lengths.low:.3g}", f"{lengths.high:.3g}"
    return low if low == high else f"{low} to {high}"


def drafted_speed(found: Prediction, one: Times) -> str:
    """Write tokens per second with the drafter, ``320 to 610``; a dash where none is expected."""
    return speed_range(found.drafted_tokens_per_s(one))


def speed_range(found: tuple[float, float] | None) -> str:
    """Write ``320 to 610``; a dash for none."""
    if found is None:
        return "-"
    low, high = map(rate, found)
    return low if low == high else f"{low} to {high}"


def rounding_remark(found: Plan) -> str:
    """Say what rounding weights as they are read does on the reference engine; empty where it keeps the codes."""
    if found.load.bitsandbytes:
        return "bitsandbytes: slow"
    return "decoded again: saves no memory here" if found.engine != "fused" and found.load.quantize else ""


def ledger_lines(found: Plan, width: int) -> list[str]:
    """Write the memory of a plan, line by line, and what it comes to."""
    book = found.ledger
    columns = (Column("MEMORY"), Column("SIZE", right=True), Column("", shrinks=True))
    rows = [(line.name, amount(line.bytes), line.note) for line in book.lines]
    on_host = [(line.name, amount(line.bytes), f"in host memory, not counted; {line.note}") for line in book.host]
    if found.runs_on == "local":
        rows.append(("running", amount(book.running), "all of the above"))
        if book.loading.bytes:
            rows.append((book.loading.name, amount(book.loading.bytes), book.loading.note))
        if book.reserve.bytes:
            rows.append((book.reserve.name, amount(book.reserve.bytes), book.reserve.note))
        rows.append(("needed", amount(book.total), f"of {amount(found.machine.free)} {found.machine.room}"))
        rows += on_host
        kept = {"in host memory": found.load.cache_memory, "on disk": found.load.cache_disk}
        rows += [("conversations", gib(size), f"{place}, not counted; at most") for place, size in kept.items() if size]
    return table(columns, rows, width)


def fit_lines(known: Shapes, plans: tuple[Plan, ...], width: int) -> list[str]:
    """Tell what fits at which context in which format, or why not; the engine's objections stand below."""
    from dflash_local.planner.formats import refusal

    columns = (
        Column("FORMAT"),
        Column("FITS"),
        Column("CONTEXT", right=True),
        Column("NEEDS", right=True),
        Column("", shrinks=True),
    )
    rows, reasons = [], []
    for plan in plans:
        total, refused = plan.ledger.total, refusal(known.target, plan.load.quantize)
        if refused:
            rows.append((plan.format, "no", "-", "-", ""))
            reasons += wrapped(refused if refused.startswith(plan.format) else f"{plan.format}: {refused}", width)
            continue
        fits = "yes" if plan.fits else (UNKNOWN if total is None else "no")
        reasons += wrapped(plan.reason, width) if total is None else []
        rows.append((plan.format, fits, tokens(plan.context), amount(total), _how(plan)))
    return [*table(columns, rows, width), *reasons]


def variant_lines(plans: tuple[VariantPlan, ...], width: int) -> list[str]:
    """Tell what each pre-quantised target takes on a machine."""
    columns = (
        Column("VARIANT"),
        Column("FITS"),
        Column("CONTEXT", right=True),
        Column("NEEDS", right=True),
        Column("", shrinks=True),
    )
    rows, reasons = [], []
    for one in plans:
        name = one.variant.name
        if one.plan is None:
            rows.append((name, UNKNOWN, "-", "-", "its recipe is not known before it is here"))
        elif not one.fits and not too_big(one.plan):
            rows.append((name, "no", "-", "-", ""))
            reasons += wrapped(f"{name}: {one.plan.reason}", width)
        else:
            context, total = tokens(one.plan.context), amount(one.plan.ledger.total)
            rows.append((name, "yes" if one.fits else "no", context, total, _how(one.plan)))
    return [*table(columns, rows, width), *reasons] if rows else []


def _how(found: Plan) -> str:
    """Say what a plan takes beside its format to fit, or by how much it does not."""
    from dflash_local.planner.reported import standing

    total = found.ledger.total
    if not found.fits and total is not None:
        return f"{amount(total - found.machine.free)} too little"
    precision = found.load.drafter_precision if found.engine == "fused" else "auto"
    host = " and ".join(line.name for line in found.ledger.moved)
    parts = (
        rounding_remark(found),
        "" if precision == "auto" else f"drafter precision {precision}",
        f"{host} in host memory" if host else "",
        standing(found) if found.fits else "",
    )
    return "; ".join(part for part in parts if part)


def remarks(known: Shapes, width: int) -> list[str]:
    """Say what the figures leave out, and what they rest on that no source quotes."""
    texts = ["the drafter's shape is unknown: its memory is not counted"] if known.drafter_unknown else []
    if known.target.quantization is not None and known.target.quantization.remark:
        texts.append(known.target.quantization.remark)
    return [line for text in (*texts, *inferred(known)) for line in wrapped(text, width)]


def per_token_text(known: Shapes) -> str:
    """Say in one sentence what a token of context takes."""
    found = per_token(known)
    parts = [f"target KV {amount(found['target_kv'])}", f"drafter KV {amount(found['drafter_kv'])}"]
    if known.drafter is None:
        del parts[1]
    text = f"in 16 bits a token takes {' and '.join(parts)}"
    state = found["recurrent_state"]
    return f"{text}; the recurrent state {amount(state)} whatever the context" if state else text
