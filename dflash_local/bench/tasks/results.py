"""What was answered of a task in one way: a file with a head line that says what was run, then a JSON line a result.

Each line is on the disk at once, so that a run that ended early goes on. A run with other settings has another file;
one process writes a file at a time. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.store.atomic import FILE_MODE, make_private, write_atomic
from dflash_local.store.lock import exclusive

VERSION = 3
READ = (2, VERSION)
MAX_BYTES = 1 << 30
LOCKS = ".locks"  # below the folder of the results, so that a folder which machines share is locked for all


class Drafted(NamedTuple):
    """Cycles that drafted, their drafts, and those accepted."""

    cycles: int
    drafts: int
    accepted: int


@dataclass(frozen=True, slots=True)
class TaskReply:
    """One reply, in seconds from its request on.

    Attributes:
        tokens: None where a server does not count them. reused_tokens: of the prompt, from a server's prefix cache.
        ttft_s: 0 where no token came. tokens_per_s: decode rate; None where the reply came too quickly to know.
        drafted: as the reply itself reports it; None where it does not.
        ids: a digest of the token ids, empty where they are not reported. text: of the final channel.
        thinking: a digest of it; None where all ids are known, and in a file of version 2.
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
    thinking: str | None = None

    def equals(self, other: TaskReply) -> bool:
        """Compare token ids, which a server may not all report, then texts, and thoughts where both are known."""
        if self.ids and other.ids and self.ids != other.ids:
            return False
        unknown = self.thinking is None or other.thinking is None
        return self.text == other.text and (unknown or self.thinking == other.thinking)


def digest_of(ids: Iterable[int]) -> str:
    """Return what replies are compared by, of token ids or of bytes; empty where there are none."""
    words = ",".join(map(str, ids))
    return hashlib.sha256(words.encode()).hexdigest()[:16] if words else ""


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt.

    Attributes:
        part: what one run measured without a break. ended_s: since the part began.
        error: why there are no turns; empty where it was answered.
    """

    id: str
    part: int
    ended_s: float
    turns: tuple[TaskReply, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ResultsPart:
    """A part that came to its end.

    Attributes:
        drafted: by the difference of a server's counters; None where they do not tell, and ``reason`` says why.
    """

    number: int
    wall_s: float
    drafted: Drafted | None
    reason: str = ""


class ResultsFile:
    """The results of one task, answered in one way.

    Args:
        identity: what is run, JSON-able: data, models, settings. It names the file in ``folder``.
        fresh: forget what an earlier run of the same left.

    Raises:
        UsageError: the file cannot be written, or is another's.
    """

    def __init__(self, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> None:
        self.results: dict[str, PromptResult] = {}
        self.parts: dict[int, ResultsPart] = {}
        self.identity = parse_json(json.dumps(identity, sort_keys=True))
        self.path = _path(folder, name, self.identity)
        try:
            make_private(folder)
            if fresh or not self.path.exists():
                self._begin()
            else:
                self._read()
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}", "name a folder with --out") from error

    @classmethod
    @contextmanager
    def locked(cls, folder: Path, name: str, identity: Mapping[str, Any], fresh: bool = False) -> Iterator[ResultsFile]:
        """Open the file with this process as its only writer within.

        Raises:
            BusyError: another run writes it. UsageError: see above.
        """
        path = _path(folder, name, identity)
        title, key = str(path), f"results-{path.stem.rpartition('-')[2]}"
        with exclusive(folder / LOCKS, key, purpose="measure", wait=False, title=title):
            yield cls(folder, name, identity, fresh)

    @property
    def next_part(self) -> int:
        """A number that no part has."""
        return 1 + max([*self.parts, *(result.part for result in self.results.values())], default=0)

    def add(self, result: PromptResult) -> None:
        """Keep a result in the place of an earlier one of the same prompt. UsageError: the disk is full."""
        self._append(asdict(result))
        self.results[result.id] = result

    def end(self, part: ResultsPart) -> None:
        """Note that a part came to its end. UsageError: the disk is full."""
        self._append({"ended": asdict(part)})
        self.parts[part.number] = part

    def of_part(self, number: int) -> list[PromptResult]:
        """Return the prompts that were answered in a part, and not again since."""
        return [result for result in self.results.values() if result.part == number and not result.error]

    def answered(self, ids: Iterable[str]) -> int:
        """Count those of these prompts that are answered."""
        return sum(name in self.results and not self.results[name].error for name in ids)

    def _begin(self, lines: bytes = b"") -> None:
        """Write the file anew: its head, and lines behind it."""
        write_atomic(self.path, _line({"version": VERSION, "identity": self.identity}) + lines)

    def _append(self, content: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0), FILE_MODE)
            with os.fdopen(descriptor, "ab") as file:
                file.write(_line(content))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            why = f"{self.path} cannot be written: {error.strerror}"
            raise UsageError(why, "run it again: it goes on there") from error

    def _read(self) -> None:
        """Take in whole lines; what a kill left of the last one is cut off."""
        if self.path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{self.path} is larger than {MAX_BYTES >> 20} MiB", "begin anew with --no-resume")
        raw = self.path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        head, *lines = raw[:whole].split(b"\n")
        first = _parsed(head)
        if first is None or first.get("version") not in READ or first.get("identity") != self.identity:
            raise UsageError(f"{self.path} is damaged, or of another version", "begin anew with --no-resume")
        if first["version"] != VERSION:  # an older program would not read the lines to come
            self._begin(raw[len(head) + 1 : whole])
        elif whole < len(raw):
            os.truncate(self.path, whole)
        for line in lines:
            content = _parsed(line)
            if content is not None:
                self._take(content)

    def _take(self, content: Mapping[str, Any]) -> None:
        """Take in a line of an earlier run; a damaged one's prompt is run again."""
        try:
            if "ended" in content:
                ended = content["ended"]
                part = ResultsPart(ended["number"], ended["wall_s"], _drafted(ended["drafted"]), ended["reason"])
                self.parts[part.number] = part
            else:
                turns = tuple(TaskReply(**{**turn, "drafted": _drafted(turn["drafted"])}) for turn in content["turns"])
                named = str(content["id"]), int(content["part"]), float(content["ended_s"])
                result = PromptResult(*named, turns, str(content["error"]))
                self.results[result.id] = result
        except (KeyError, TypeError, ValueError, OverflowError):
            return


def _drafted(content: Any) -> Drafted | None:
    return None if content is None else Drafted(*content)


def _path(folder: Path, name: str, identity: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80]
    return folder / f"{stem}-{digest[:12]}.jsonl"


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode("ascii") + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        content = parse_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
