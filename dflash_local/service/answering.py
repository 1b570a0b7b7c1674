"""One request's events on their way from a backend to its reader, and how that ended."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from dflash_local.errors import DFlashError, EngineError, ExactnessError, NumericsError, PromptError
from dflash_local.events import Event
from dflash_local.request import Request
from dflash_local.service.backend import Backend
from dflash_local.service.ticket import Ticket


class Outcome(NamedTuple):
    """How a request ended: without an error when ``Finished`` was published.

    Attributes:
        broke: the backend cannot be used any more.
    """

    error: DFlashError | None
    trace: TracebackType | None = None
    broke: bool = False


def answer(
    ticket: Ticket,
    backend: Backend | None,
    observe: Callable[[Request, Event], None],
    gives_way: Callable[[Ticket, Callable[[], bool] | None], bool],
) -> Outcome | None:
    """Publish a request's events to its end, or until it gives way behind one of them: None then."""
    trace: TracebackType | None = None
    error: DFlashError | None = None
    try:
        assert backend is not None  # nothing changes while a request runs
        if ticket.events is None:
            ticket.events = backend.generate(ticket.request, lambda: ticket.cancelled)
        for event in ticket.events:
            observe(ticket.request, event)
            ticket.publish(event)
            if gives_way(ticket, backend.set_aside):
                return None
        if not ticket.done:
            error = EngineError("the engine ended a reply without saying why")
    except DFlashError as raised:
        error, trace = raised, raised.__traceback__
    except BaseException as raised:  # a named broad one: an unknown fault, or a library's panic, ends no worker
        begun = ticket.events is not None
        kind, what = (EngineError, "the engine failed") if begun else (PromptError, "the prompt cannot be prepared")
        error = kind(f"{what}: {type(raised).__name__}: {raised}", "run again with --debug for the traceback")
        error.__cause__, trace = raised, raised.__traceback__
    # A request that failed by its own input, logits or memory leaves the backend healthy.
    own = ticket.events is None or isinstance(error, (NumericsError, ExactnessError))
    ticket.events = None
    return Outcome(error, trace, isinstance(error, EngineError) and not own)
