"""Where replies come from: a loaded pair behind one protocol, and what is known of a pair before it is loaded.

Three kinds exist: ``app.local_process.LocalProcess``, ``remote.openai_server.OpenAIServer``, and in this very process
the engine's own session. Nobody above asks which one it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dflash_local.catalog.bundled import Pair
from dflash_local.chat.tool_calls import GENERAL_FORM, CallFormat
from dflash_local.errors import DFlashError
from dflash_local.events import Event, LoadProgress, Mode
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import HeldCount, SessionFacts
from dflash_local.request import Request, SamplingParams

State = Literal["ready", "loading", "unloaded", "broken"]


class Backend(Protocol):
    """A loaded pair.

    ``generate`` prepares the prompt when it is called, and makes the reply while it is iterated: an error of the
    call is one of the request, never of the engine. It stops within one cycle once ``cancelled`` returns True.
    ``count`` returns the tokens of the prompt that ``generate`` would prepare, also from another thread while a reply
    is made; UsageError where the backend cannot tell. ``held`` counts the conversations that it can go on
    from, likewise.

    ``set_aside`` lets another reply begin while an iterator is paused, which goes on as if nothing had been when it is
    iterated again, or ends without the device if it is cancelled by then; False where that cannot be. It is None where
    the backend orders replies itself: several are asked of it at a time then, each from a thread of its own.
    """

    @property
    def facts(self) -> SessionFacts: ...

    def generate(self, request: Request, cancelled: Callable[[], bool] = ...) -> Iterator[Event]: ...

    def count(self, request: Request) -> int: ...

    def held(self) -> tuple[HeldCount, ...]: ...

    @property
    def set_aside(self) -> Callable[[], bool] | None: ...

    def close(self) -> None: ...


Load = Callable[[Callable[[LoadProgress], None]], Backend]


@dataclass(frozen=True, slots=True)
class Model:
    """A pair that can be loaded, and what is known of it without loading.

    Attributes:
        load: loads it, telling how far it is. The backend's ``close`` releases all that was taken.
        pair: its files. aliases: other names that mean it.
        sampling, thinking, mode: for requests that do not set it: as its authors advise; ``ar`` without a drafter.
        takes_effort: its template reads ``reasoning_effort``.
        call_format: how it writes tool calls (``chat.tool_calls.format_of``).
        context: tokens that it would hold once loaded; None where only the load knows.
        kept_by: what keeps it loaded, where that is not this program: it is not unloaded then.
    """

    name: str
    load: Load
    pair: Pair | None = None
    aliases: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    thinking: bool = False
    mode: Mode = "dflash"
    takes_effort: bool = False
    call_format: CallFormat = GENERAL_FORM
    context: int | None = None
    kept_by: str = ""

    def answers_to(self, name: str) -> bool:
        """Return True when ``name`` means this model; case does not matter."""
        return name.casefold() in {known.casefold() for known in (self.name, *self.aliases)}


Find = Callable[[str, LoadConfig | None], Model]


@dataclass(frozen=True, slots=True)
class Status:
    """How the served model is at one moment.

    Attributes:
        running, waiting, set_aside: requests; the last have begun, and wait for another turn.
        progress: of the load under way, None otherwise.
        last_progress_s: seconds since the engine or the loader last reported something; None before it did.
        error: what broke the engine or the last load.
    """

    model: str
    state: State
    running: int
    waiting: int
    set_aside: int
    last_progress_s: float | None
    progress: LoadProgress | None
    error: DFlashError | None
