"""What was measured of each prompt, a JSON line each, so that a run that ended early goes on where it was.

The first line says what was run; a run with other settings has another file. Torch-free; knows no sessions.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic

VERSION = 1
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply in one mode. Times in seconds, rates in tokens per second; see ``events.Stats``.

    Attributes:
        text: of the final channel, which is what is scored.
        score: right, wrong, passed, failed or timed out; None where nothing was compared or run.
    """

    tokens: int
    finish_reason: str
    acceptance_lengths: tuple[int, ...]
    ttft_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    end_to_end_tokens_per_s: float
    text: str
    score: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message answered both ways. ``equal``: the same token ids."""

    prompt_tokens: int
    equal: bool
    ar: Reply
    dflash: Reply


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt of a task. ``error``: why it has no turns; empty where it was answered."""

    id: str
    turns: tuple[Turn, ...] = ()
    error: str = ""

    def scored(self, scores: Mapping[Mode, str | None]) -> PromptResult:
        """The same with the scores of its last replies."""
        last = self.turns[-1]
        ar, dflash = replace(last.ar, score=scores["ar"]), replace(last.dflash, score=scores["dflash"])
        return replace(self, turns=(*self.turns[:-1], replace(last, ar=ar, dflash=dflash)))


class ResultsFile:
    """The results of one run.

    Args:
        identity: what is run, JSON-able: data, models, settings. It names the file in ``folder``.
        fresh: forget what an earlier run of the same left.

    Raises:
        UsageError: the file cannot be written, or is another's.
    """

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.identity = json.loads(json.dumps(identity, sort_keys=True))
        digest = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
        self.path = folder / f"{stem}-{digest[:12]}.jsonl"
        self.results: dict[str, PromptResult] = {}
        try:
            make_private(folder)
            if fresh or not self.path.exists():
                write_atomic(self.path, _line({"version": VERSION, "identity": self.identity}))
            else:
                self._read()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}", "name a folder with --out") from error

    def add(self, result: PromptResult) -> None:
        """Keep a result, in the place of an earlier one of the same prompt. Raises OSError where the disk is full."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0), FILE_MODE)
        with os.fdopen(descriptor, "ab") as file:
            file.write(_line(asdict(result)))
            file.flush()
            os.fsync(file.fileno())
        self.results[result.id] = result

    def _read(self) -> None:
        """Take in whole lines; what a kill left of the last one is cut off."""
        if self.path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{self.path} is larger than {MAX_BYTES >> 20} MiB", "begin anew with --no-resume")
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        head, *lines = raw[:whole].split(b"\n")
        first = _parsed(head)
        if first is None or first.get("version") != VERSION or first.get("identity") != self.identity:
            raise UsageError(f"{self.path} is damaged, or of another version", "begin anew with --no-resume")
        if whole < len(raw):
            os.truncate(self.path, whole)
        for line in lines:
            content = _parsed(line)
            result = None if content is None else _decoded(content)
            if result is not None:  # a damaged line's prompt is run again
                self.results[result.id] = result


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode("ascii") + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _decoded(content: Mapping[str, Any]) -> PromptResult | None:
    try:
        turns = tuple(
            Turn(turn["prompt_tokens"], turn["equal"], _reply(turn["ar"]), _reply(turn["dflash"]))
            for turn in content["turns"]
        )
        return PromptResult(str(content["id"]), turns, str(content["error"]))
    except (KeyError, TypeError):
        return None


def _reply(content: Mapping[str, Any]) -> Reply:
    return Reply(**{**content, "acceptance_lengths": tuple(content["acceptance_lengths"])})
