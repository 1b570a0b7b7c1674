"""Measured tasks as a JSON-able dict and as Markdown tables in the cards' form, beside what is published.

A report on a server holds no address: it can be published. What was not measured or reported is absent, not estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from msgspec import structs

from dflash_local.bench.report import TOY, Found, finite, number
from dflash_local.bench.tasks import figures
from dflash_local.bench.tasks.card_table import Setting, differences, joined, markdown, source_lines, sources, times
from dflash_local.bench.tasks.figures import Percentiles, TaskFigures
from dflash_local.bench.tasks.results import ResultsFile
from dflash_local.bench.tasks.table import Subject, TaskOptions
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.row import Published

MEANINGS = (
    "Plain and DFlash tok/s, speed-up: output tokens over the time of the replies, prompts included; on a server over "
    "the wall clock of the longest uninterrupted part. Acceptance length, as the cards: mean over the cycles of each "
    "reply, then over replies. Mean acceptance length, as vLLM: 1 + accepted drafts / drafting cycles, all replies "
    "together. Single requests: decode and end-to-end tok/s, time to the first token and to the last, p50 / p90 / p99. "
    "Later turns of a prompt follow the replies of their own side. A server with a prefix cache has prompts that come "
    "again at another number of requests, which shortens the time to the first token."
)
CARD = ("Task", "", "At a time", "Block", "Plain tok/s", "DFlash tok/s", "Speed-up", "Acceptance length")
OF_PLAIN = ("Plain tok/s", "Speed-up", "Text equal")
SINGLE = (
    "Task",
    "At a time",
    "",
    "Prompts",
    "Failed",
    "Decode tok/s",
    "End to end tok/s",
    "First token, ms",
    "Reply, s",
)


@dataclass(frozen=True, slots=True)
class Side:
    """One way of answering: its results and their figures. ``block``: 0 where that is not known."""

    title: str
    file: ResultsFile
    figures: TaskFigures
    block: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """One subject with so many requests at a time.

    Attributes:
        plain: without drafts; None where nothing wrote that. published: cells of the same concurrency.
    """

    subject: Subject
    concurrency: int
    drafted: Side
    plain: Side | None
    published: tuple[Published, ...]

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.drafted,) if self.plain is None else (self.drafted, self.plain)

    def setting(self, options: TaskOptions) -> Setting:
        blocks, prompts = (self.drafted.block,), self.drafted.figures.prompts
        return Setting(blocks, options.max_new_tokens, options.thinking, prompts, self.concurrency)

    @property
    def speedup(self) -> float | None:
        return None if self.plain is None else figures.speedup(self.drafted.figures, self.plain.figures)

    @property
    def equal(self) -> tuple[int, int] | None:
        """Prompts with the same replies on both sides, of those that both answered; None without a second one."""
        if self.plain is None:
            return None
        return figures.equal(self.drafted.file, self.plain.file, [item.id for item in self.subject.items])


def presented(
    head: dict[str, Any], how: str, pair: Pair, measured: Sequence[MeasuredTask], options: TaskOptions
) -> Found:
    """Return every figure, and of each prompt whether it failed; and the tables, and what was measured how and where.

    Texts stay in the results' own files.

    Args:
        head: what the report begins with. how: what replied, in words.
    """
    report = finite(
        {
            **head,
            "max_new_tokens": options.max_new_tokens,
            "thinking": options.thinking,
            "temperature": 0.0,
            "meanings": MEANINGS,
            "tasks": [_task(one, options) for one in measured],
        }
    )
    lines = [
        f"**{pair.label}**{how}, thinking {'on' if options.thinking else 'off'}, temperature 0, at most "
        f"{options.max_new_tokens} tokens a reply",
        "",
    ]
    cited = [(cell, one.setting(options)) for one in measured for cell in one.published]
    lines += _card_table(measured, sources(cited))
    rows = dict.fromkeys(_single(one, side) for one in measured for side in one.sides)  # blocks share the plain side
    lines += ["", *markdown(SINGLE, list(rows)), "", MEANINGS, "", *source_lines(cited), *_origins(measured)]
    return report, [*lines, "", f"({TOY})"] if pair.toy else lines


def _task(one: MeasuredTask, options: TaskOptions) -> dict[str, Any]:
    subject, equal = one.subject, one.equal
    return {
        "task": subject.name,
        "title": subject.title,
        "data": dict(subject.data),
        "concurrency": one.concurrency,
        "block_size": one.drafted.block or None,
        "dflash": _side(one.drafted, subject),
        "plain": None if one.plain is None else _side(one.plain, subject),
        "speedup": one.speedup,
        "equal": None if equal is None else {"prompts": equal[0], "of": equal[1]},
        "published": [
            {**structs.asdict(cell), "differences": differences(cell, one.setting(options))} for cell in one.published
        ],
    }


def _side(side: Side, subject: Subject) -> dict[str, Any]:
    found = side.figures.throughput
    throughput = found and {
        "tokens_per_s": found.tokens_per_s,
        "tokens": found.tokens,
        "wall_s": found.wall_s,
        "prompts": len(found.prompts),
        "uninterrupted": found.whole,
    }
    results = [side.file.results[item.id] for item in subject.items]
    rows = [{"id": one.id, "error": one.error or None} for one in results]
    return {**asdict(side.figures), "throughput": throughput, "results": str(side.file.path), "rows": rows}


def _card_table(measured: Sequence[MeasuredTask], cited: Sequence[str]) -> list[str]:
    """Lay out own and published rows; without a plain side its columns are absent where nobody published them."""
    rows: list[tuple[str, ...]] = []
    for one in measured:
        rows.append(_own(one))
        for cell in one.published:
            rows.append(
                (
                    one.subject.title,
                    f"published [{cited.index(cell.source) + 1}]",
                    str(cell.concurrency),
                    "-" if cell.block is None else str(cell.block),
                    number(cell.plain_tokens_per_s, 0),
                    number(cell.tokens_per_s, 0),
                    times(cell.speedup),
                    number(cell.acceptance_length, 2),
                    *("-", "-"),
                )
            )
    titles = (*CARD, "Mean acceptance length", "Text equal")
    published = (cell for one in measured for cell in one.published)
    plain = any(one.plain for one in measured) or any(cell.plain_tokens_per_s is not None for cell in published)
    kept = [place for place, title in enumerate(titles) if plain or title not in OF_PLAIN]
    return markdown([titles[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _own(one: MeasuredTask) -> tuple[str, ...]:
    found, equal = one.drafted.figures, one.equal
    return (
        one.subject.title,
        "here",
        str(one.concurrency),
        str(one.drafted.block or "-"),
        "-" if one.plain is None else _rate(one.plain.figures),
        _rate(found),
        times(one.speedup),
        number(found.accepted.length, 2),
        number(found.accepted.mean, 2) + _share(found.accepted.prompts, found),
        "-" if equal is None else f"{equal[0]} of {equal[1]}",
    )


def _rate(found: TaskFigures) -> str:
    throughput = found.throughput
    return "-" if throughput is None else number(throughput.tokens_per_s, 1) + _share(len(throughput.prompts), found)


def _share(prompts: int, found: TaskFigures) -> str:
    """Say behind a figure that is of other than all prompts of how many it is."""
    return "" if prompts in (0, found.prompts) else f" (of {prompts} prompts)"


def _single(one: MeasuredTask, side: Side) -> tuple[str, ...]:
    found = side.figures

    def shown(values: Percentiles, factor: float, digits: int) -> str:
        return joined((values.p50, values.p90, values.p99), factor, digits)

    return (
        one.subject.title,
        str(one.concurrency),
        side.title,
        str(found.prompts),
        str(found.failed),
        shown(found.decode_rates, 1, 1),
        shown(found.end_to_end_rates, 1, 1),
        shown(found.ttft_s, 1e3, 0),
        shown(found.latency_s, 1, 2),
    )


def _origins(measured: Sequence[MeasuredTask]) -> Iterable[str]:
    """Say where prompts and results are, what failed, and what a figure is not of."""
    for name in dict.fromkeys(one.subject.name for one in measured):
        group = [one for one in measured if one.subject.name == name]
        yield f"- {group[0].subject.title}: {group[0].subject.origin}; results in {group[0].drafted.file.path.parent}"
        remarks = [
            f"  - {one.concurrency} at a time, {side.title}: {line}"
            for one in group
            for side in one.sides
            for line in _remarks(one, side)
        ]
        yield from dict.fromkeys(remarks)


def _remarks(one: MeasuredTask, side: Side) -> Iterable[str]:
    found, throughput = side.figures, side.figures.throughput
    if found.accepted.mean is None and side is one.drafted:
        yield f"the acceptance length is not known: {found.accepted.source}"
    if throughput is not None:
        if len(throughput.prompts) < one.concurrency:
            yield f"throughput is of {len(throughput.prompts)} prompts, so that fewer requests ran at a time"
        if len(throughput.prompts) < found.prompts:
            yield f"measured in {found.parts} parts; throughput is of the longest alone"
        if not throughput.whole:
            yield "that part ended early: what was under way then counts as time, not as tokens"
        if throughput.tokens is None:
            yield "the server reports no token counts, so that speeds are not known"
    errors = dict.fromkeys(result.error for item in one.subject.items if (result := side.file.results[item.id]).error)
    yield from (f"failed: {error}" for error in list(errors)[:3])
