"""One side of a race: its text as it came, at the speed it came."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_local.events import Mode
from dflash_local.ui.replay import NAMES, Track
from dflash_local.ui.tui.lines import PlainLayout
from dflash_local.ui.tui.widgets.text_view import TextView


class LaneView(Vertical):
    """Shows how far one of the two replies is."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(id=mode)
        self.mode = mode
        self._shown = 0  # characters

    def compose(self) -> ComposeResult:
        yield Static(NAMES[self.mode], classes="heading", markup=False)
        with VerticalScroll():
            yield TextView(PlainLayout())
        yield Static("", classes="state", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).anchor()

    def set_status(self, text: str) -> None:
        self.query_one(".state", Static).update(Content(text))

    async def clear(self) -> None:
        """Begin anew."""
        self._shown = 0
        await self.query_one(TextView).remove()
        await self.query_one(VerticalScroll).mount(TextView(PlainLayout()))

    async def show(self, track: Track) -> None:
        """Add what came since the last time."""
        await self.query_one(TextView).write(track.text[self._shown :])
        self._shown = len(track.text)
        self.set_status(track.line)
