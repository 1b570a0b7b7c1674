"""What stands over the chat in a frame: help, the pairs of the registry, and a download."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.download import BeforeDownload
from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.errors import DFlashError, Interrupted
from dflash_local.settings import Settings
from dflash_local.store.settings_file import remember
from dflash_local.terminal import byte_size, safe, safe_line
from dflash_local.ui.downloads import PullJob
from dflash_local.ui.tui.meter import gauge

KEYS = {
    "Enter": "send the message",
    "Shift+Enter, Ctrl+J": "new line",
    "Up, Down": "earlier messages, at the first or last line",
    "/": "the commands: arrows, then Tab or Enter",
    "Esc, Ctrl+C": "stop the reply; Ctrl+C empties the field, twice leaves",
    "Ctrl+R": "the last reply again, with a fresh seed",
    "F2": "show or hide the meter",
    "F3": "show where each token came from",
    "F4": "write the message in $EDITOR",
    "F5": "race: this message with and without drafting",
    "F7": "choose another pair",
    "F8": "edit the last message and send it anew",
    "F9": "copy the last reply",
    "Page Up, Page Down": "scroll the conversation",
    "Ctrl+P": "command palette: themes and all of these",
    "Ctrl+Z": "to the shell; a reply waits until fg",
    "Ctrl+_": "undo in the field",
    "Ctrl+Q": "leave",
}


class HelpScreen(ModalScreen[None]):
    """Tells what the keys and the commands do; any of its keys takes it away."""

    BINDINGS = [Binding("escape,f1,q,enter", "dismiss", "Close")]

    def __init__(self, commands: Mapping[str, str]) -> None:
        super().__init__()
        self._tables = {"Keys": KEYS, "Commands": commands}

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="sheet"):
            for title, rows in self._tables.items():
                yield Static(title, classes="heading apart")
                width = max(map(len, rows), default=0)
                yield Static(Content("\n".join(f"{name.ljust(width)}  {what}" for name, what in rows.items())))
            yield Static("A message may begin with // instead of /. Esc closes this.", classes="heading apart")


class ModelsScreen(ModalScreen[ModelEntry | None]):
    """Lists the pairs of the registry; dismissed with the one that was chosen.

    Args:
        name: of the pair to begin at.
    """

    BINDINGS = [Binding("escape,f7,q", "dismiss", "Close"), Binding("m", "remember", "Begin with it")]

    def __init__(self, entries: Sequence[ModelEntry], user: Settings, name: str = "") -> None:
        super().__init__()
        self._entries, self._user, self._first = in_order(entries), user, name

    def compose(self) -> ComposeResult:
        width = max((len(entry.name) for entry in self._entries), default=0)

        def row(name: str, state: str, size: str, fits: str) -> Content:
            return Content(safe_line(f"{name.ljust(width)}  {state:8s} {size:>10s}  {fits}"))

        rows = [
            row(entry.name, "-" if entry.state == "absent" else entry.state, entry.size, entry.fits)
            for entry in self._entries
        ]
        with Vertical(id="picker", classes="sheet"):
            yield Static(row("Pair", "State", "Download", "Fits this machine"), classes="heading")
            yield OptionList(*rows, markup=False)
            yield Static(
                "Enter shows the ways to load it. m: begin with it from now on. Esc closes this.",
                id="keys",
                classes="heading",
                markup=False,
            )

    def on_mount(self) -> None:
        listed = self.query_one(OptionList)
        listed.highlighted = next((at for at, entry in enumerate(self._entries) if entry.name == self._first), 0)
        listed.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index])

    def action_remember(self) -> None:
        """Let commands that are given no MODEL take the one that is highlighted."""
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self.query_one("#keys", Static).update(Content(begin_with(self._entries[at].name, self._user)))


def begin_with(name: str, user: Settings) -> str:
    """Write into the user's settings what to begin with where no MODEL is given, and say what came of it."""
    try:
        remember(user, model=name)
    except DFlashError as error:
        return safe_line(f"error: {error}")
    return safe_line(f"dflash chat begins with {name} from now on")


PULSE_S = 0.1
STOP_S = 5.0  # a pull that is stopped ends within two
BAR = 30
State = Literal["asking", "running", "stopping", "failed", "done"]
DOING: dict[State, str] = {
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
    """Downloads one pair: asks whether it is wanted, shows how far it is, and stops it.

    Args:
        question: its size, and whether it runs here. ask: whether to ask before anything is downloaded.
        draft: with its drafter. leave: whether the end of the download closes this.
    """

    BINDINGS = [
        Binding("enter", "go", "Download"),
        Binding("escape,q", "leave", "Stop"),
    ]

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
        self._job: PullJob | None = None
        self._left = False
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
        if not self._ask:
            self.action_go()
        self._pulse()

    async def on_unmount(self) -> None:
        """Clear up the files in flight first, where the application ends in the middle."""
        if self._job is not None:
            self._job.cancel()
            if not self._left:
                await asyncio.to_thread(self._job.join, STOP_S)

    def stop(self) -> bool:
        """End the download early; False when none runs."""
        if self.state != "running" or self._job is None:
            return False
        self.state = "stopping"
        self._job.cancel()
        self._pulse()
        return True

    def action_go(self) -> None:
        """Do what the last line says."""
        if self.state == "done":
            self._leave(start_chat=True)
        elif self.state in ("asking", "failed"):
            self.state = "running"
            pull, draft = self._session.pull, self._draft
            self._job = PullJob(self._model, lambda hear, cancelled: pull(self._model, hear, cancelled, draft))

    def action_leave(self) -> None:
        """Stop what runs, else go back."""
        if not self.stop():
            self._leave(start_chat=False)

    def _leave(self, start_chat: bool) -> None:
        self._left = True
        self.dismiss(Pulled(self.state == "done", start_chat, self._word))

    def _pulse(self) -> None:
        if self.state in ("running", "stopping") and self._job is not None and not self._job.running:
            self.state = "done" if self._job.error is None else "failed"
            if self.state == "done" and self._leave_at_end:
                self._leave(start_chat=True)
        for name, text in (("progress", self._progress), ("word", self._word), ("keys", DOING[self.state])):
            place = self.query_one(f"#{name}", Static)
            place.update(Content(text))
            place.display = bool(text)
        self.query_one("#word", Static).set_class(self.state == "failed", "-failed")

    @property
    def _word(self) -> str:
        """Say what came of it, or what was said besides figures."""
        job = self._job
        if self.state == "done":
            return f"{self._model} is here and verified"
        if self.state == "failed" and job is not None and (error := job.error) is not None:
            hint = f"; {error.hint}" if error.hint else ""
            return safe_line(f"{'' if isinstance(error, Interrupted) else 'error: '}{error.message}{hint}")
        notice = job.notice if job is not None else None
        return "" if notice is None else safe_line(f"{'warning: ' * (notice.level == 'warning')}{notice.message}")

    @property
    def _progress(self) -> str:
        if self._job is None:
            return ""
        lines: list[str] = []
        for event in self._job.repos:
            share = event.done / event.total if event.total else 1.0
            figures = f"{int(share * 100):3d}%  {byte_size(event.done)} of {byte_size(event.total)}"
            lines += [safe_line(event.repo), f"{gauge(share, BAR)} {figures}"]
        total = self._job.figures[2]
        return "\n".join([*lines, f"in all {total}"]) if lines else total if self._job.running else ""
