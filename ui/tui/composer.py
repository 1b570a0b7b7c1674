"""Where messages are typed: Enter sends, Shift+Enter or Ctrl+J begins a line, the arrows bring back earlier ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea
from textual.widgets.text_area import Edit, EditResult, Location, Selection

from dflash_local.terminal import safe

MAX_PASTE = 100_000  # characters; a longer text belongs into a file: dflash run MODEL < FILE
FOLD_LINES = 5  # more of them, or of characters, fold
FOLD_CHARACTERS = 1_000
_TOKEN = re.compile(r"\[[\d,]+ (?:lines|characters) pasted(?:, \d+)?\]")
MENU_KEYS = ("up", "down", "tab", "enter", "escape")
NEW_LINE = ("shift+enter", "ctrl+j", "alt+enter")


class Pastes:
    """Keeps the texts behind tokens such as ``[200 lines pasted]``; all of them: undo and history bring tokens back."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fold(self, text: str) -> str:
        """Return what stands for a pasted text: itself, or a token where it is long or quotes a token."""
        lines = text.count("\n") + (not text.endswith("\n"))
        if lines <= FOLD_LINES and len(text) <= FOLD_CHARACTERS and not self.spans(text):
            return text
        what = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        token, number = f"[{what} pasted]", 1
        while self._texts.setdefault(token, text) != text:
            number += 1
            token = f"[{what} pasted, {number}]"
        return token

    def whole(self, text: str) -> str:
        """Return a field's text with what its tokens stand for."""
        return _TOKEN.sub(lambda found: self._texts.get(found.group(), found.group()), text)

    def folded(self, text: str) -> str:
        """Reverse ``whole``: return tokens in place of what was pasted before."""
        behind = {pasted: token for token, pasted in self._texts.items()}
        longest = sorted(behind, key=len, reverse=True)
        if not longest:
            return text
        return re.sub("|".join(map(re.escape, longest)), lambda found: behind[found.group()], text)

    def spans(self, line: str) -> list[tuple[int, int]]:
        """Find where the tokens of a text begin and end."""
        return [found.span() for found in _TOKEN.finditer(line) if found.group() in self._texts]


