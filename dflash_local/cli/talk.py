"""A conversation: its pair, its turns and its wishes, and how one reply is got.

Knows the service and the store; reads no key and parses no command.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_local import settings
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.cli import options as opt
from dflash_local.cli.console import Console
from dflash_local.cli.reply import ReplyPrinter, figures, follow
from dflash_local.cli.session import LoadWish, start_service
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Finished, Mode
from dflash_local.request import Limits, Message, Request, SamplingParams, fresh_seed
from dflash_local.service.service import Service
from dflash_local.settings import Settings
from dflash_local.store.history import Recorder
from dflash_local.store.records import Turn

MAX_NEW_TOKENS = 1024


@dataclass(slots=True)
class Wishes:
    """What the user changed; all else is the model's own default.

    ``sampling`` holds only the fields that were set, so that they outlive a change of model.
    """

    sampling: dict[str, float | int] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(MAX_NEW_TOKENS))
    mode: Mode = "dflash"
    block_size: int | None = None
    thinking: bool = False
    system: str = ""


class Talk:
    """One conversation with one loaded pair at a time; use it in a ``with``."""

    def __init__(self, console: Console, pair: Pair, load: LoadWish, wishes: Wishes, recorder: Recorder) -> None:
        self.console, self.pair, self.wishes, self.recorder = console, pair, wishes, recorder
        self.turns: list[Turn] = []
        self.last: Finished | None = None
        self.replies: list[Finished] = []
        self._load = load
        self._defaults = SamplingParams()
        self._service: Service | None = None

    def __enter__(self) -> Talk:
        self._open(self.pair)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model and the chat file back."""
        self.recorder.close()
        if self._service is not None:
            self._service.close()
            self._service = None

    @property
    def service(self) -> Service:
        """The loaded pair's service."""
        if self._service is None:
            raise UsageError("no model is loaded", "/model NAME loads one")
        return self._service

    @property
    def user(self) -> Settings:
        """The user's settings, as the chat was started with."""
        return self._load.user if self._load.user is not None else settings.load()

    @property
    def broken(self) -> bool:
        """True when no further reply can come from the loaded pair."""
        return self._service is not None and self._service.broken

    @property
    def sampling(self) -> SamplingParams:
        """The model's own sampling with the user's wishes in it."""
        return opt.sampling(self._defaults, **self.wishes.sampling)

    def change_model(self, pair: Pair) -> None:
        """Load another pair in this one's place; this one comes back when that fails.

        The old one goes first: two may not fit into memory.
        """
        before = self.pair
        if self._service is not None:
            self._service.close()
            self._service = None
        try:
            self._open(pair)
        except DFlashError:
            if self._service is None:
                self._open(before)
            raise

    def answer(self, text: str) -> None:
        """Send a message and show the reply; a failed one leaves the conversation as it was.

        Raises:
            DFlashError: the request failed.
        """
        self._add(Turn("user", text))
        came = False
        try:
            came = self._reply(self.sampling)
        finally:
            if not came:
                self._drop(1)
        if not came:
            self.console.note("nothing came of it, your message is taken back", "dim")

    def regenerate(self) -> None:
        """Replace the last reply by one with a fresh seed.

        Raises:
            UsageError: there is no reply yet. DFlashError: the request failed; the old one stays.
        """
        if not self.turns or self.turns[-1].role != "assistant":
            raise UsageError("there is no reply to make again")
        if self.sampling.greedy:
            self.console.note("greedy: the reply will be the same; /set temperature 0.7 changes that", "dim")
        old = self.turns[-1]
        self._drop(1)
        came = False
        try:
            came = self._reply(replace(self.sampling, seed=fresh_seed()))
        finally:
            if not came:
                self._add(old)

    def start_over(self) -> None:
        """Forget the turns; the next one begins a new chat file."""
        self.turns.clear()
        self.last = None
        self.recorder.begin_anew()

    def set_system(self, text: str) -> None:
        """Change the system message from the next reply on."""
        self.wishes.system = text
        self.recorder.record("system", content=text)

    def _open(self, pair: Pair) -> None:
        defaults = sampling_defaults(pair.target)
        wanted = replace(self._load, draft=pair.drafter is not None or self.wishes.mode == "dflash")
        service = start_service(pair, wanted, self.console)
        if not service.facts.has_tokenizer:
            service.close()
            raise UsageError(f"{pair.name} has no tokenizer, so it cannot chat", "dflash run with --prompt-ids works")
        self._service, self.pair, self._defaults = service, pair, defaults

    def _request(self, sampling: SamplingParams) -> Request:
        wishes = self.wishes
        head = (Message("system", wishes.system),) if wishes.system else ()
        return Request(
            messages=(*head, *(turn.message for turn in self.turns)),
            sampling=sampling,
            limits=wishes.limits,
            mode=wishes.mode,
            block_size=wishes.block_size,
            thinking=wishes.thinking,
        )

    def _reply(self, sampling: SamplingParams) -> bool:
        """Get and show a reply to the last turn; False when Ctrl-C came before any text."""
        printer = ReplyPrinter(self.console)
        try:
            reply = follow(self.service.submit(self._request(sampling)), printer)
        finally:
            printer.finish()
        stopped = reply.finished.reason == "cancelled"
        if stopped:
            self.console.note("[stopped]", "yellow")
        if stopped and not reply.text and not reply.thinking:
            return False
        self.last = reply.finished
        self.replies.append(reply.finished)
        self._add(Turn("assistant", reply.text, reply.thinking, stopped, summary(reply.finished)))
        self.console.note(f"[{figures(reply.finished)}, seed {reply.finished.stats.seed}]", "dim")
        return True

    def _add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.recorder.turn(self.pair.name, self.wishes.system, self.turns)

    def _drop(self, count: int) -> None:
        del self.turns[-count:]
        self.recorder.record("drop", count=count)


