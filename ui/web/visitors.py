"""Who is at the page: one conversation and one race for each window, told apart by Gradio's session."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

import gradio as gr

from dflash_local.service.resident import Resident
from dflash_local.ui.web.chat_view import ChatView

MOST = 200  # windows that are remembered
KEEP_S = 3600.0  # a window that lost its connection may come back so long


class Stoppable(Protocol):
    """Work that a window has under way."""

    def stop(self) -> None:
        """End it early."""
        ...


@dataclass(slots=True)
class Visitor:
    """One window.

    Attributes:
        model: the one that its settings were filled in for. origins: show where each token came from.
        running: what it has under way besides its conversation.
        left: when it went, by the monotonic clock.
    """

    chat: ChatView
    model: str = ""
    origins: bool = False
    running: list[Stoppable] = field(default_factory=list)
    left: float | None = None

    def stop(self) -> None:
        """End everything that it has under way."""
        self.chat.stop()
        for work in list(self.running):
            work.stop()


class Visitors:
    """All windows. Its methods may be called from any thread."""

    def __init__(self, resident: Resident, most: int = MOST) -> None:
        self._resident, self._most = resident, most
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Visitor] = OrderedDict()

    def of(self, request: gr.Request) -> Visitor:
        """The window that a request came from; one without a session is nobody's again afterwards."""
        name = request.session_hash
        if not name:
            return Visitor(ChatView(self._resident))
        with self._lock:
            visitor = self._all.pop(name, None) or Visitor(ChatView(self._resident))
            visitor.left = None
            self._all[name] = visitor
            gone = self._forget()
        for other in gone:
            other.stop()
        return visitor

    def leave(self, request: gr.Request) -> None:
        """The window was closed, or lost its connection: what it has under way ends."""
        with self._lock:
            visitor = self._all.get(request.session_hash or "")
            if visitor is not None:
                visitor.left = time.monotonic()
        if visitor is not None:
            visitor.stop()

    def _forget(self) -> list[Visitor]:
        """Those that went long ago, and the oldest of too many."""
        now = time.monotonic()
        old = [name for name, one in self._all.items() if one.left is not None and now - one.left > KEEP_S]
        old += [name for name in self._all if name not in old][: max(0, len(self._all) - len(old) - self._most)]
        return [self._all.pop(name) for name in old]