class Composer(TextArea):
    """A text field that knows what was sent before, the names of the commands, and what its tokens stand for.

    Its ``text`` has a token where much was pasted; ``message`` is what will be sent. A token is one unit: the
    cursor steps over it, and whatever deletes a part of it deletes it whole.
    """

    BINDINGS = [
        Binding("ctrl+u", "clear_all", "Clear", show=False),
        Binding("ctrl+underscore", "undo", "Undo", show=False),  # Ctrl+Z puts the program to sleep
    ]

    class Sent(Message):
        """The user sends a message or a command."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Chose(Message):
        """Another command is the chosen one, or none is offered any more."""

    class Refused(Message):
        """Something was not taken over."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    def __init__(self, commands: Mapping[str, str] | None = None) -> None:
        self._pastes = Pastes()  # TextArea sets a text and a cursor when it is made
        super().__init__(
            placeholder="Message; Enter sends, Ctrl+J new line, / commands", show_line_numbers=False, soft_wrap=True
        )
        self._commands = dict(sorted((commands or {}).items()))
        self.chosen = 0  # of the commands that are offered
        self._refused = ""  # a text for which none is
        self.examples: Sequence[str] = ()  # prompts that Tab puts into an empty field, one after the other
        self._sent: list[str] = []
        self._at = 0  # place in the history; len(_sent) is the draft
        self._draft = ""

    @property
    def offered(self) -> Mapping[str, str]:
        """Return the commands that begin as the field does, usage and help; none for a text of the history."""
        recalled = self._at < len(self._sent)
        if recalled or not self.text.startswith("/") or self.text == self._refused or len(self.text.split()) > 1:
            return {}
        if self.text[-1].isspace():
            return {}
        return {usage: about for usage, about in self._commands.items() if usage.startswith(self.text.lower())}

    def choose(self, at: int, send: bool) -> None:
        """Put one of the offered commands in, or send it where it needs no argument or is typed out."""
        name, _, argument = list(self.offered)[at].partition(" ")
        typed = self.text == name
        self.put(name if send else f"{name} ")
        if send and argument and not argument.startswith("[") and not typed:
            self.put(f"{name} ")
        elif send:
            self._send()

    @property
    def message(self) -> str:
        """Return the text with what was pasted in place of its tokens."""
        return self._pastes.whole(self.text)

    def put(self, message: str) -> None:
        """Replace the text, the cursor at its end; what was pasted here before is a token again."""
        self._show(self._pastes.folded(message))

    def give_back(self, message: str) -> None:
        """Put in what was not sent, unless something else is there by now; the arrows have both."""
        if not self.text:
            self.put(message)

    def edit(self, edit: Edit) -> EditResult:
        """Edit as TextArea does; a token that would lose a part goes whole."""
        edit.from_location, edit.to_location = self._around(edit.top), self._around(edit.bottom, end=True)
        return super().edit(edit)

    def validate_selection(self, selection: Selection) -> Selection:
        """Let no end of a selection lie within a token: it goes on to the side that it moved to."""
        cursor = self._around(selection.end, end=selection.end > self.selection.end)
        if selection.is_empty:
            return Selection.cursor(cursor)
        return Selection(self._around(selection.start, end=selection.start > selection.end), cursor)

    def action_clear_all(self) -> None:
        """Empty the field; undo brings it back."""
        self.clear()

    def action_paste(self) -> None:
        """Put in what was copied within this program, as a terminal would paste it."""
        self._take(self.app.clipboard)

    async def _on_key(self, event: events.Key) -> None:
        if self.offered and event.key in MENU_KEYS:
            self._act_on_menu(event.key)
        elif event.key == "enter":
            self._send()
        elif event.key in NEW_LINE:
            self.insert("\n")
        elif event.key == "tab" and self.examples and (not self.text or self.text in self.examples):
            self.put(self.examples[(list(self.examples).index(self.text) + 1) % len(self.examples) if self.text else 0])
        elif event.key == "up" and self.cursor_location[0] == 0 and self._sent:
            self._recall(-1)
        elif event.key == "down" and self.cursor_location[0] == self.document.line_count - 1 and self._sent:
            self._recall(1)
        else:
            await super()._on_key(event)
            return
        event.stop()
        event.prevent_default()

    def _act_on_menu(self, key: str) -> None:
        if key in ("tab", "enter"):
            self.choose(self.chosen, send=key == "enter")
            return
        if key == "escape":
            self._refused = self.text
        else:
            self.chosen = (self.chosen + (1 if key == "down" else -1)) % len(self.offered)
        self.post_message(self.Chose())

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self._take(event.text)

    def _take(self, pasted: str) -> None:
        """Put in a pasted text where the cursor is. Terminals send a carriage return for the end of a line."""
        if len(pasted) + len(self.message) > MAX_PASTE:
            self.post_message(
                self.Refused(f"{len(pasted):,} characters were pasted; {MAX_PASTE:,} fit here: dflash run takes a file")
            )
            return
        text = safe(pasted.replace("\r\n", "\n").replace("\r", "\n"))
        self.replace(self._pastes.fold(text), *self.selection, maintain_selection_offset=False)

    def _send(self) -> None:
        message, typed = self.message.strip(), self.text
        if not message:
            return
        if message.startswith("/") and not typed.lstrip().startswith("/"):
            message = f"/{message}"  # a file that was pasted is no command
        if not self._sent or self._sent[-1] != typed:
            self._sent.append(typed)
        self._at, self._draft = len(self._sent), ""
        self._show("")
        self.post_message(self.Sent(message))

    def _recall(self, step: int) -> None:
        if self._at == len(self._sent):
            self._draft = self.text
        self._at = min(max(self._at + step, 0), len(self._sent))
        self._show(self._sent[self._at] if self._at < len(self._sent) else self._draft)

    def _show(self, text: str) -> None:
        """Replace the field's own text, tokens and all, the cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def _around(self, place: Location, end: bool = False) -> Location:
        """Return the place itself, or the beginning or end of the token around it."""
        row, column = place
        if row < self.document.line_count:
            for first, last in self._pastes.spans(self.document.get_line(row)):
                if first < column < last:
                    return row, last if end else first
        return place
