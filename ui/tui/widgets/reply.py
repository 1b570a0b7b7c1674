"""One reply: its thinking folded away, its text as Markdown or by origin, its figures below."""

from __future__ import annotations

from collections.abc import Iterable

from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widgets import Collapsible, Static

from dflash_local.events import Origin, Piece, Step
from dflash_local.ui.origins import marked
from dflash_local.ui.safety import SafePieces
from dflash_local.ui.thinking_time import ThinkingTime
from dflash_local.ui.tui.lines import PlainLayout
from dflash_local.ui.tui.markdown import MarkdownLayout
from dflash_local.ui.tui.widgets.painting import ground
from dflash_local.ui.tui.widgets.text_view import TextView

STYLES: dict[Origin, str] = {"accepted": "underline $text-success", "bonus": "bold $text-warning"}


class ReplyView(Vertical):
    """Shows the steps of a reply as they come.

    Args:
        by_origin: show where each token came from instead of laying the text out.
    """

    DEFAULT_CSS = """
    ReplyView { height: auto; }
    """

    def __init__(self, by_origin: bool = False) -> None:
        super().__init__(classes="reply")
        self._safe = SafePieces()
        self._pieces: list[Piece] = []
        self._by_origin = by_origin
        self._body: TextView | None = None
        self._thoughts: tuple[Collapsible, TextView] | None = None
        self._thinking = ThinkingTime()
        self.draws = 0

    def render_lines(self, crop: Region) -> list[Strip]:
        """Nothing but its background."""
        return ground(self, crop)

    @property
    def text(self) -> str:
        """The answer as it is shown."""
        return "".join(piece.text for piece in self._pieces)

    async def feed(self, steps: Iterable[Step]) -> None:
        """Draw several steps at once."""
        pieces: list[Piece] = []
        for step in steps:
            pieces += step.pieces
            self._thinking.take(step)
        self.draws += 1
        await self._show(self._safe.feed(pieces))

    async def finish(self, figures: str = "", ending: str = "") -> None:
        """Draw what was held back, how it ended when not by itself, and the figures."""
        await self._show(self._safe.finish())
        if ending:
            await self.mount(Static(f"■ {ending}", classes="stopped", markup=False))
        if figures:
            await self.mount(Static(Content(figures), classes="figures"))

    async def show_origins(self, wanted: bool) -> None:
        """Draw the text anew, by origin or laid out."""
        if wanted == self._by_origin:
            return
        self._by_origin = wanted
        if self._body is not None:
            old, self._body = self._body, None
            await old.remove()
            await self._write(self._pieces)

    async def _show(self, pieces: list[Piece]) -> None:
        thoughts = "".join(piece.text for piece in pieces if piece.channel == "thinking")
        rest = [piece for piece in pieces if piece.channel != "thinking"]
        if thoughts:
            await self._think(thoughts)
        if rest:
            self._pieces += rest
            await self._write(rest)

    async def _think(self, text: str) -> None:
        if self._thoughts is None:
            inside = TextView(PlainLayout())
            fold = Collapsible(Vertical(inside, classes="thoughts"), title="thinking", collapsed=True)
            self._thoughts = (fold, inside)
            await self.mount(fold, before=0 if self.children else None)
        fold, inside = self._thoughts
        await inside.write(text)
        fold.title = self._thinking.title

    async def _write(self, pieces: list[Piece]) -> None:
        if self._body is None:
            self._body = TextView(PlainLayout() if self._by_origin else MarkdownLayout(), classes="body")
            place = 1 if self._thoughts is not None else 0
            await self.mount(self._body, before=place if len(self.children) > place else None)
        for piece in pieces if self._by_origin else ():
            await self._body.write(marked(piece), STYLES[piece.origin])
        if not self._by_origin:
            await self._body.write("".join(piece.text for piece in pieces))
