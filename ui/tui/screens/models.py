"""The pairs of the registry, to choose one from."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.terminal import safe_line
from dflash_local.ui.tui.screens.pull import Pulled, PullScreen


class ModelsScreen(ModalScreen[ModelEntry | None]):
    """A list over the chat; dismissed with what was chosen."""

    BINDINGS = [Binding("escape,f7,q", "dismiss", "Close")]
    CSS_PATH = "models.tcss"

    def __init__(self, session: ChatSession, entries: Sequence[ModelEntry]) -> None:
        super().__init__()
        self._session = session
        self._entries = in_order(entries)

    def compose(self) -> ComposeResult:
        width = self._width
        with Vertical(id="picker"):
            yield Static(_row("Pair", "State", "Download", "Fits this machine", width), classes="heading", markup=False)
            yield OptionList(*(Content(_line(entry, width)) for entry in self._entries), markup=False)
            yield Static("Enter talks to it, or downloads it first. Esc closes this.", classes="heading")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Chosen; what is not here is downloaded over the list."""
        entry = self._entries[event.option_index]
        if entry.here:
            self.dismiss(entry)
            return

        def back(pulled: Pulled | None) -> None:
            if pulled is None:
                return
            self._entries[event.option_index] = pulled.entry
            if pulled.start_chat:
                self.dismiss(pulled.entry)
            else:
                line = Content(_line(pulled.entry, self._width))
                self.query_one(OptionList).replace_option_prompt_at_index(event.option_index, line)

        self.app.push_screen(PullScreen(self._session, entry), back)

    @property
    def _width(self) -> int:
        return max((len(entry.name) for entry in self._entries), default=0)


def _line(entry: ModelEntry, width: int) -> str:
    return _row(entry.name, "-" if entry.state == "absent" else entry.state, entry.size, entry.fits, width)


def _row(name: str, state: str, size: str, fits: str, width: int) -> str:
    return safe_line(f"{name.ljust(width)}  {state:8s} {size:>10s}  {fits}")
