"""A conversation as a file for people (Markdown) or programs (JSON), figures included."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_local import terminal
from dflash_local.errors import DFlashError, UsageError
from dflash_local.store.atomic import write_atomic
from dflash_local.store.records import Turn

SPEAKERS = {"user": "You", "assistant": "Model", "tool": "Tool", "system": "System"}


def export(path: Path, model: str, system: str, turns: Sequence[Turn]) -> None:
    """Write the conversation in the form of the file's ending. UsageError: it exists, another ending. DFlashError."""
    forms = {".md": to_markdown, ".json": to_json}
    if path.suffix not in forms:
        raise UsageError(f"{path.name!r} ends neither in .md nor in .json", "name the form by the ending")
    try:
        if path.exists():
            raise UsageError(f"{path} is there already", "choose another name")
        write_atomic(path, forms[path.suffix](model, system, turns))
    except OSError as error:
        raise DFlashError(f"{path} cannot be written: {error.strerror}", "choose another place") from error


def to_json(model: str, system: str, turns: Sequence[Turn]) -> str:
    rows: list[dict[str, Any]] = []
    for turn in turns:
        row: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.role == "assistant":
            row.update(thinking=turn.thinking, stopped=turn.stopped, figures=turn.figures)
        rows.append(row)
    return json.dumps({"model": model, "system": system, "messages": rows}, indent=2) + "\n"


def to_markdown(model: str, system: str, turns: Sequence[Turn]) -> str:
    """Write the conversation as Markdown, without the control characters a model may have written."""
    parts = [f"# Chat with {model}"]
    if system:
        parts.append(f"*System:* {system}")
    for turn in turns:
        parts.append(f"## {SPEAKERS[turn.role]}")
        if turn.thinking:
            quoted = turn.thinking.strip().replace("\n", "\n> ")
            parts.append(f"> *Thinking*\n>\n> {quoted}")
        parts.append(turn.content)
        if turn.ending:
            parts.append(f"*({turn.ending})*")
        if turn.figures:
            parts.append("*" + ", ".join(f"{name} {value}" for name, value in turn.figures.items()) + "*")
    return terminal.safe("\n\n".join(parts)) + "\n"
