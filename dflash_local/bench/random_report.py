"""Times over random weights as a JSON-able dict and as lines of text; each figure is measured, projected or assumed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

import torch

from dflash_local.bench import provenance
from dflash_local.bench.baselines import Baseline
from dflash_local.bench.random_pair import RandomPair
from dflash_local.bench.random_run import KEPT, AtContext, MeasuredFigure, Measures, Place, RandomFigures
from dflash_local.bench.report import SCHEMA, TOY, finite, number, table
from dflash_local.catalog.row import Published, lengths_of
from dflash_local.planner.cards import find_bandwidth

NOTE = "random weights: times are real, text and acceptance are not; acceptance lengths are stated, not measured"
GIGA = 1e9
USUAL = (2.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class StatedAcceptance:
    """An acceptance length to project tokens per second at, of a cycle of ``rows`` (None: of any), and its source."""

    length: float
    rows: int | None = None
    task: str = ""
    generation: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Assumption:
    """Acceptance lengths and where they come from: ``given``, ``published`` or ``assumed``."""

    origin: str
    lengths: tuple[StatedAcceptance, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Blocks that the lengths belong to."""
        return tuple(sorted({each.rows for each in self.lengths if each.rows is not None}))

    def of(self, rows: int) -> tuple[StatedAcceptance, ...]:
        """Those that a cycle of so many rows can reach."""
        return tuple(each for each in self.lengths if each.rows in (None, rows) and each.length <= rows)


def assumption(given: Sequence[float], published: Sequence[Published], block: int) -> Assumption:
    """What was given, else what is published for single requests of blocks up to ``block``, else usual lengths."""
    if given:
        return Assumption("given", tuple(StatedAcceptance(length) for length in given))
    cells = [cell for cell in lengths_of(published, None) if (cell.block or block) <= block]
    lengths = [
        StatedAcceptance(cell.acceptance_length, cell.block or block, cell.task, cell.generation, cell.source)
        for cell in cells
        if cell.acceptance_length is not None
    ]
    if lengths:
        return Assumption("published", tuple(sorted(lengths, key=lambda each: (each.rows or 0, each.length))))
    return Assumption("assumed", tuple(StatedAcceptance(length) for length in USUAL if length <= block))


def card(place: Place) -> str:
    return torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"


def random_report(
    pair: RandomPair,
    measures: Measures,
    place: Place,
    measured: RandomFigures,
    stated: Assumption,
    baselines: Sequence[Baseline],
) -> dict[str, Any]:
    """Every figure."""
    specified = find_bandwidth(card(place))
    prefill: dict[str, Any] | None = None
    if measured.prefill_s is not None:
        rate = measures.prefill / measured.prefill_s
        sizes = {"tokens": measures.prefill, "chunk": measures.load.prefill_chunk}
        prefill = {**sizes, "s": measured.prefill_s, "tokens_per_s": rate}
    return finite(
        {
            "report": "dflash bench --weights random",
            "schema": SCHEMA,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "pair": pair.target,
            "note": f"{NOTE} ({TOY})" if pair.toy else NOTE,
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "engine": "fused",
            "weights": "random",
            "stored": None if pair.model.quantization is None else pair.model.quantization.name,
            "target": pair.target,
            "drafter": pair.drafter,
            "generation": pair.generation,
            "drafter_precision": measured.drafter_precision,
            "block_size": pair.config.block_size,
            "exact": measures.load.exact,
            "kv_cache": measures.load.kv_cache,
            "dtype": str(place.dtype).removeprefix("torch."),
            "device": str(place.device),
            "card": card(place),
            "assumed": {**pair.assumed, "rows_folded_in_a_cycle": KEPT, "acceptance": stated.origin},
            "measured": {
                "replays": place.replays,
                "bandwidth": {"copy": measured.copy, "read": measured.read, "unit": "bytes/s"},
                "prefill": prefill,
                "routing": None if pair.model.dense else measures.routing,
                "at": [_measured(at, measured.bandwidth, specified) for at in measured.at],
                "peak_bytes": measured.peak,
                "products": measured.products,
                "notices": list(measured.notices),
                "baselines": [asdict(baseline) for baseline in baselines],
            },
            "specified": {"bandwidth": None if specified is None else specified * GIGA, "unit": "bytes/s"},
            "projected": [_projected(at, stated) for at in measured.at],
        }
    )


