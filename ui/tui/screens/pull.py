"""A download over the chat: asks whether it is wanted, shows how far it is, and stops it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Literal

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.model_entries import ModelEntry
from dflash_local.errors import DFlashError, Interrupted
from dflash_local.events import Notice, PullProgress
from dflash_local.terminal import byte_size, safe, safe_line
from dflash_local.ui.downloads import Download
from dflash_local.ui.tui.jobs import Ended, Inbox, Jobs
from dflash_local.ui.tui.widgets.bars import bar

PULSE_S = 0.1
STOP_S = 5.0  # a pull that is stopped ends within two
BAR = 30
State = Literal["asking", "running", "stopping", "failed", "done"]
KEYS: dict[State, str] = {
    "asking": "Enter downloads it, Esc does not",
    "running": "Esc stops it; finished files are kept",
    "stopping": "stopping; Esc closes this at once",
    "failed": "Enter tries again, Esc closes this",
    "done": "Enter talks to it, Esc closes this",
}


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a download was left.

    Attributes:
        entry: the pair as it is now. start_chat: the user wants to chat with it. word: what came of it.
    """

    entry: ModelEntry
    start_chat: bool
    word: str


class PullScreen(ModalScreen[Pulled]):
    """Downloads one pair.

    Args:
        ask: whether to ask before anything is downloaded.
    """

    BINDINGS = [
        Binding("enter", "go", "Download"),
        Binding("escape,q", "leave", "Stop"),
    ]
    CSS_PATH = "pull.tcss"

    def __init__(self, session: ChatSession, entry: ModelEntry, ask: bool = True) -> None:
        super().__init__()
        self._session, self._entry, self._ask = session, entry, ask
        self._inbox = Inbox()
        self._jobs = Jobs(self._inbox)
        self._download = Download()
        self._word = ""
        self._cancelled = self._left = False
        self.state: State = "asking"

    def compose(self) -> ComposeResult:
        with Vertical(id="pull"):
            yield Static(Content(f"Download {safe_line(self._entry.name)}"), classes="heading")
            yield Static(Content(safe(self._entry.question)), id="question")
            yield Static("", id="progress", markup=False)
            yield Static("", id="word", markup=False)
            yield Static("", id="keys", classes="heading", markup=False)

    def on_mount(self) -> None:
        self.set_interval(PULSE_S, self._pulse)
        self._show()
        if not self._ask:
            self._begin()

    async def on_unmount(self) -> None:
        """The application may end in the middle: then the files in flight are cleared up first."""
        self._cancelled = True
        if not self._left:
            await asyncio.to_thread(self._jobs.join, STOP_S)

    def stop(self) -> bool:
        """End the download early; False when none runs."""
        if self.state != "running":
            return False
        self._cancelled, self.state = True, "stopping"
        self._show()
        return True

    def action_go(self) -> None:
        """Enter: what the last line says."""
        if self.state == "done":
            self._leave(start_chat=True)
        elif self.state in ("asking", "failed"):
            self._begin()

    def action_leave(self) -> None:
        """Esc: stop what runs, else go back."""
        if not self.stop():
            self._leave(start_chat=False)

    def _leave(self, start_chat: bool) -> None:
        self._left = True
        here = "local" if self.state == "done" else "partial" if self._download.done else self._entry.state
        self.dismiss(Pulled(replace(self._entry, state=here), start_chat, self._word))

    def _begin(self) -> None:
        self._download, self._cancelled, self._word, self.state = Download(), False, "", "running"
        self._jobs.start(lambda: self._session.pull(self._entry.name, self._inbox.put, lambda: self._cancelled))
        self._show()

    def _pulse(self) -> None:
        items = self._inbox.take()
        for item in items:
            if isinstance(item, PullProgress):
                self._download.take(item)
            elif isinstance(item, Notice):
                self._word = f"warning: {item.message}" if item.level == "warning" else item.message
            elif isinstance(item, Ended):
                self._ended(item.error)
        if items:
            self._show()

    def _ended(self, error: DFlashError | None) -> None:
        if error is None:
            self.state, self._word = "done", f"{self._entry.name} is here and verified"
            return
        hint = f"; {error.hint}" if error.hint else ""
        self.state = "failed"
        self._word = f"{'' if isinstance(error, Interrupted) else 'error: '}{error.message}{hint}"

    def _show(self) -> None:
        for name, text in (("progress", "\n".join(self._lines())), ("word", safe_line(self._word))):
            place = self.query_one(f"#{name}", Static)
            place.update(Content(text))
            place.display = bool(text)
        self.query_one("#word", Static).set_class(self.state == "failed", "-failed")
        self.query_one("#keys", Static).update(Content(KEYS[self.state]))

    def _lines(self) -> list[str]:
        if self.state == "asking":
            return []
        lines = []
        for repo, (done, total) in self._download.repos.items():
            share = done / total if total else 1.0
            gauge = bar(share, BAR).replace(" ", "░")
            lines += [safe_line(repo), f"{gauge} {int(share * 100):3d}%  {byte_size(done)} of {byte_size(total)}"]
        if not lines:
            return ["asking the Hub what there is"] if self.state in ("running", "stopping") else []
        return [*lines, f"in all {self._download.line}"]
