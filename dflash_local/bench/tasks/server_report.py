"""What was measured on a server, as a JSON-able dict and as Markdown tables beside what is published.

A report holds no address: it can be published. What was not measured or reported is absent, never estimated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from dflash_local.bench import provenance
from dflash_local.bench.report import SCHEMA, TOY, finite, number
from dflash_local.bench.tasks import server_figures
from dflash_local.bench.tasks.card_table import (
    Setting,
    differences,
    joined,
    markdown,
    source_lines,
    sources,
    times,
)
from dflash_local.bench.tasks.figures import Percentiles
from dflash_local.bench.tasks.server_figures import ServerFigures
from dflash_local.bench.tasks.server_results import LoopFile
from dflash_local.bench.tasks.server_run import Subject
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.row import Published
from dflash_local.remote.server_checks import ServerFacts

MEANINGS = (
    "Plain and DFlash tok/s, speed-up: output tokens of all requests over the wall clock of the longest uninterrupted "
    "part. Acceptance length, as the cards: mean over the cycles of each reply, then over replies. Mean acceptance "
    "length, as vLLM: 1 + accepted drafts / drafting cycles, all replies together. Single requests: decode and "
    "end-to-end tok/s, time to the first token and to the last, p50 / p90 / p99. Prompts come again at every number of "
    "requests: a server with a prefix cache then has them, which shortens the time to the first token."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How everything of a run was measured."""

    max_new_tokens: int
    thinking: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One server's results and their figures."""

    facts: ServerFacts
    file: LoopFile
    figures: ServerFigures


@dataclass(frozen=True, slots=True)
class Measured:
    """One subject with so many requests at a time.

    Attributes:
        plain: of the server without drafts; None where there is none. published: cells of the same concurrency.
    """

    subject: Subject
    concurrency: int
    drafted: Side
    plain: Side | None
    published: tuple[Published, ...]

    @property
    def speedup(self) -> float | None:
        return None if self.plain is None else server_figures.speedup(self.drafted.figures, self.plain.figures)

    @property
    def equal(self) -> tuple[int, int] | None:
        """Prompts with the same replies on both servers, of those that both answered; None without a second one."""
        if self.plain is None:
            return None
        return server_figures.equal(self.drafted.file, self.plain.file, [item.id for item in self.subject.items])

    def setting(self, settings: Settings) -> Setting:
        blocks, prompts = (self.drafted.facts.block_size,), self.drafted.figures.prompts
        return Setting(blocks, settings.max_new_tokens, settings.thinking, prompts, self.concurrency)


def server_report(
    pair: Pair, drafted: ServerFacts, plain: ServerFacts | None, measured: Sequence[Measured], settings: Settings
) -> dict[str, Any]:
    """Every figure, and of each prompt whether it failed; texts stay in the results' own files."""
    return finite(
        {
            "report": "dflash bench --url",
            "schema": SCHEMA,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "pair": pair.name,
            "note": TOY if pair.toy else None,
            "versions": provenance.versions(),
            "server": server_identity(drafted),
            "plain_server": None if plain is None else server_identity(plain),
            "notices": [*drafted.notices, *(plain.notices if plain is not None else ())],
            **asdict(settings),
            "temperature": 0.0,
            "meanings": MEANINGS,
            "tasks": [_task(one, settings) for one in measured],
        }
    )


def server_identity(facts: ServerFacts) -> dict[str, Any]:
    """What tells one server's figures from another's: all that it reports of itself, without its address."""
    return {
        "program": facts.program,
        "version": facts.version,
        "model": facts.served,
        "drafts": facts.drafts,
        "drafter": facts.drafter,
        "method": facts.method,
        "block_size": facts.block_size,
        "context": facts.context,
    }


def _task(one: Measured, settings: Settings) -> dict[str, Any]:
    subject, equal = one.subject, one.equal
    return {
        "task": subject.name,
        "title": subject.title,
        "data": dict(subject.data),
        "concurrency": one.concurrency,
        "dflash": _side(one.drafted, subject),
        "plain": None if one.plain is None else _side(one.plain, subject),
        "speedup": one.speedup,
        "equal": None if equal is None else {"prompts": equal[0], "of": equal[1]},
        "published": [
            {**asdict(cell), "differences": differences(cell, one.setting(settings))} for cell in one.published
        ],
    }


def _side(side: Side, subject: Subject) -> dict[str, Any]:
    figures, throughput = side.figures, side.figures.throughput
    results = [side.file.results[item.id] for item in subject.items]
    return {
        **asdict(figures),
        "throughput": None
        if throughput is None
        else {
            "tokens_per_s": throughput.tokens_per_s,
            "tokens": throughput.tokens,
            "wall_s": throughput.wall_s,
            "prompts": len(throughput.prompts),
            "uninterrupted": throughput.whole,
        },
        "results": str(side.file.path),
        "rows": [{"id": one.id, "error": one.error or None} for one in results],
    }


