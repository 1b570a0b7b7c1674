"""A reply with each token's origin: what was drafted and accepted, and what the target chose itself."""

from __future__ import annotations

from collections.abc import Iterable

from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from dflash_local.events import Origin, Piece
from dflash_local.ui.origins import marked

CHUNK_RUNS = 200
MAX_CHUNKS = 60
STYLES: dict[Origin, str] = {"accepted": "underline $text-success", "bonus": "bold $text-warning"}


class OriginText(Vertical):
    """Shows accepted drafts underlined and the target's own tokens in marks, so that no colour is needed."""

    DEFAULT_CSS = """
    OriginText { height: auto; margin: 0 0 1 0; }
    OriginText > Static { height: auto; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._runs: list[Content] = []

    async def write(self, pieces: Iterable[Piece]) -> None:
        """Add pieces that were made safe."""
        for piece in pieces:
            if not self.children or len(self._runs) >= CHUNK_RUNS:
                self._runs = []
                await self.mount(Static(markup=False))
            self._runs.append(Content.styled(marked(piece), STYLES[piece.origin]))
        if self._runs:
            self.query(Static).last().update(Content.assemble(*self._runs))
        if len(self.children) > MAX_CHUNKS:
            await self.remove_children(self.children[: len(self.children) - MAX_CHUNKS])
