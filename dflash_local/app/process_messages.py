"""What a command and the engine's process send each other: pickled records, over a socket of this user alone.

On a connection the command sends ``Open``, ``Generate``, ``CountTokens``, ``Measure``, ``AskStatus`` or ``Stop``. The
answer to ``Generate`` is its events, to ``CountTokens`` a number, to ``Open`` the events of the load and then
``Opened`` or ``Occupied``, to ``Measure`` its progress and then ``MeasureResult``; in place of each may come
``Failed``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dflash_local import errors
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DFlashError, EngineError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import HeldCount, SessionFacts
from dflash_local.request import Request


@dataclass(frozen=True, slots=True)
class Open:
    """Load a pair, or use it as it is loaded. It stays loaded as long as a connection that asked for it is open."""

    version: str
    pair: Pair
    load: LoadConfig


@dataclass(frozen=True, slots=True)
class Opened:
    """The pair can be used."""

    facts: SessionFacts


@dataclass(frozen=True, slots=True)
class Occupied:
    """Something else is loaded: ``reason`` says what, in words for the user; empty where it is another pair."""

    reason: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The command that opened the pair is done with it; the answer is ``Left``.

    ``keep``: the process stays, also without anybody who uses the pair.
    """

    keep: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """``ends``: nobody else uses the pair, so that the process ends now."""

    ends: bool


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Say what is loaded; the answer is ``ProcessStatus``."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What the process holds, for so many commands, and its conversations; no facts while it loads or measures."""

    name: str
    state: Literal["loading", "ready", "measuring"]
    facts: SessionFacts | None
    commands: int
    held: tuple[HeldCount, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process, whoever uses it; the end of the connection is the answer."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Reply to a request. ``Cancel`` on the same connection, or its end, cancels it."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the reply; its ``Finished`` follows."""


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Say how many tokens the request's prompt has, also while the process replies to another one."""

    request: Request


@dataclass(frozen=True, slots=True)
class Measure:
    """Do a job, a function pickled by its name, in a process that nobody else uses; the connection's end ends it.

    Attributes:
        name: of the model that it measures, for ``dflash ps``.
        job: that is given the settings there, and who is told how far it is.
    """

    name: str
    job: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """Bring what the job returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ended a load, a reply or a measurement: the name of its class, and where it was raised."""

    kind: str
    message: str
    hint: str
    trace: str

    @classmethod
    def of(cls, fault: Exception, what: str = "") -> Failed:
        """Describe an error; another library's becomes an EngineError that names what failed."""
        error = fault
        if not isinstance(error, DFlashError):  # as in the service, it is told in a line
            text = f"{what} failed: {type(fault).__name__}: {fault}"
            error = EngineError(text, "run again with --debug for the traceback")
            error.__cause__ = fault
        return cls(error.kind, error.message, error.hint, "".join(traceback.format_exception(error)))

    def error(self) -> DFlashError:
        """The same error, its cause the traceback of the other process in words."""
        kind: type[DFlashError] = getattr(errors, self.kind, EngineError)
        error = kind(self.message, self.hint)
        error.__cause__ = RuntimeError(f"in the engine's process:\n{self.trace}")
        return error
