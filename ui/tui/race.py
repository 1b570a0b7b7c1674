"""A race: one prompt with and without drafting, run one after the other, replayed side by side at true speed."""

from __future__ import annotations

from queue import SimpleQueue

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static

from dflash_local.errors import DFlashError
from dflash_local.events import Mode, Notice
from dflash_local.service.race import MODES, Race
from dflash_local.terminal import safe, safe_line
from dflash_local.ui.race_run import NAMES, Prepare, RaceRun, Track
from dflash_local.ui.tui.lines import PlainLayout
from dflash_local.ui.tui.text_view import TextView

PULSE_S = 0.03


class LaneView(Vertical):
    """Shows how far one of the two replies is: its text as it came, at the speed it came."""

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

    async def show(self, track: Track) -> None:
        """Add what came since the last time; a track that is shorter than that begins anew."""
        text = track.text
        if len(text) < self._shown:
            self._shown = 0
            await self.query_one(TextView).remove()
            await self.query_one(VerticalScroll).mount(TextView(PlainLayout()))
        await self.query_one(TextView).write(text[self._shown :])
        self._shown = len(text)
        self.query_one(".state", Static).update(Content(track.line))


class RaceScreen(Screen[Race | None]):
    """Runs the race, then replays it. It is dismissed with the race, or None when there was none.

    Args:
        title: the pair. prompt: what both reply to. prepare: gets the racer.
    """

    BINDINGS = [
        Binding("escape,q", "leave", "Back"),
        Binding("space", "skip", "To the end"),
        Binding("r", "replay", "Replay"),
    ]

    def __init__(self, title: str, prompt: str, prepare: Prepare) -> None:
        super().__init__()
        self._title, self._prompt = title, prompt
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._shown: tuple[int, str] | None = None
        self._until: float | None = None  # seconds of the race that are shown; None as time passes
        self.run_of = RaceRun(prepare, self._notices.put)

    def compose(self) -> ComposeResult:
        yield Static(Content(safe_line(f"dflash race · {self._title}")), id="title")
        yield Static(Content(safe(self._prompt)), id="prompt")
        with Horizontal(id="lanes"):
            for mode in MODES:
                yield LaneView(mode)
        yield Static("", id="result", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(PULSE_S, self._pulse)

    @property
    def race(self) -> Race | None:
        return self.run_of.race

    @property
    def error(self) -> DFlashError | None:
        """Tell why there was no race."""
        return None if self.run_of.running else self.run_of.error

    async def _pulse(self) -> None:
        while not self._notices.empty():
            self.notify(safe_line(self._notices.get().message), markup=False)
        run = self.run_of
        if self.error is not None:
            hint = f"\n{self.error.hint}" if self.error.hint else ""
            self._set_result(f"error: {safe(self.error.message + hint)}")
        elif self.race is None:
            if self._shown != (run.version, run.state):
                self._shown = (run.version, run.state)
                await self._draw(run.state)
        elif not run.replaying:
            self.action_replay()
        elif not run.shown:
            run.advance(self._until)
            length = self.race.dflash.finished.stats.mean_acceptance_length
            acceptance = f" · acceptance length {length:.2f}" if length is not None else ""
            ended = f"{self.race.verdict} · seed {self.race.seed}\n{self.race.ratios}{acceptance}"
            await self._draw(ended if run.shown else "replay at true speed; Space goes to the end")

    async def _draw(self, result: str) -> None:
        for lane in self.query(LaneView):
            await lane.show(self.run_of.tracks[lane.mode])
        self._set_result(result)

    def action_replay(self) -> None:
        """Show the race again, at the speed it was run."""
        if self.race is not None:
            self._until = None
            self.run_of.replay()

    def action_skip(self) -> None:
        self._until = float("inf")

    def action_leave(self) -> None:
        if self.race is None:
            self.run_of.cancel()
        self.dismiss(self.race)

    def _set_result(self, text: str) -> None:
        self.query_one("#result", Static).update(Content(text))
