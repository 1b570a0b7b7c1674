"""What is published of a task, beside what was measured here: which cells, how they differ, and Markdown of both.

What a source does not name stays "not known".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dflash_local.bench.report import number
from dflash_local.catalog.row import Published


@dataclass(frozen=True, slots=True)
class Setting:
    """How a task was measured here, as far as published cells have a word on it.

    Attributes:
        blocks: the block sizes; 0 is not known. prompts: answered. concurrency: requests at a time.
    """

    blocks: tuple[int, ...]
    max_new_tokens: int
    thinking: bool
    prompts: int
    concurrency: int = 1


def cells(
    published: Sequence[Published], task: str, blocks: Sequence[int], concurrency: int = 1
) -> tuple[Published, ...]:
    """What is published of a task with so many requests at a time: with these blocks, else with any."""
    found = [cell for cell in published if cell.task.lower() == task and cell.concurrency == concurrency]
    return tuple([cell for cell in found if cell.block in blocks] or found)


def differences(cell: Published, here: Setting) -> tuple[str, ...]:
    """How a published cell was measured otherwise than here, or that its source does not name it."""
    source, found = cell.source.lower(), []
    if cell.block not in here.blocks:
        blocks = ", ".join(str(block or "not known") for block in here.blocks)
        found.append(f"block {cell.block or 'not known'} there, {blocks} here")
    there = {"thinking enabled": "on", "thinking disabled": "off"}
    thinking = next((value for words, value in there.items() if words in source), "not known")
    own = "on" if here.thinking else "off"
    if thinking != own:
        found.append(f"thinking {thinking} there, {own} here")
    if "greedy" not in source:
        found.append("temperature not known there, 0 here")
    found.append(f"prompts not known there, the first {here.prompts} here")
    if f"{here.max_new_tokens} output tokens" not in source:
        found.append(f"at most {here.max_new_tokens} tokens a reply here")
    return tuple(found)


def source_lines(own: Sequence[tuple[Published, Setting]]) -> list[str]:
    """Every source once, numbered as in the table, with all that differs from here."""
    lines = []
    for index, source in enumerate(sources(own)):
        cited = [(cell, here) for cell, here in own if cell.source == source]
        words = dict.fromkeys(word for cell, here in cited for word in differences(cell, here))
        lines.append(f"[{index + 1}] {source} (drafter {cited[0][0].generation}). Differs: {'; '.join(words)}.")
    return lines or ["Nothing is published of this pair on these tasks."]


def sources(own: Sequence[tuple[Published, Setting]]) -> list[str]:
    """The sources in the order of their numbers."""
    return list(dict.fromkeys(cell.source for cell, _ in own))


def times(value: float | None) -> str:
    """A speed-up."""
    return "-" if value is None else f"{value:.1f}x"


def joined(values: Sequence[float | None], factor: float, digits: int) -> str:
    """Percentiles in one cell."""
    return " / ".join(number(None if value is None else value * factor, digits) for value in values)


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of cells in which nothing may end a cell early."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines]
