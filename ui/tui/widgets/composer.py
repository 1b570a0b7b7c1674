"""Where messages are typed: Enter sends, Shift+Enter or Ctrl+J begins a line, the arrows bring back earlier ones."""

from __future__ import annotations

from collections.abc import Iterable

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea

from dflash_local.terminal import safe

MAX_PASTE = 100_000  # characters; a longer text belongs into a file: dflash run MODEL < FILE
NEW_LINE = ("shift+enter", "ctrl+j", "alt+enter")


class Composer(TextArea):
    """A text field that knows what was sent before and the names of the commands."""

    BINDINGS = [
        Binding("ctrl+u", "clear_all", "Clear", show=False),
        Binding("ctrl+underscore", "undo", "Undo", show=False),  # Ctrl+Z puts the program to sleep
    ]

    class Sent(Message):
        """The user sends a message or a command."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Refused(Message):
        """Something was not taken over."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    def __init__(self, commands: Iterable[str] = ()) -> None:
        super().__init__(
            placeholder="Message; Enter sends, Ctrl+J new line, / commands", show_line_numbers=False, soft_wrap=True
        )
        self._commands = sorted(commands)
        self._sent: list[str] = []
        self._at = 0  # place in the history; len(_sent) is the draft
        self._draft = ""

    @property
    def completions(self) -> list[str]:
        """The commands that begin as the text does."""
        if not self.text.startswith("/") or any(character.isspace() for character in self.text):
            return []
        return [name for name in self._commands if name.startswith(self.text.lower())]

    def put(self, text: str) -> None:
        """Replace the text, the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def give_back(self, text: str) -> None:
        """Put in what was not sent, unless something else is there by now; the arrows have both."""
        self.put(self.text or text)

    def action_clear_all(self) -> None:
        """Empty the field."""
        self.put("")

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            self._send()
        elif event.key in NEW_LINE:
            self.insert("\n")
        elif event.key == "tab" and self.completions:
            self.put(f"{self.completions[0]} ")
        elif event.key == "up" and self.cursor_location[0] == 0 and self._sent:
            self._recall(-1)
        elif event.key == "down" and self.cursor_location[0] == self.document.line_count - 1 and self._sent:
            self._recall(1)
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        if len(event.text) + len(self.text) > MAX_PASTE:
            self.post_message(
                self.Refused(
                    f"{len(event.text):,} characters were pasted; {MAX_PASTE:,} fit here: dflash run takes a file"
                )
            )
            return
        self.insert(safe(event.text))

    def _send(self) -> None:
        text = self.text
        if not text.strip():
            return
        if not self._sent or self._sent[-1] != text:
            self._sent.append(text)
        self._at, self._draft = len(self._sent), ""
        self.put("")
        self.post_message(self.Sent(text.strip()))

    def _recall(self, step: int) -> None:
        if self._at == len(self._sent):
            self._draft = self.text
        self._at = min(max(self._at + step, 0), len(self._sent))
        self.put(self._sent[self._at] if self._at < len(self._sent) else self._draft)
