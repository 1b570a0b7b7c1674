"""A download over the chat: asks whether it is wanted, shows how far it is, and stops it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.download import BeforeDownload
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
        here: the pair is. start_chat: the user wants to chat with it. word: what came of it.
    """

    here: bool
    start_chat: bool
    word: str


class PullScreen(ModalScreen[Pulled]):
    """Downloads one pair.

    Args:
        question: its size, and whether it runs here. ask: whether to ask before anything is downloaded.
        draft: with its drafter. leave: whether the end of the download closes this.
    """

    BINDINGS = [
        Binding("enter", "go", "Download"),
        Binding("escape,q", "leave", "Stop"),
    ]
    CSS_PATH = "sheet.tcss"

    def __init__(
        self,
        session: ChatSession,
        name: str,
        question: str,
        before: BeforeDownload,
        ask: bool = True,
        draft: bool = True,
        leave: bool = False,
    ) -> None:
        super().__init__()
        self._session, self._model, self._ask, self._draft, self._leave_at_end = session, name, ask, draft, leave
        room = f"; {before.disk}" if before.disk else ""
        self._question = f"{question}\nIts licence: {before.licence}{room}."
        self._inbox = Inbox()
        self._jobs = Jobs(self._inbox)
        self._download = Download()
        self._word = ""
        self._cancelled = self._left = False
        self.state: State = "asking"

    def compose(self) -> ComposeResult:
        with Vertical(id="pull", classes="sheet"):
            yield Static(Content(f"Download {safe_line(self._model)}"), classes="heading")
            yield Static(Content(safe(self._question)), id="question")
            yield Static("", id="progress", classes="apart", markup=False)
            yield Static("", id="word", classes="apart", markup=False)
            yield Static("", id="keys", classes="heading apart", markup=False)

    def on_mount(self) -> None:
        self.set_interval(PULSE_S, self._pulse)
        self._show()
        if not self._ask:
            self._begin()

    async def on_unmount(self) -> None:
        """Clear up the files in flight first, where the application ends in the middle."""
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
        """Do what the last line says."""
        if self.state == "done":
            self._leave(start_chat=True)
        elif self.state in ("asking", "failed"):
            self._begin()

    def action_leave(self) -> None:
        """Stop what runs, else go back."""
        if not self.stop():
            self._leave(start_chat=False)

    def _leave(self, start_chat: bool) -> None:
        self._left = True
        self.dismiss(Pulled(self.state == "done", start_chat, self._word))

    def _begin(self) -> None:
        self._download, self._cancelled, self._word, self.state = Download(), False, "", "running"
        self._jobs.start(lambda: self._session.pull(self._model, self._inbox.put, lambda: self._cancelled, self._draft))
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
            self.state, self._word = "done", f"{self._model} is here and verified"
            if self._leave_at_end:
                self._leave(start_chat=True)
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
        for repo, event in self._download.repos.items():
            share = event.done / event.total if event.total else 1.0
            gauge = bar(share, BAR).replace(" ", "░")
            figures = f"{int(share * 100):3d}%  {byte_size(event.done)} of {byte_size(event.total)}"
            lines += [safe_line(repo), f"{gauge} {figures}"]
        if not lines:
            return ["asking the Hub what there is"] if self.state in ("running", "stopping") else []
        return [*lines, f"in all {self._download.line}"]
