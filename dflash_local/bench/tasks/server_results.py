"""What a server answered with so many requests at a time: a line each prompt, and one for each part that was whole.

A part is what one run measured without a break. Torch-free; knows no server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local.bench.tasks.kept_lines import LinesFile


class Drafted(NamedTuple):
    """Cycles that drafted, their drafts, and those accepted."""

    cycles: int
    drafts: int
    accepted: int


@dataclass(frozen=True, slots=True)
class ServerReply:
    """One reply, in seconds from its request on.

    Attributes:
        tokens: as the server counts them; None where it does not. reused_tokens: of the prompt, from its prefix cache.
        tokens_per_s: decode rate; None where the reply came too quickly to know.
        drafted: as the reply itself reports it. ids: a digest of the token ids, empty where they are not reported.
        text: of the final channel.
    """

    prompt_tokens: int
    reused_tokens: int
    tokens: int | None
    finish_reason: str
    ttft_s: float
    latency_s: float
    tokens_per_s: float | None
    drafted: Drafted | None
    text: str
    ids: str = ""

    def equals(self, other: ServerReply) -> bool:
        """The same token ids; the same text where one of the servers reports no ids."""
        return self.ids == other.ids if self.ids and other.ids else self.text == other.text


@dataclass(frozen=True, slots=True)
class ServerResult:
    """One prompt. ``ended_s``: since its part began. ``error``: why it has no turns; empty where it was answered."""

    id: str
    part: int
    ended_s: float
    turns: tuple[ServerReply, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """A part that came to its end.

    Attributes:
        drafted: by the difference of the server's counters; None where they do not tell, and ``reason`` says why.
    """

    number: int
    wall_s: float
    drafted: Drafted | None
    reason: str = ""


class LoopFile(LinesFile):
    """The results of one task at one number of concurrent requests on one server."""

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.results: dict[str, ServerResult] = {}
        self.parts: dict[int, Part] = {}
        super().__init__(folder, name, identity, fresh)

    @property
    def next_part(self) -> int:
        """A number that no part has."""
        return 1 + max([*self.parts, *(result.part for result in self.results.values())], default=0)

    def add(self, result: ServerResult) -> None:
        """Keep a result, in the place of an earlier one of the same prompt. Raises OSError where the disk is full."""
        self.append(asdict(result))
        self.results[result.id] = result

    def end(self, part: Part) -> None:
        """A part came to its end. Raises OSError where the disk is full."""
        self.append({"ended": asdict(part)})
        self.parts[part.number] = part

    def of_part(self, number: int) -> list[ServerResult]:
        """The prompts that were answered in a part, and not again since."""
        return [result for result in self.results.values() if result.part == number and not result.error]

    def answered(self, ids: Iterable[str]) -> int:
        """How many of these prompts are answered."""
        return sum(name in self.results and not self.results[name].error for name in ids)

    def take(self, content: Mapping[str, Any]) -> None:
        """A damaged line's prompt is run again."""
        try:
            if "ended" in content:
                ended = content["ended"]
                part = Part(ended["number"], ended["wall_s"], _drafted(ended["drafted"]), ended["reason"])
                self.parts[part.number] = part
            else:
                turns = tuple(
                    ServerReply(**{**turn, "drafted": _drafted(turn["drafted"])}) for turn in content["turns"]
                )
                named = str(content["id"]), int(content["part"]), float(content["ended_s"])
                result = ServerResult(*named, turns, str(content["error"]))
                self.results[result.id] = result
        except (KeyError, TypeError, ValueError, OverflowError):
            return


def _drafted(content: Any) -> Drafted | None:
    return None if content is None else Drafted(*content)
