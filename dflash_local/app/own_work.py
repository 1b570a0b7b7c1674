"""What somebody's own turns come to, read from transcripts: their sizes, what comes back, what copies would draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_local.app.work_tokens import Encode
from dflash_local.bench.tasks.figures import percentile
from dflash_local.checkpoint_files.source import needed_config, open_source
from dflash_local.drafters.kinds import LOOKUP, folder_of, read_drafter
from dflash_local.planner.turn_speed import TurnSize
from dflash_local.shared_prefix import common_length
from dflash_local.text_index import TextIndex
from dflash_local.transcripts.read import Progress, ReadReport, conversations
from dflash_local.transcripts.turn import TranscriptTurn

MOST_THREADS, MOST_TOKENS = 64, 2**20  # of one file that are held at once: a conversation and its subagents
HIGH = 0.95  # the percentile that is told beside the median


@dataclass(slots=True)
class Work:
    """Sums turns up.

    Attributes:
        conversations: by client. chars: of the text that was encoded. tokens: that it came to.
        drafted: tokens of replies that copies of the text would have drafted. cycles: of copies alone, how many there
            would have been by the tokens that they emitted.
    """

    conversations: Counter[str] = field(default_factory=Counter)
    turns: list[TurnSize] = field(default_factory=list)
    chars: int = 0
    tokens: int = 0
    drafted: int = 0
    cycles: Counter[int] = field(default_factory=Counter)

    def at(self, share: float) -> TurnSize:
        """Return the sizes that this share of the turns does not exceed, each by itself."""
        return TurnSize(*(int(percentile(column, share) or 0) for column in zip(*self.turns)))

    @property
    def reused_share(self) -> float:
        """Return how much of all prompts stood in the turn before."""
        return sum(turn.reused for turn in self.turns) / max(1, sum(turn.prompt for turn in self.turns))

    @property
    def drafted_share(self) -> float:
        """Return how much of all replies copies of the text would have drafted."""
        return self.drafted / max(1, sum(turn.reply for turn in self.turns))

    @property
    def context(self) -> int:
        """Return tokens of context that hold all but the longest twentieth of the turns."""
        return int(percentile([turn.prompt + turn.reply for turn in self.turns], HIGH) or 0)

    def as_dict(self) -> dict[str, Any]:
        middle, high = self.at(0.5), self.at(HIGH)
        return {
            "conversations": dict(self.conversations),
            "turns": len(self.turns),
            "prompt_tokens": {"median": middle.prompt, "p95": high.prompt},
            "reply_tokens": {"median": middle.reply, "p95": high.reply},
            "reused_share": self.reused_share,
            "lookup_drafted_share": self.drafted_share,
            "chars_per_token": self.chars / max(1, self.tokens),
            "context": self.context,
        }


def read_work(folder: Path, encode: Encode, report: ReadReport, progress: Progress) -> Work:
    """Read all turns of the transcripts under a folder; keeps sizes and no text.

    A reply that two files hold, as a session that was resumed in a new file does, counts once.

    Raises:
        UsageError: there is no such folder. TokenizerError: the tokenizer fails.
    """
    work, seen = Work(), set[int]()
    block = read_drafter(needed_config(open_source(folder_of(LOOKUP))), LOOKUP).block_size
    for client, turns in conversations(folder, report, progress):
        threads: dict[str, _Sequence] = {}
        before = len(work.turns)
        for turn in turns:
            thread = threads.pop(turn.thread, None) or _Sequence(encode, work, block - 1)
            threads[turn.thread] = thread  # the last one is the newest
            while len(threads) > 1 and _too_many(threads.values()):
                del threads[next(iter(threads))]
            name = hash((client, turn.message))
            thread.add(turn, counted=not turn.message or name not in seen)
            seen.add(name)
        work.conversations[client] += len(work.turns) > before
    return work


def _too_many(threads: Collection[_Sequence]) -> bool:
    return len(threads) > MOST_THREADS or sum(thread.tokens for thread in threads) > MOST_TOKENS


class _Sequence:
    """Holds the text of a conversation as the engine would: the last turn's, and the index that copies are found by."""

    def __init__(self, encode: Encode, work: Work, drafts: int) -> None:
        self._encode, self._work, self._drafts = encode, work, drafts
        self._pieces: tuple[str, ...] = ()
        self._ends: list[int] = []  # tokens up to the end of each piece
        self._ids: list[int] = []
        self._index = TextIndex()

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def add(self, turn: TranscriptTurn, counted: bool) -> None:
        """Go on to another turn; one that is not counted is only text before the next."""
        reused = self._replace(turn.prompt)
        prompt = len(self._ids)
        reply = self._encoded(turn.reply)
        self._pieces = (*turn.prompt, *turn.reply)
        if not counted:
            self._ids += reply
        elif reply:
            self._work.turns.append(TurnSize(prompt, reused, len(reply)))
            self._replay(reply)

    def _replace(self, prompt: tuple[str, ...]) -> int:
        """Put a prompt in the place of the text; returns how many of its first tokens stood there."""
        same = common_length(self._pieces, prompt)
        del self._ends[same:]
        begin = self._ends[-1] if same else 0
        fresh = self._encoded(prompt[same:])
        kept = common_length(self._ids[begin : begin + len(fresh)], fresh)
        reused = begin + kept
        self._index.truncate(reused)
        if not reused:
            self._index = TextIndex()  # one that was emptied keeps the memory of its runs
        self._ids[reused:] = fresh[kept:]
        return reused

    def _encoded(self, pieces: Sequence[str]) -> list[int]:
        found: list[int] = []
        begin = self._ends[-1] if self._ends else 0
        for piece in pieces:
            found += self._encode(piece)
            self._ends.append(begin + len(found))
            self._work.chars += len(piece)
        self._work.tokens += len(found)
        return found

    def _replay(self, reply: list[int]) -> None:
        """Write a reply as the engine does with copies of the text alone: a prompt's pass emits its first token."""
        self._ids.append(reply[0])
        place = 1
        while place < len(reply):
            copied = list(self._index.find(self._ids, self._drafts).ids)
            right = common_length(copied, reply[place : place + len(copied)])
            emitted = min(right + 1, len(reply) - place)
            self._ids += reply[place : place + emitted]
            self._work.drafted += right
            self._work.cycles[emitted] += 1
            place += emitted
