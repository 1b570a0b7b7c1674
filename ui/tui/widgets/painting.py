"""Painting without asking Textual to style each row again in each frame. For widgets without border and outline."""

from __future__ import annotations

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget


def ground(widget: Widget, crop: Region) -> list[Strip]:
    """The rows of a container that shows nothing of its own: one empty row, as often as it takes."""
    return [filtered(widget, Strip.blank(crop.width, widget.visual_style.rich_style))] * crop.height


def filtered(widget: Widget, strip: Strip) -> Strip:
    """The row as the application's filters want it (no colour, say)."""
    for line_filter in widget.get_line_filters():
        strip = strip.apply_filter(line_filter, widget.background_colors[1])
    return strip
