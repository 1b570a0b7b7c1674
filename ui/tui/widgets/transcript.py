"""The conversation on screen; follows its end until the user scrolls away."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dflash_local.events import Piece, Step
from dflash_local.store.records import Turn
from dflash_local.ui.tui.widgets.examples import Examples
from dflash_local.ui.tui.widgets.messages import Note, UserMessage
from dflash_local.ui.tui.widgets.painting import ground
from dflash_local.ui.tui.widgets.reply import ReplyView

MAX_SHOWN = 120  # messages on screen; earlier ones stay in the conversation and its file
MAX_REBUILT = 40  # laying a reply out takes a while
EARLIER = "earlier messages are not on screen any more; /export writes all of them"
WAITS = "waits for what runs to end; Esc takes it back"


class Transcript(VerticalScroll):
    """Shows messages, replies and notes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[str, UserMessage] | None = None

    def on_mount(self) -> None:
        self.anchor()

    def render_lines(self, crop: Region) -> list[Strip]:
        """Nothing but its background."""
        return ground(self, crop)

    @property
    def replies(self) -> list[ReplyView]:
        return list(self.query(ReplyView))

    def page(self, direction: int) -> None:
        """Scroll by a screen, up or down; at its end the conversation is followed again."""
        scroll = self.scroll_page_up if direction < 0 else self.scroll_page_down
        scroll(animate=False)

    async def offer(self, prompts: Sequence[str]) -> None:
        """Show prompts to begin with in place of those shown before; none takes them away."""
        if shown := self.query(Examples):
            await shown.remove()
        if prompts:
            await self.mount(Examples(prompts))

    async def add(self, widget: Widget) -> None:
        await self.mount(widget)
        if len(self.children) > MAX_SHOWN:
            keep = MAX_SHOWN * 3 // 4
            await self.remove_children(self.children[: len(self.children) - keep])
            await self.mount(Note(EARLIER), before=0)

    async def hold(self, text: str) -> bool:
        """Keep one line that cannot be sent yet, and show that it waits; False when one waits already."""
        if self._held is not None:
            return False
        self._held = text, UserMessage(text, WAITS)
        await self.add(self._held[1])
        return True

    def let_go(self) -> str:
        """Return what waited, which does so no more; empty when nothing did."""
        held, self._held = self._held, None
        if held is None:
            return ""
        held[1].remove()
        return held[0]

    async def rebuild(self, turns: Sequence[Turn], by_origin: bool) -> None:
        """Show a conversation from its turns; where its tokens came from is not known any more."""
        await self.remove_children()
        if len(turns) > MAX_REBUILT:
            await self.add(Note(EARLIER))
        for turn in turns[-MAX_REBUILT:]:
            if turn.role == "user":
                await self.add(UserMessage(turn.content))
                continue
            view = ReplyView(by_origin)
            await self.add(view)
            thoughts = (Piece(turn.thinking, "thinking"),) if turn.thinking else ()
            await view.feed([Step((*thoughts, Piece(turn.content)), (), 0, 0, 0, 0.0)])
            await view.finish(ending=turn.ending)
        self.scroll_end(animate=False)
