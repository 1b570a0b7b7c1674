"""The measured tasks as a JSON-able dict and as Markdown tables in the cards' form, beside what is published.

What a source does not name stays "not known".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_local.bench.report import TOY, finite, header, number
from dflash_local.bench.tasks.figures import ModeFigures, Percentiles, TaskFigures
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
    """How every task of a run was measured. ``sandbox``: what kept the code that ran from the network, if any ran."""

    block_size: int
    max_new_tokens: int
    thinking: bool
    sandbox: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One task: its data as recorded, its prompts' results in order, their figures, and the cells published of it."""

    task: Task
    data: DataFile
    results: tuple[PromptResult, ...]
    figures: TaskFigures
    published: tuple[Published, ...]
    file: str


def cells(published: Sequence[Published], task: Task, block: int) -> tuple[Published, ...]:
    """What is published of single requests on a task: with that block, else with any."""
    found = [cell for cell in published if cell.task.lower() == task.name and cell.concurrency == CONCURRENCY]
    return tuple([cell for cell in found if cell.block == block] or found)


def differences(cell: Published, settings: Settings, prompts: int) -> tuple[str, ...]:
    """How a published cell was measured otherwise than here, or that its source does not name it."""
    source, found = cell.source.lower(), []
    if cell.block != settings.block_size:
        found.append(f"block {cell.block or 'not known'} there, {settings.block_size} here")
    there = {"thinking enabled": "on", "thinking disabled": "off"}
    thinking = next((value for words, value in there.items() if words in source), "not known")
    here = "on" if settings.thinking else "off"
    if thinking != here:
        found.append(f"thinking {thinking} there, {here} here")
    if "greedy" not in source:
        found.append("temperature not known there, 0 here")
    found.append(f"prompts not known there, the first {prompts} here")
    if f"{settings.max_new_tokens} output tokens" not in source:
        found.append(f"at most {settings.max_new_tokens} tokens a reply here")
    return tuple(found)


def task_report(pair: Pair, facts: SessionFacts, measured: Sequence[Measured], settings: Settings) -> dict[str, Any]:
    """Every figure, and of each prompt its scores or its error; texts stay in the results' own files."""
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
        "scoring": task.scoring,
        "data": asdict(one.data),
        "results": one.file,
        **asdict(one.figures),
        "published": [
            {**asdict(cell), "differences": differences(cell, settings, one.figures.prompts)} for cell in one.published
        ],
        "rows": [
            {
                "id": result.id,
                "error": result.error or None,
                "ar": [turn.ar.score for turn in result.turns],
                "dflash": [turn.dflash.score for turn in result.turns],
            }
            for result in one.results
        ],
    }


def task_lines(pair: Pair, facts: SessionFacts, measured: Sequence[Measured], settings: Settings) -> list[str]:
    """Markdown: the cards' table, the further figures, and what was measured how and where."""
    thinking = "on" if settings.thinking else "off"
    lines = [
        f"**{pair.label}**: {facts.engine} engine, {facts.formats} on {facts.device}, block {settings.block_size}, "
        f"thinking {thinking}, temperature 0, at most {settings.max_new_tokens} tokens a reply, one request at a time",
        "",
    ]
    sources = list(dict.fromkeys(cell.source for one in measured for cell in one.published))
    first = (
        "Task",
        "",
        "Block",
        "Plain tok/s",
        "DFlash tok/s",
        "Speed-up",
        "Acceptance length",
        "Right, plain / DFlash",
    )
    lines += _markdown(first, [row for one in measured for row in _card_rows(one, settings, sources)])
    second = (
        *("Task", "Prompts", "Failed", "Mean acceptance length", "Decode tok/s, plain / DFlash", "Text equal"),
        *("First token, ms, p50 / p90", "DFlash tok/s, p50 / p90", "DFlash decode tok/s, p50 / p90"),
    )
    lines += ["", *_markdown(second, [_further(one) for one in measured]), "", MEANINGS]
    lines += _notes(measured, settings, sources)
    return [*lines, "", f"({TOY})"] if pair.toy else lines


def _card_rows(one: Measured, settings: Settings, sources: Sequence[str]) -> list[tuple[str, ...]]:
    figures = one.figures
    rows: list[tuple[str, ...]] = [
        (
            one.task.title,
            "here",
            str(settings.block_size),
            number(figures.ar.end_to_end_tokens_per_s, 1),
            number(figures.dflash.end_to_end_tokens_per_s, 1),
            _times(figures.speedup),
            number(figures.acceptance_length, 2),
            f"{_right(figures.ar)} / {_right(figures.dflash)}",
        )
    ]
    for cell in one.published:
        rows.append(
            (
                one.task.title,
                f"published [{sources.index(cell.source) + 1}]",
                "-" if cell.block is None else str(cell.block),
                number(cell.plain_tokens_per_s, 0),
                number(cell.tokens_per_s, 0),
                _times(cell.speedup),
                number(cell.acceptance_length, 2),
                "-",
            )
        )
    return rows


def _further(one: Measured) -> tuple[str, ...]:
    figures = one.figures
    return (
        one.task.title,
        str(figures.prompts),
        str(figures.failed),
        number(figures.mean_acceptance_length, 2),
        f"{number(figures.ar.tokens_per_s, 1)} / {number(figures.dflash.tokens_per_s, 1)}",
        f"{figures.equal} of {figures.replies}",
        _both(figures.dflash.ttft_s, 1e3, 0),
        _both(figures.dflash.end_to_end_rates, 1, 1),
        _both(figures.dflash.decode_rates, 1, 1),
    )


def _notes(measured: Sequence[Measured], settings: Settings, sources: Sequence[str]) -> list[str]:
    """Sources with what differs from here, the data, and what kept code that ran from the machine."""
    lines = [""]
    for index, source in enumerate(sources):
        own = [(one, cell) for one in measured for cell in one.published if cell.source == source]
        words = dict.fromkeys(d for one, cell in own for d in differences(cell, settings, one.figures.prompts))
        lines.append(f"[{index + 1}] {source} (drafter {own[0][1].generation}). Differs: {'; '.join(words)}.")
    if not sources:
        lines.append("Nothing is published of this pair on these tasks.")
    for one in measured:
        data, note = one.data, f"; {one.task.note}" if one.task.note else ""
        lines.append(
            f"- {one.task.title}: {data.path} of {data.repo} at {data.commit}, sha256 {data.sha256}, "
            f"{one.task.split}{note}; results in {one.file}"
        )
        errors = dict.fromkeys(result.error for result in one.results if result.error)
        lines += [f"  - failed: {error}" for error in list(errors)[:3]]
    if any(one.task.scoring == "tests" for one in measured):
        ran = "code was not run: --run-code" if settings.sandbox is None else f"code ran with {settings.sandbox}"
        lines.append(f"- {ran}")
    return lines


def _right(figures: ModeFigures) -> str:
    return f"{figures.right} of {figures.scored}" if figures.scored else "-"


def _both(values: Percentiles, factor: float, digits: int) -> str:
    return " / ".join(number(None if v is None else v * factor, digits) for v in (values.p50, values.p90))


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of cells in which nothing may end a cell early."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines]