def _measured(at: AtContext, bandwidth: float, specified: float | None) -> dict[str, Any]:
    def figure(one: MeasuredFigure) -> dict[str, float | None]:
        return {
            "ms": one.ms,
            "bytes": one.bytes,
            "of_measured_bandwidth": one.rate / bandwidth,
            "of_specified_bandwidth": None if specified is None else one.rate / (specified * GIGA),
        }

    single = {"ar_step": at.step, "draft": at.draft, "context_rows": at.inject}
    return {
        "context": at.context,
        **{name: figure(one) for name, one in single.items()},
        "verify": {str(rows): figure(one) for rows, one in at.verify.items()},
        "cycle": {str(rows): figure(one) for rows, one in at.cycle.items()},
        "experts": {str(rows): count for rows, count in sorted(at.experts.items())} or None,
    }


def _projected(at: AtContext, stated: Assumption) -> dict[str, Any]:
    return {
        "context": at.context,
        "ar_tokens_per_s": 1e3 / at.step.ms,
        "cycles": [
            {
                "rows": rows,
                "acceptance_length": each.length,
                "tokens_per_s": each.length / one.ms * 1e3,
                "ratio": each.length * at.step.ms / one.ms,
                **{name: getattr(each, name) or None for name in ("task", "generation", "source")},
            }
            for rows, one in at.cycle.items()
            for each in stated.of(rows)
        ],
    }


def random_lines(
    pair: RandomPair,
    measures: Measures,
    place: Place,
    measured: RandomFigures,
    stated: Assumption,
    baselines: Sequence[Baseline],
    width: int = 80,
) -> list[str]:
    """The tables and what the figures are, no line wider than ``width`` if words allow."""
    name, specified = card(place), find_bandwidth(card(place))
    dtype = str(place.dtype).removeprefix("torch.")
    dtype = dtype if pair.model.quantization is None else f"{pair.model.quantization.name} computed in {dtype}"
    caches = "" if measures.load.kv_cache == "auto" else f", keys and values in {measures.load.kv_cache}"
    texts = [
        f"{pair.target} with random weights of its true shapes, {dtype} on {name}",
        f"drafter {pair.drafter}, generation {pair.generation or 'unknown'}, block {pair.config.block_size}, "
        f"drafter precision {measured.drafter_precision}{', strict' if measures.load.exact else ''}{caches}",
        f"bandwidth: {measured.bandwidth / GIGA:.0f} GB/s measured here, "
        + ("specified: unknown" if specified is None else f"{specified:.0f} GB/s specified"),
    ]
    if not pair.model.dense:
        texts.append(f"routing of a block's rows to experts: {measures.routing}, set for the measurement")
    lines = _folded(texts, width)
    for at in measured.at:
        lines += ["", *_table(at, measured.bandwidth, specified, stated), *_folded(_spans(at, stated), width)]
        if at.experts:
            counts = ", ".join(f"{count:.1f} at {rows}" for rows, count in sorted(at.experts.items()))
            lines += _folded([f"different experts of a layer by verified rows, measured: {counts}"], width)
    plain = f"plain decoding, projected: {1e3 / measured.at[0].step.ms:.0f} tok/s"
    if measured.prefill_s:
        rate = measures.prefill / measured.prefill_s
        plain = f"prefill of {measures.prefill} tokens, measured: {measured.prefill_s:.2f} s, {rate:.0f} tok/s; {plain}"
    how = "CUDA graph replays" if place.device.type == "cuda" else "runs by the host's clock, without kernels"
    legend = (
        f"ms, verify: measured, medians of {place.replays} {how}; GB: weights, keys, values and states read; "
        f"measured, specified: share of those bandwidths (verify: of the measured one). {_lengths(pair, stated)}"
    )
    lines += _folded([plain, *map(_baseline, baselines), *measured.notices, legend, *_assumed(pair), NOTE], width)
    return [*lines, f"({TOY})"] if pair.toy else lines


