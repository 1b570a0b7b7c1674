"""What a command and the engine's process send each other: pickled records, over a socket of this user alone.

On a connection the command sends ``Open``, ``Generate``, ``AskStatus`` or ``Stop``. The answer to ``Generate`` is its
events, to ``Open`` those of the load and then ``Opened`` or ``Occupied``; in either's place ``Failed`` may come.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from dflash_local import errors
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DFlashError, EngineError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
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
    """The command that opened the pair is done with it; the answer is ``Left``."""


@dataclass(frozen=True, slots=True)
class Left:
    """``ends``: nobody else uses the pair, so that the process ends now."""

    ends: bool


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Say what is loaded; the answer is ``ProcessStatus``."""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What the process holds, for so many commands; without facts while it loads."""

    name: str
    facts: SessionFacts | None
    commands: int


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
class Failed:
    """The error that ended a load or a reply: the name of its class, and where it was raised."""

    kind: str
    message: str
    hint: str
    trace: str

    @classmethod
    def of(cls, error: DFlashError) -> Failed:
        return cls(error.kind, error.message, error.hint, "".join(traceback.format_exception(error)))

    def error(self) -> DFlashError:
        """The same error, its cause the traceback of the other process in words."""
        kind: type[DFlashError] = getattr(errors, self.kind, EngineError)
        error = kind(self.message, self.hint)
        error.__cause__ = RuntimeError(f"in the engine's process:\n{self.trace}")
        return error
