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
from dflash_local.app.default_model import remember_default
from dflash_local.app.download import BeforeDownload
from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.errors import DFlashError, Interrupted
from dflash_local.settings import Settings
from dflash_local.tables import cut, field
from dflash_local.terminal import byte_size, safe, safe_line
from dflash_local.ui.downloads import PullJob
from dflash_local.ui.tui.meter import gauge

KEYS = {
    "Enter": "send the message",
    "Shift+Enter, Ctrl+J": "new line",
    "Up, Down": "earlier messages, at the first or last line",
    "/": "the commands: arrows, then Tab or Enter",
    "Esc, Ctrl+C": "stop; Ctrl+C empties the field, twice leaves",
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


WIDEST, BESIDE = 78, 8  # columns of the help; of any sheet those around a row
STATE, SIZE, FITS = 9, 13, 16  # columns of a list of pairs; a narrow one has no size, and a very narrow one no state


class HelpScreen(ModalScreen[None]):
    """Tells what the keys and the commands do; any of its keys takes it away."""

    BINDINGS = [Binding("escape,f1,q,enter", "dismiss", "Close")]

    def __init__(self, commands: Mapping[str, str]) -> None:
        super().__init__()
        self._tables = {"Keys": KEYS, "Commands": commands}

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="sheet"):
            for title in self._tables:
                yield Static(title, classes="heading apart")
                yield Static(classes="table", markup=False)
            yield Static("A message may begin with // instead of /. Esc closes this.", classes="heading apart")

    def on_resize(self) -> None:
        width = min(self.size.width, WIDEST) - BESIDE
        for place, rows in zip(self.query(".table").results(Static), self._tables.values(), strict=True):
            indent = max(map(len, rows), default=0) + 2
            lines = [line for name, what in rows.items() for line in field(name, what, width, indent)]
            place.update(Content("\n".join(lines)))


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
        with Vertical(id="picker", classes="sheet"):
            yield Static(id="columns", classes="heading", markup=False)
            yield OptionList(*[""] * len(self._entries), markup=False)
            yield Static(
                "Enter: the ways to load it · m: begin with it from now on · Esc closes",
                id="keys",
                classes="heading",
                markup=False,
            )

    def on_resize(self) -> None:
        """Draw the rows anew: a narrow one is without its size, the narrowest without the state, too."""
        whole = self.query_one("#picker").size.width - BESIDE + 2
        names = max((len(entry.name) for entry in self._entries), default=0) + 2
        size, state = (SIZE if whole >= 64 else 0), (STATE if whole >= 36 else 0)
        name = max(8, min(names, whole - size - state - FITS))

        def row(*cells: str) -> Content:
            first, kind, download, fits = map(safe_line, cells)
            middle = f"{kind:{STATE}s}"[:state] + f"{download:>11s}  "[:size]
            return Content(f"{cut(first, name - 2):{name}s}{middle}{fits}")

        self.query_one("#columns", Static).update(row("Pair", "State", "Download", "Fits this machine"))
        listed = self.query_one(OptionList)
        for at, entry in enumerate(self._entries):
            kind = "-" if entry.state == "absent" else entry.state
            listed.replace_option_prompt_at_index(at, row(entry.name, kind, entry.size, entry.fits))

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
        remember_default(name, user)
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
