"""Who is at the page: what each window has and does, told apart by Gradio's session.

A window that is loaded anew comes with another session and takes up the chat of the one before: the browser's tab
remembers which (``ChatView.key``, and the name of its file for when the server was restarted meanwhile).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from dflash_local.errors import BusyError
from dflash_local.service.service import Service
from dflash_local.ui.job import Job
from dflash_local.ui.web.chat_view import SHOWN, ChatView

if TYPE_CHECKING:
    from dflash_local.ui.web.bench_run import BenchRun
    from dflash_local.ui.web.load_dialog import Asked, Planned

MOST = 200  # windows that are remembered
KEEP_S = 3600.0  # a window that lost its connection may come back so long
GRACE_S = 20.0  # a reply goes on so long without any window: one that is loaded anew is back by then


@dataclass(slots=True)
class Visitor:
    """One window.

    Attributes:
        model: the one that its settings were filled in for. origins: show where each token came from.
        editing: how far back the message is that the field holds for another try. search: of the list of chats.
        most: turns that are shown.
        chosen: the pair that was picked in the table of pairs. order: of that table's rows.
        asked, planned, planned_before: ways to load: wanted, shown, and shown before. bench: the last run.
        jobs: what it has under way besides its conversation, by the tab. left: when it went, by the monotonic clock.
    """

    chat: ChatView
    model: str = ""
    origins: bool = False
    editing: int | None = None
    search: str = ""
    most: int = SHOWN
    chosen: str = ""
    order: list[str] = field(default_factory=list)
    asked: Asked | None = None
    planned: Planned | None = None
    planned_before: Planned | None = None
    bench: BenchRun | None = None
    jobs: dict[str, Job[Any]] = field(default_factory=dict)
    left: float | None = None

    @contextmanager
    def runs(self, tab: str, job: Job[Any]) -> Iterator[None]:
        """Have the job under way within; a window that is closed leaves it, which ends the job."""
        self.jobs[tab] = job
        try:
            yield
        finally:
            job.cancel()
            self.jobs.pop(tab, None)

    def cancel(self, tab: str) -> None:
        """End what a tab has under way."""
        if job := self.jobs.get(tab):
            job.cancel()

    def stop(self) -> None:
        """End everything that it has under way besides its conversation."""
        for tab in list(self.jobs):
            self.cancel(tab)


class Visitors:
    """Knows all windows. Its methods may be called from any thread.

    Args:
        folder: where chats are kept; None keeps none.
    """

    def __init__(self, service: Service, folder: Path | None = None, most: int = MOST) -> None:
        self._service, self.folder, self._most = service, folder, most
        self._lock = threading.Lock()
        self._all: OrderedDict[str, Visitor] = OrderedDict()
        self._writers: dict[str, Visitor] = {}  # by the chat's key

    def of(self, request: gr.Request) -> Visitor:
        """Find the window that a request came from."""
        name = request.session_hash or ""
        with self._lock:
            visitor = self._all.pop(name, None) or Visitor(self.new_chat())
            visitor.left = None
            self._all[name] = visitor
            gone = self._forget()
        for other in gone:
            other.stop()
            self._leave_later(other.chat, other)
        return visitor

    def new_chat(self) -> ChatView:
        """Make a chat that nobody has said anything in."""
        return ChatView(self._service, self.folder)

    def take_up(self, visitor: Visitor, key: str = "", name: str = "") -> None:
        """Show a window the chat of that key, or of that file's name; where neither is known it keeps its own.

        Raises:
            DFlashError: its file cannot be read.
        """
        with self._lock:
            live = [one.chat for one in self._all.values()]
        chat = next((one for one in live if (key and one.key == key) or (name and one.name == name)), None)
        if chat is None and name:
            chat = self.new_chat()
            chat.open(name)
        elif chat is not None:
            chat.come_back()
        self._show(visitor, chat or visitor.chat)

    def show_new(self, visitor: Visitor) -> None:
        """Give a window a new chat; the one that it showed stays as it is."""
        self._show(visitor, self.new_chat())

    def release(self, visitor: Visitor, name: str) -> None:
        """Let go of a chat of the store, whose file is about to be deleted; BusyError where another window shows it."""
        with self._lock:
            shown = [one for one in self._all.values() if one.chat.name == name]
            if any(one.left is None and one is not visitor for one in shown):
                raise BusyError("this chat is open in another window", "close that window first")
        for one in shown:
            before = one.chat
            self.show_new(one)
            before.leave()

    def _show(self, visitor: Visitor, chat: ChatView) -> None:
        before, visitor.chat, visitor.editing, visitor.most = visitor.chat, chat, None, SHOWN
        if before is not chat:
            self._leave_later(before, visitor)

    def take(self, visitor: Visitor) -> None:
        """Have a window write its chat from now on; BusyError where another one that is open does."""
        with self._lock:
            writer = self._writers.get(visitor.chat.key)
            other = writer if writer is not visitor else None
            if other is not None and other.left is None and other.chat is visitor.chat:
                raise BusyError(
                    "this chat is open in another window", "go on there, or close that window; New chat is yours"
                )
            self._writers[visitor.chat.key] = visitor

    def leave(self, request: gr.Request) -> None:
        """Take note of a window that was closed, loaded anew, or lost its connection.

        A reply goes on for a while: the window may come back for it.
        """
        with self._lock:
            visitor = self._all.get(request.session_hash or "")
        if visitor is not None:
            visitor.left = time.monotonic()
            visitor.stop()
            self._leave_later(visitor.chat, visitor)

    def close(self) -> None:
        """End all replies, what came of them is kept, and leave the files."""
        with self._lock:
            chats = {id(one.chat): one.chat for one in self._all.values()}
        for chat in chats.values():
            chat.stop()
        for chat in chats.values():
            chat.leave()

    def _leave_later(self, chat: ChatView, visitor: Visitor) -> None:
        timer = threading.Timer(GRACE_S, self._leave_alone, (chat, visitor))
        timer.daemon = True
        timer.start()

    def _leave_alone(self, chat: ChatView, visitor: Visitor) -> None:
        """Leave a chat that no open window shows; a window that shows another one may come back for its reply."""
        with self._lock:
            shown = any(one.chat is chat and one.left is None for one in self._all.values())
            coming = visitor.left is None and chat.busy
            if not shown and not coming:
                self._writers.pop(chat.key, None)
        if coming and not shown:
            self._leave_later(chat, visitor)
        elif not shown:
            chat.leave()

    def _forget(self) -> list[Visitor]:
        """Drop those that went long ago, and the oldest of too many."""
        now = time.monotonic()
        old = [name for name, one in self._all.items() if one.left is not None and now - one.left > KEEP_S]
        old += [name for name in self._all if name not in old][: max(0, len(self._all) - len(old) - self._most)]
        return [self._all.pop(name) for name in old]