def _folded(texts: Iterable[str], width: int) -> list[str]:
    wide = max(width, 40)
    return [
        line for text in texts for line in textwrap.wrap(text, wide, subsequent_indent="  ", break_on_hyphens=False)
    ]


def _table(at: AtContext, bandwidth: float, specified: float | None, stated: Assumption) -> list[str]:
    """A row per figure; where the lengths hold for every cycle, projected tokens per second beside it."""
    free = [each.length for each in stated.lengths if each.rows is None]
    titles = [f"{at.context} tokens", "ms", "GB", "measured", "specified", "verify", *(f"at {n:g}" for n in free)]

    def row(name: str, one: MeasuredFigure, reach: int = 0) -> list[str]:
        verify = at.verify.get(reach)
        return [
            name,
            f"{one.ms:.2f}",
            f"{one.bytes / GIGA:.2f}",
            f"{one.rate / bandwidth:.0%}",
            "unknown" if specified is None else f"{one.rate / (specified * GIGA):.0%}",
            "-" if verify is None else f"{verify.ms:.2f} {verify.rate / bandwidth:.0%}",
            *(number(length / one.ms * 1e3 if length <= reach else None, 0) for length in free),
        ]

    cycles = (row(f"cycle of {rows}", one, rows) for rows, one in at.cycle.items())
    return table(titles, [row("plain step", at.step), row("draft", at.draft), *cycles])


def _spans(at: AtContext, stated: Assumption) -> Iterator[str]:
    """Lowest and highest tokens per second at the lengths that were published for a block."""
    for rows, one in at.cycle.items():
        own = [each for each in stated.of(rows) if each.rows is not None]
        if own:
            low, high = (
                f"{each.length / one.ms * 1e3:.0f} ({each.task}, {each.length:g})" for each in (own[0], own[-1])
            )
            yield f"cycle of {rows}, projected: {low} to {high} tok/s"


def _lengths(pair: RandomPair, stated: Assumption) -> str:
    """Where the acceptance lengths come from, and whose they are."""
    if stated.origin != "published":
        origin = "given on the command line" if stated.origin == "given" else "assumed, none is published for this pair"
        return f"At N: projected tok/s, N / cycle; these acceptance lengths are {origin}."
    of = ", ".join(sorted({each.generation or "unknown" for each in stated.lengths}))
    sources = ", ".join(sorted({each.source.partition(":")[0] for each in stated.lengths}))
    here = "" if of == pair.generation else f" while the shapes here are {pair.generation or 'unknown'}"
    return f"Projected: published acceptance length / cycle; lengths of generation {of}{here}: {sources}."


def _assumed(pair: RandomPair) -> Iterator[str]:
    for role, values in pair.assumed.items():
        yield f"assumed of the {role}, quoted by no source: " + ", ".join(
            f"{name.rpartition('.')[2]} {_value(value)}" for name, value in values.items()
        )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{name} {_value(inner)}" for name, inner in value.items()) + ")"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def _baseline(baseline: Baseline) -> str:
    if baseline.reason:
        return f"{baseline.name}: not measured, {baseline.reason}"
    parts = [f"{baseline.step_ms:.2f} ms a token"] if baseline.step_ms is not None else []
    parts += [f"{baseline.cycle_ms:.2f} ms a cycle of {baseline.rows}"] if baseline.cycle_ms is not None else []
    return f"{baseline.name}, measured at {baseline.context} tokens: {', '.join(parts)}"