def summary(finished: Finished) -> dict[str, Any]:
    """The figures kept with a reply."""
    stats = finished.stats
    return {
        "tokens": finished.usage.completion_tokens,
        "tokens_per_s": round(stats.tokens_per_s, 2),
        "mean_acceptance_length": _rounded(stats.mean_acceptance_length),
        "turn_acceptance_length": _rounded(stats.turn_acceptance_length),
        "mode": stats.mode,
        "block_size": stats.block_size,
        "seed": stats.seed,
        "reason": finished.reason,
    }


def histogram(finished: Finished, bar: str, width: int = 40) -> list[str]:
    """The acceptance lengths of a reply as lines of bars, one for each length up to the block."""
    lengths = finished.stats.acceptance_lengths
    if not lengths:
        return []
    counts = {n: lengths.count(n) for n in range(1, max(*lengths, finished.stats.block_size) + 1)}
    most = max(counts.values())
    return [f"{n:3d} {bar * round(width * count / most)} {count}" for n, count in counts.items()]


def parse_setting(wishes: Wishes, name: str, value: str) -> Mapping[str, Any]:
    """What ``/set name value`` changes: fields of ``Wishes``.

    Raises:
        UsageError: the value is not allowed.
    """
    if name == "thinking":
        return {"thinking": _switch(value)}
    if name == "max_new_tokens":
        return {"limits": replace(wishes.limits, max_new_tokens=_number(name, value, int))}
    if name == "stop":
        return {"limits": replace(wishes.limits, stop=() if value == "off" else (*wishes.limits.stop, value))}
    if name == "block_size":
        return {"block_size": None if value == "auto" else _number(name, value, int)}
    if name == "seed" and value == "random":
        return {"sampling": {key: old for key, old in wishes.sampling.items() if key != "seed"}}
    kind = int if name in ("seed", "top_k") else float
    changed = {**wishes.sampling, name: _number(name, value, kind)}
    opt.sampling(SamplingParams(), **changed)  # refuses what is out of range
    return {"sampling": changed}


def _number(name: str, value: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, got {value!r}") from error


def _switch(value: str) -> bool:
    words: dict[str, Literal[True, False]] = {"on": True, "true": True, "off": False, "false": False}
    if value.lower() not in words:
        raise UsageError(f"thinking must be on or off, got {value!r}")
    return words[value.lower()]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
