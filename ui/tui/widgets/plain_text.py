"""Text as it is, in pieces of limited size, so that a long one is not laid out anew for each addition."""

from __future__ import annotations

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

CHUNK = 4_000  # characters
MAX_CHUNKS = 60


class PlainText(Vertical):
    """Shows text without reading anything into it; keeps the last 240,000 characters on screen."""

    DEFAULT_CSS = """
    PlainText { height: auto; }
    PlainText > Static { height: auto; }
    """

    def __init__(self, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._last: Static | None = None
        self._text = ""  # of the last piece

    async def write(self, text: str) -> None:
        """Add text that was made safe."""
        room = CHUNK - len(self._text)
        if self._last is not None and room > 0:
            self._text += text[:room]
            self._last.update(Content(self._text))
            text = text[room:]
        if not text:
            return
        parts = [text[at : at + CHUNK] for at in range(0, len(text), CHUNK)][-MAX_CHUNKS:]
        pieces = [Static(Content(part)) for part in parts]
        self._text, self._last = parts[-1], pieces[-1]
        await self.mount(*pieces)
        if len(self.children) > MAX_CHUNKS:
            await self.remove_children(self.children[: len(self.children) - MAX_CHUNKS])

    async def clear(self) -> None:
        self._last, self._text = None, ""
        await self.remove_children()
