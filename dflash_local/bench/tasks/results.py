"""What was measured of each prompt on the own engine: a line each, so that a run that ended early goes on.

Torch-free; knows no sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.bench.tasks.kept_lines import LinesFile


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply in one mode. Times in seconds, rates in tokens per second; see ``events.Stats``.

    Attributes:
        text: of the final channel.
        ids: a digest of the token ids, which replies are compared by; empty where it was not kept.
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
    ids: str = ""


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


class ResultsFile(LinesFile):
    """The results of one run."""

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.results: dict[str, PromptResult] = {}
        super().__init__(folder, name, identity, fresh)

    def add(self, result: PromptResult) -> None:
        """Keep a result, in the place of an earlier one of the same prompt. Raises OSError where the disk is full."""
        self.append(asdict(result))
        self.results[result.id] = result

    def answered(self, ids: Iterable[str]) -> int:
        """How many of these prompts are answered."""
        return sum(name in self.results and not self.results[name].error for name in ids)

    def take(self, content: Mapping[str, Any]) -> None:
        """A damaged line's prompt is run again."""
        result = _decoded(content)
        if result is not None:
            self.results[result.id] = result


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
