"""What the keys and the commands do."""

from __future__ import annotations

from collections.abc import Mapping

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

KEYS = {
    "Enter": "send the message",
    "Shift+Enter, Ctrl+J": "new line",
    "Up, Down": "earlier messages, at the first or last line",
    "Tab": "complete a command",
    "Esc, Ctrl+C": "stop the reply; Ctrl+C twice leaves",
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
    """Covers the chat; any of its keys takes it away."""

    BINDINGS = [Binding("escape,f1,q,enter", "dismiss", "Close")]
    CSS_PATH = "sheet.tcss"

    def __init__(self, commands: Mapping[str, str]) -> None:
        super().__init__()
        self._commands = commands

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="help", classes="sheet"):
            yield Static("Keys", classes="heading apart")
            yield Static(Content(_table(KEYS)))
            yield Static("Commands", classes="heading apart")
            yield Static(Content(_table(self._commands)))
            yield Static("A message may begin with // instead of /. Esc closes this.", classes="heading apart")


def _table(rows: Mapping[str, str]) -> str:
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {what}" for name, what in rows.items())
