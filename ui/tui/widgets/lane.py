"""One side of a race: its text as it came, at the speed it came."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from dflash_local.events import Mode, Step
from dflash_local.service.race import Lane
from dflash_local.ui.safety import SafePieces
from dflash_local.ui.tui.widgets.plain_text import PlainText

NAMES: dict[Mode, str] = {"ar": "without drafting (ar)", "dflash": "with the drafter (dflash)"}


class LaneView(Vertical):
    """Shows a lane; ``advance`` moves it on."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(id=mode)
        self.mode = mode
        self._lane: Lane | None = None
        self._safe = SafePieces()
        self._next = 0
        self._tokens = 0

    def compose(self) -> ComposeResult:
        yield Static(NAMES[self.mode], classes="heading", markup=False)
        with VerticalScroll():
            yield PlainText()
        yield Static("", classes="state", markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).anchor()

    @property
    def done(self) -> bool:
        return self._lane is not None and self._next >= len(self._lane.steps)

    def set_status(self, text: str) -> None:
        self.query_one(".state", Static).update(Content(text))

    async def load(self, lane: Lane | None) -> None:
        self._lane, self._next, self._tokens, self._safe = lane, 0, 0, SafePieces()
        await self.query_one(PlainText).clear()

    async def advance(self, seconds: float) -> None:
        """Show what had come by then."""
        lane = self._lane
        if lane is None or self._next >= len(lane.steps):
            return
        came: list[Step] = []
        while self._next < len(lane.steps) and lane.steps[self._next].t_s <= seconds:
            came.append(lane.steps[self._next])
            self._next += 1
        ended = self._next >= len(lane.steps)
        if came:
            pieces = self._safe.feed(piece for step in came for piece in step.pieces)
            pieces += self._safe.finish() if ended else []
            await self.query_one(PlainText).write("".join(piece.text for piece in pieces))
            self._tokens += sum(len(step.token_ids) for step in came)
        stats = lane.finished.stats
        if ended:
            self.set_status(f"■ {lane.seconds:.2f} s · {self._tokens} tok · {stats.tokens_per_s:.1f} tok/s")
        else:
            self.set_status(f"▶ {seconds:.2f} s · {self._tokens} tok")
