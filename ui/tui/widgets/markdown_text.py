"""A reply as Markdown while it streams, going on as plain text where Markdown would be too much."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownStream

from dflash_local.ui.tui.safety import MarkdownGuard, parser
from dflash_local.ui.tui.widgets.plain_text import PlainText


class MarkdownText(Vertical):
    """Text that was made safe, laid out; links are shown and not opened."""

    DEFAULT_CSS = """
    MarkdownText { height: auto; }
    MarkdownText > Markdown { padding: 0; margin: 0; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._guard = MarkdownGuard()
        self._markdown = Markdown("", parser_factory=parser, open_links=False)
        self._stream: MarkdownStream | None = None
        self._plain: PlainText | None = None

    @property
    def plain(self) -> bool:
        """True when the text became too much for Markdown."""
        return self._plain is not None

    def compose(self) -> ComposeResult:
        yield self._markdown

    async def write(self, text: str) -> None:
        """Add text; the layout may come a moment later, several additions as one."""
        if self._plain is None and self._guard.accepts(text):
            self._stream = self._stream or Markdown.get_stream(self._markdown)
            await self._stream.write(text)
            return
        if self._plain is None:
            await self.finish()
            self._plain = PlainText()
            await self.mount(self._plain)
        await self._plain.write(text)

    async def finish(self) -> None:
        """Have all of it laid out."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A model's link is told, not followed."""
        event.stop()
        self.notify(event.href[:200], title="link", markup=False)
