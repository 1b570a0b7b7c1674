"""Text that grows: a reply as Markdown, as plain text where that would be too much, or coloured by origin.

One widget paints all of it, row by row: with a widget for each block, each frame cost more than the last.
"""

from __future__ import annotations

import asyncio

from rich.segment import Segment
from textual import events
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from dflash_local.ui.safety import MarkdownGuard
from dflash_local.ui.tui.lines import Item, PlainLayout, TextLine, TextRow, rows_of
from dflash_local.ui.tui.markdown import MarkdownLayout

MAX_OPEN = 12_000  # characters that each addition lays out anew
MAX_PAINTED = 150  # rows that are kept painted; a screen has about as many
BIT = 4_000  # characters taken at once


def ground(widget: Widget, crop: Region) -> list[Strip]:
    """Return the rows of a container that shows nothing of its own, without asking Textual to style each of them."""
    return [filtered(widget, Strip.blank(crop.width, widget.visual_style.rich_style))] * crop.height


def filtered(widget: Widget, strip: Strip) -> Strip:
    """Return the row as the application's filters want it (no colour, say). For widgets without border and outline."""
    for line_filter in widget.get_line_filters():
        strip = strip.apply_filter(line_filter, widget.background_colors[1])
    return strip


class TextView(Widget):
    """Shows text that was made safe; links are shown and not opened."""

    DEFAULT_CSS = """
    TextView { width: 1fr; height: auto; }
    """

    def __init__(self, layout: MarkdownLayout | PlainLayout, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._guard = MarkdownGuard()
        self._laid = layout
        self._fitted = 0  # the width of the rows
        self._lines: list[TextLine] = []
        self._rows: list[TextRow] = []
        self._kept = (0, 0, 0)  # items, lines and rows that stay as they are
        self._strips: dict[int, Strip] = {}

    @property
    def plain(self) -> bool:
        """True when the text became too much for Markdown."""
        return isinstance(self._laid, PlainLayout)

    async def write(self, text: str, style: str = "") -> None:
        """Add text, which is drawn with the next frame; Markdown has styles of its own."""
        for at in range(0, len(text), BIT):
            if at:
                await asyncio.sleep(0)
            self._take(text[at : at + BIT], style)
        first = self._extend()
        if first is None:
            self.refresh(layout=True)
        elif first < len(self._rows):
            self.refresh(Region(0, first, self._fitted, len(self._rows) - first))

    def _take(self, bit: str, style: str) -> None:
        layout = self._laid
        if isinstance(layout, MarkdownLayout):
            if self._guard.accepts(bit) and layout.open_size <= MAX_OPEN:
                return layout.add(bit)
            self._laid = layout = PlainLayout([*layout.closed, *layout.open])
        layout.add(bit, style)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Count the rows that the text takes at a width."""
        self._fit(width)
        return len(self._rows)

    def _fit(self, width: int) -> None:
        if width != self._fitted:
            self._fitted, self._kept = width, (0, 0, 0)
            self._strips.clear()
            self._extend()

    def _extend(self) -> int | None:
        """Make rows of what came, and of what is open; the first row that changed, None where their number did."""
        items, lines, rows = self._kept
        before = self._rows[rows:]
        del self._lines[lines:], self._rows[rows:]
        if not self._fitted:
            return None
        closed = self._laid.closed
        self._add(closed[items:])
        self._kept = (len(closed), len(self._lines), len(self._rows))
        self._add(self._laid.open)
        now = self._rows[rows:]
        changed = [at for at, (old, new) in enumerate(zip(before, now)) if not old.is_same(new)]
        for at in (*changed, *range(len(now), len(before))):
            self._strips.pop(rows + at, None)
        if len(before) != len(now):
            return None
        return rows + changed[0] if changed else len(self._rows)

    def _add(self, items: list[Item]) -> None:
        for item in items:
            for line in item.at(self._fitted):
                self._rows += rows_of(line, len(self._lines), self._fitted)
                self._lines.append(line)

    # Painting

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return rows as they were painted before, where nothing changed them: most of a frame that only scrolled."""
        self._fit(self.size.width)  # a layout may have asked for another width last
        strips = [self._painted(y) for y in crop.line_range]
        whole = crop.column_span == (0, self.size.width)
        return strips if whole else [strip.crop(crop.x, crop.right) for strip in strips]

    def render_line(self, y: int) -> Strip:
        """Return a row whose parts know their place in the text: what the mouse is over is looked up in it."""
        self._fit(self.size.width)
        return self._paint(self._rows[y], placed=True) if y < len(self._rows) else self._painted(y)

    def _painted(self, y: int) -> Strip:
        """Return a row; kept until the text, the style or the selection changes it."""
        if y >= len(self._rows):
            return filtered(self, Strip.blank(self.size.width, self.visual_style.rich_style))
        strip = self._strips.get(y)
        if strip is None:
            if len(self._strips) > MAX_PAINTED:
                self._strips.clear()
            strip = self._strips[y] = self._paint(self._rows[y], placed=False)
        return strip

    def _paint(self, row: TextRow, placed: bool) -> Strip:
        base = self.visual_style
        style = base + Style.parse(row.paint) if row.paint else base
        text, selection = row.text, self.text_selection
        span = selection.get_span(row.line) if selection is not None else None
        if span is not None:
            first, last = max(0, span[0] - row.start), len(text) if span[1] < 0 else span[1] - row.start
            text = text.stylize(Style.from_styles(self.screen.get_component_styles("screen--selection")), first, last)
        segments = [Segment(part, look.rich_style) for part, look in row.hang.render(style, "", _look) if part]
        at = row.start
        for part, look in text.render(style, "", _look):
            segments.append(Segment(part, look.rich_style_with_offset(at, row.line) if placed else look.rich_style))
            at += len(part)
        return filtered(self, Strip(segments).adjust_cell_length(self.size.width, style.rich_style))

    def notify_style_update(self) -> None:
        """Paint anew in another theme."""
        self._strips.clear()
        super().notify_style_update()

    # Selecting, and links

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected words, lines as they were before they were wrapped."""
        chosen = []
        for number, line in enumerate(self._lines):
            span = selection.get_span(number)
            if span is not None:
                chosen.append(line.plain[span[0] : None if span[1] < 0 else span[1]])
        return "\n".join(chosen), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Paint anew: the selection is part of the painting."""
        self._strips.clear()
        super().selection_updated(selection)

    def on_click(self, event: events.Click) -> None:
        """Show a model's link; it is not followed."""
        address = event.style.meta.get("href")
        if address:
            event.stop()
            self.notify(str(address)[:200], title="link", markup=False)


def _look(style: str | Style) -> Style:
    return style if isinstance(style, Style) else Style.parse(style)