def server_lines(
    pair: Pair, drafted: ServerFacts, plain: ServerFacts | None, measured: Sequence[Measured], settings: Settings
) -> list[str]:
    """Markdown: the cards' table, the figures of single requests, and what was measured how and where."""
    thinking, block = "on" if settings.thinking else "off", drafted.block_size or "not known"
    lines = [
        f"**{pair.label}** on {drafted.title}, block {block}, thinking {thinking}, temperature 0, at most "
        f"{settings.max_new_tokens} tokens a reply" + ("" if plain is None else f"; plain on {plain.title}"),
        "",
    ]
    cited = [(cell, one.setting(settings)) for one in measured for cell in one.published]
    with_plain = plain is not None or any(cell.plain_tokens_per_s is not None for cell, _ in cited)
    lines += _card_table(measured, sources(cited), with_plain)
    titles = ("Task", "At a time", "", "Prompts", "Failed", "Decode tok/s", "End to end tok/s", "First token, ms")
    rows = [_single(one, side) for one in measured for side in (one.drafted, one.plain) if side is not None]
    lines += ["", *markdown((*titles, "Reply, s"), rows), "", MEANINGS, ""]
    lines += source_lines(cited) if cited else ["Nothing is published of this pair at these numbers of requests."]
    lines += list(_origins(measured))
    return [*lines, "", f"({TOY})"] if pair.toy else lines


def _card_table(measured: Sequence[Measured], cited: Sequence[str], with_plain: bool) -> list[str]:
    """Without a plain server its columns are those of published rows, and absent where these have none."""
    titles: tuple[str, ...] = ("Task", "", "At a time", "Block", "Plain tok/s", "DFlash tok/s", "Speed-up")
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
    titles = (*titles, "Acceptance length", "Mean acceptance length", "Text equal")
    leave = set() if with_plain else {titles.index(name) for name in ("Plain tok/s", "Speed-up", "Text equal")}
    return markdown(_without(titles, leave), [_without(row, leave) for row in rows])


def _without(row: Sequence[str], places: set[int]) -> tuple[str, ...]:
    return tuple(cell for place, cell in enumerate(row) if place not in places)


def _own(one: Measured) -> tuple[str, ...]:
    figures, equal = one.drafted.figures, one.equal
    return (
        one.subject.title,
        "here",
        str(one.concurrency),
        str(one.drafted.facts.block_size or "-"),
        "-" if one.plain is None else _rate(one.plain.figures),
        _rate(figures),
        times(one.speedup),
        number(figures.accepted.length, 2),
        number(figures.accepted.mean, 2) + _share(figures.accepted.prompts, figures),
        "-" if equal is None else f"{equal[0]} of {equal[1]}",
    )


def _rate(figures: ServerFigures) -> str:
    found = figures.throughput
    return "-" if found is None else number(found.tokens_per_s, 1) + _share(len(found.prompts), figures)


def _share(prompts: int, figures: ServerFigures) -> str:
    """Behind a figure that is of other than all prompts: of how many it is."""
    return "" if prompts in (0, figures.prompts) else f" (of {prompts} prompts)"


def _single(one: Measured, side: Side) -> tuple[str, ...]:
    figures = side.figures

    def shown(found: Percentiles, factor: float, digits: int) -> str:
        return joined((found.p50, found.p90, found.p99), factor, digits)

    return (
        one.subject.title,
        str(one.concurrency),
        "DFlash" if side is one.drafted else "plain",
        str(figures.prompts),
        str(figures.failed),
        shown(figures.decode_rates, 1, 1),
        shown(figures.end_to_end_rates, 1, 1),
        shown(figures.ttft_s, 1e3, 0),
        shown(figures.latency_s, 1, 2),
    )


def _origins(measured: Sequence[Measured]) -> Iterable[str]:
    """Where prompts and results are, what failed, and what a figure is not of."""
    for name in dict.fromkeys(one.subject.name for one in measured):
        group = [one for one in measured if one.subject.name == name]
        sides = [(one, side) for one in group for side in (one.drafted, one.plain) if side is not None]
        folder = sides[0][1].file.path.parent
        yield f"- {group[0].subject.title}: {group[0].subject.origin}; results in {folder}"
        for one, side in sides:
            where = f"{one.concurrency} at a time, {'DFlash' if side is one.drafted else 'plain'}"
            yield from (f"  - {where}: {line}" for line in _remarks(one, side))


def _remarks(one: Measured, side: Side) -> Iterable[str]:
    figures = side.figures
    if figures.accepted.mean is None and side is one.drafted:
        yield f"the acceptance length is not known: {figures.accepted.source}"
    if figures.throughput is not None and len(figures.throughput.prompts) < one.concurrency:
        yield f"throughput is of {len(figures.throughput.prompts)} prompts, so that fewer requests ran at a time"
    if figures.parts > 1:
        yield f"measured in {figures.parts} parts; throughput is of the longest alone"
    if figures.throughput is not None and not figures.throughput.whole:
        yield "that part ended early: what was under way then counts as time, not as tokens"
    if figures.throughput is not None and figures.throughput.tokens is None:
        yield "the server reports no token counts, so that speeds are not known"
    errors = dict.fromkeys(result.error for item in one.subject.items if (result := side.file.results[item.id]).error)
    yield from (f"failed: {error}" for error in list(errors)[:3])
