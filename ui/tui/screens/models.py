"""The pairs of the registry, to choose one from."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static

from dflash_local.app.model_entries import ModelEntry, in_order
from dflash_local.terminal import safe_line


class ModelsScreen(ModalScreen[ModelEntry | None]):
    """A list over the chat; dismissed with what was chosen.

    Args:
        name: of the pair to begin at.
    """

    BINDINGS = [Binding("escape,f7,q", "dismiss", "Close")]
    CSS_PATH = "sheet.tcss"

    def __init__(self, entries: Sequence[ModelEntry], name: str = "") -> None:
        super().__init__()
        self._entries, self._first = in_order(entries), name

    def compose(self) -> ComposeResult:
        width = self._width
        with Vertical(id="picker", classes="sheet"):
            yield Static(_row("Pair", "State", "Download", "Fits this machine", width), classes="heading", markup=False)
            yield OptionList(*(Content(_line(entry, width)) for entry in self._entries), markup=False)
            yield Static("Enter shows the ways to load it. Esc closes this.", classes="heading")

    def on_mount(self) -> None:
        listed = self.query_one(OptionList)
        listed.highlighted = next((at for at, entry in enumerate(self._entries) if entry.name == self._first), 0)
        listed.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._entries[event.option_index])

    @property
    def _width(self) -> int:
        return max((len(entry.name) for entry in self._entries), default=0)


def _line(entry: ModelEntry, width: int) -> str:
    return _row(entry.name, "-" if entry.state == "absent" else entry.state, entry.size, entry.fits, width)


def _row(name: str, state: str, size: str, fits: str, width: int) -> str:
    return safe_line(f"{name.ljust(width)}  {state:8s} {size:>10s}  {fits}")
