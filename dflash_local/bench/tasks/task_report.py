"""The measured tasks as a JSON-able dict and as Markdown tables in the cards' form, beside what is published."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from dflash_local.bench.report import TOY, finite, header, number
from dflash_local.bench.tasks.card_table import (
    Setting,
    differences,
    joined,
    markdown,
    source_lines,
    sources,
    times,
)
from dflash_local.bench.tasks.figures import TaskFigures
from dflash_local.bench.tasks.results import PromptResult
from dflash_local.bench.tasks.table import Task
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.row import Published
from dflash_local.loaded import SessionFacts
from dflash_local.store.datasets import DataFile

CONCURRENCY = 1  # our engine answers one request at a time
MEANINGS = (
    "Plain and DFlash tok/s, speed-up: end to end, prefill included, of this run. Acceptance length, as the cards: "
    "mean over the cycles of each reply, then over replies. Mean acceptance length, as vLLM: 1 + accepted drafts / "
    "drafting cycles, all replies together."
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How every task of a run was measured."""

    block_sizes: tuple[int, ...]
    max_new_tokens: int
    thinking: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """One task with one block: its data as recorded, its prompts' results in order, their figures, and the cells
    published of it."""

    task: Task
    block_size: int
    data: DataFile
    results: tuple[PromptResult, ...]
    figures: TaskFigures
    published: tuple[Published, ...]
    file: str

    def setting(self, settings: Settings, blocks: tuple[int, ...]) -> Setting:
        return Setting(blocks, settings.max_new_tokens, settings.thinking, self.figures.prompts)


def task_report(pair: Pair, facts: SessionFacts, measured: Sequence[Measured], settings: Settings) -> dict[str, Any]:
    """Every figure, and of each prompt whether it failed; texts stay in the results' own files."""
    return finite(
        {
            **header("dflash bench --tasks", pair, facts),
            **asdict(settings),
            "temperature": 0.0,
            "concurrency": CONCURRENCY,
            "meanings": MEANINGS,
            "tasks": [_task(one, settings) for one in measured],
        }
    )


def _task(one: Measured, settings: Settings) -> dict[str, Any]:
    task = one.task
    return {
        "task": task.name,
        "title": task.title,
        "split": task.split,
        "note": task.note,
        "data": asdict(one.data),
        "block_size": one.block_size,
        "results": one.file,
        **asdict(one.figures),
        "published": [
            {**asdict(cell), "differences": differences(cell, one.setting(settings, (one.block_size,)))}
            for cell in one.published
        ],
        "rows": [{"id": result.id, "error": result.error or None} for result in one.results],
    }


def task_lines(pair: Pair, facts: SessionFacts, measured: Sequence[Measured], settings: Settings) -> list[str]:
    """Markdown: the cards' table, the further figures, and what was measured how and where."""
    thinking, blocks = "on" if settings.thinking else "off", settings.block_sizes
    lines = [
        f"**{pair.label}**: {facts.engine} engine, {facts.formats} on {facts.device}, "
        f"block {', '.join(map(str, blocks))}, thinking {thinking}, temperature 0, at most "
        f"{settings.max_new_tokens} tokens a reply, one request at a time",
        "",
    ]
    by_task = [tuple(group) for _, group in groupby(measured, lambda one: one.task.name)]
    cited = [(cell, group[0].setting(settings, blocks)) for group in by_task for cell in group[0].published]
    first = (
        "Task",
        "",
        "Block",
        "Plain tok/s",
        "DFlash tok/s",
        "Speed-up",
        "Acceptance length",
    )
    lines += markdown(first, [row for group in by_task for row in _card_rows(group, sources(cited))])
    second = (
        *("Task", "Block", "Prompts", "Failed", "Mean acceptance length", "Decode tok/s, plain / DFlash", "Text equal"),
        *("First token, ms, p50 / p90", "DFlash tok/s, p50 / p90", "DFlash decode tok/s, p50 / p90"),
    )
    lines += ["", *markdown(second, [_further(one) for one in measured]), "", MEANINGS, "", *source_lines(cited)]
    lines += [line for group in by_task for line in _origin(group)]
    return [*lines, "", f"({TOY})"] if pair.toy else lines


def _card_rows(group: Sequence[Measured], cited: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Of one task: a row for each block, then what is published."""
    for one in group:
        figures = one.figures
        yield (
            one.task.title,
            "here",
            str(one.block_size),
            number(figures.ar.end_to_end_tokens_per_s, 1),
            number(figures.dflash.end_to_end_tokens_per_s, 1),
            times(figures.speedup),
            number(figures.acceptance_length, 2),
        )
    for cell in group[0].published:
        yield (
            group[0].task.title,
            f"published [{cited.index(cell.source) + 1}]",
            "-" if cell.block is None else str(cell.block),
            number(cell.plain_tokens_per_s, 0),
            number(cell.tokens_per_s, 0),
            times(cell.speedup),
            number(cell.acceptance_length, 2),
        )


def _further(one: Measured) -> tuple[str, ...]:
    figures, dflash = one.figures, one.figures.dflash
    return (
        one.task.title,
        str(one.block_size),
        str(figures.prompts),
        str(figures.failed),
        number(figures.mean_acceptance_length, 2),
        f"{number(figures.ar.tokens_per_s, 1)} / {number(dflash.tokens_per_s, 1)}",
        f"{figures.equal} of {figures.replies}",
        joined((dflash.ttft_s.p50, dflash.ttft_s.p90), 1e3, 0),
        joined((dflash.end_to_end_rates.p50, dflash.end_to_end_rates.p90), 1, 1),
        joined((dflash.decode_rates.p50, dflash.decode_rates.p90), 1, 1),
    )


def _origin(group: Sequence[Measured]) -> Iterable[str]:
    """Where a task's data and results are, and what failed."""
    task, data = group[0].task, group[0].data
    note = f"; {task.note}" if task.note else ""
    yield (
        f"- {task.title}: {data.path} of {data.repo} at {data.commit}, sha256 {data.sha256}, "
        f"{task.split}{note}; results in {', '.join(one.file for one in group)}"
    )
    errors = dict.fromkeys(result.error for one in group for result in one.results if result.error)
    yield from (f"  - failed: {error}" for error in list(errors)[:3])
