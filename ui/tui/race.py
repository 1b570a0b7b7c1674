"""A race: one prompt plain and drafted, run one after the other, replayed side by side at true speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content, Span
from textual.screen import Screen
from textual.widgets import Digits, Footer, Static

from dflash_local.errors import DFlashError
from dflash_local.events import Mode, Notice
from dflash_local.report.code_runs import Kind, code_runs
from dflash_local.report.race_file import SAVED, About
from dflash_local.service.race import MODES, NAMES, Race
from dflash_local.service.race_lanes import Track, level
from dflash_local.store.atomic import write_atomic
from dflash_local.terminal import safe, safe_line
from dflash_local.ui.race_run import LEGEND, MARKS_LEGEND, PACES, Prepare, RaceRun
from dflash_local.ui.tui.lines import PlainLayout, TextLine
from dflash_local.ui.tui.text_view import TextView

PULSE_S = 0.03
FLASH_S = 0.25  # that a block stays lit
COLOURS: dict[Kind, str] = {
    "fence": "$text 60%",
    "code": "",
    "comment": "$text 60%",
    "string": "$text-success",
    "number": "$text-success",
    "keyword": "$text-secondary",
    "name": "$text-primary",
}
OWN_TOKEN = "underline $text-accent"
FRESH = "$text on $accent 50%"


class LaneLayout(PlainLayout):
    """A reply that is known to its end, of which more and more is shown.

    Args:
        whole: of the reply. marked: show which tokens the target chose itself.
    """

    def __init__(self, whole: Track, marked: bool) -> None:
        super().__init__()
        spans = [Span(run.start, run.end, COLOURS[run.kind]) for run in code_runs(whole.text)]
        at = 0
        for block in whole.blocks:
            for piece in block.pieces:
                if marked and piece.origin == "bonus":
                    spans.append(Span(at, at + len(piece.text), OWN_TOKEN))
                at += len(piece.text)
        self._lines = Content(whole.text, spans).split("\n", allow_blank=True)
        self._first = 0  # character of the line that is open

    def show(self, end: int, fresh: int, badge: str) -> None:
        """Show all before ``end``; from ``fresh`` on it is lit, with ``badge`` behind it."""
        while len(self.closed) < len(self._lines) and self._first + len(self._lines[len(self.closed)]) < fresh:
            self._first += len(self._lines[len(self.closed)]) + 1
            self.closed.append(TextLine(self._lines[len(self.closed)]))
        self.open, first = [], self._first
        for line in self._lines[len(self.closed) :]:
            if first > end:
                break
            part = line[: end - first].stylize(FRESH, max(0, fresh - first), max(0, end - first))
            self.open.append(TextLine(part + Content.styled(badge, FRESH) if first + len(line) >= end else part))
            first += len(line) + 1


class LaneView(Vertical):
    """Shows how far one of the two replies is."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(id=mode)
        self.mode = mode
        self.border_title = NAMES[mode]
        self._layout: LaneLayout | None = None
        self._known = 0  # characters of the whole; 0 while that is not known
        self._shown = 0

    def compose(self) -> ComposeResult:
        yield Static("", classes="counts", markup=False)
        yield Static("", classes="bar", markup=False)
        with VerticalScroll():
            yield TextView(PlainLayout())
            yield Static("", classes="room", markup=False)

    @property
    def pane(self) -> VerticalScroll:
        return self.query_one(VerticalScroll)

    @property
    def rows(self) -> int:
        """Count those that the text takes."""
        view = self.query_one(TextView)
        return view.get_content_height(view.size, view.size, view.size.width) if view.size.width else 0

    async def begin(self, layout: PlainLayout, known: int = 0) -> None:
        """Show a reply from its top; ``known`` is how many characters it will have."""
        self._layout = layout if isinstance(layout, LaneLayout) else None
        self._shown, self._known = 0, known
        await self.query_one(TextView).remove()
        await self.pane.mount(TextView(layout), before=0)

    async def show(self, track: Track, clock: float = 0.0) -> None:
        """Show a track as it is; ``clock`` is how far the replay is, in seconds of the race."""
        text, view = track.text, self.query_one(TextView)
        if self._layout is None:
            await view.write(text[self._shown :])
        else:
            lit = [block for block in track.blocks[-8:] if clock - block.t_s < FLASH_S and self.mode == "dflash"]
            badge = f"+{lit[-1].tokens}" if lit and lit[-1].tokens else ""
            self._layout.show(len(text), len(text) - sum(len(block.text) for block in lit), badge)
            await view.write("")
        self._shown = len(text)
        counts = self.query_one(".counts", Static)
        counts.update(Content(track.line_in(counts.size.width)))
        self.query_one(".bar", Static).update(self._bar(track))

    def _bar(self, track: Track) -> Content:
        """Draw the share of the text that is there, or that something goes on while its end is not known."""
        width = self.query_one(".bar").size.width
        done = round(width * len(track.text) / self._known) if self._known else 0
        return Content.styled("━" * done, "$accent") + Content.styled("━" * (width - done), "$text 20%")


class RaceScreen(Screen[Race | None]):
    """Runs the race, then replays it. It is dismissed with the race, or None when there was none.

    Args:
        title: the pair. prompt: what both reply to. prepare: gets the racer. about: what a saved race says besides.
    """

    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]
    BINDINGS = [
        Binding("escape,q", "leave", "Back"),
        Binding("space", "skip", "End"),
        Binding("r", "replay", "Replay"),
        Binding("1", "pace(1.0)", "True"),
        Binding("2", "pace(0.5)", "Half"),
        Binding("4", "pace(0.25)", "Quarter"),
        Binding("s", "save", "Save"),
    ]

    def __init__(self, title: str, prompt: str, prepare: Prepare, about: Callable[[Race], About]) -> None:
        super().__init__()
        self._title, self._prompt, self._about = title, prompt, about
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._shown: tuple[int, str] | None = None
        self.run_of = RaceRun(prepare, self._notices.put)

    def compose(self) -> ComposeResult:
        yield Static(Content(safe_line(f"dflash race · {self._title}")), id="title")
        yield Static(Content(safe(self._prompt)), id="prompt")
        with Horizontal(id="lanes"):
            for mode in MODES:
                yield LaneView(mode)
        with Horizontal(id="finish"):
            yield Digits("", id="ratio")
            yield Static("", id="result", markup=False)
        yield Footer(show_command_palette=False)  # it would cover keys of 80 columns

    def on_mount(self) -> None:
        panes = [lane.pane for lane in self.query(LaneView)]
        for pane, other in (panes, panes[::-1]):
            self.watch(pane, "scroll_y", partial(_follow, other), init=False)
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
            await self.action_replay()
        elif not run.shown:
            run.advance()
            await self._step(self.race)

    async def _draw(self, result: str) -> None:
        run = self.run_of
        lanes = list(self.query(LaneView))
        for lane in lanes:
            lane.set_class(run.measuring is not None and not run.replaying, "-measuring")
            await lane.show(run.tracks[lane.mode], float("inf") if run.shown else run.at)
        top = level([lane.rows for lane in lanes], lanes[0].pane.size.height)
        for lane in lanes:
            lane.pane.scroll_to(y=top, animate=False, immediate=True)
        self._set_result(result)

    async def _step(self, race: Race) -> None:
        """Draw how far the replay is, or its end."""
        if not self.run_of.shown:
            legend = LEGEND if race.in_server else MARKS_LEGEND
            await self._draw(f"replay at {PACES[self.run_of.pace]}\n{legend}")
            return
        ratio, under = race.headline
        verdict = [] if race.verdict in under else [race.verdict]
        await self._draw("\n".join([under, f"{race.ratios} · seed {race.seed}", *verdict]))  # a short one loses the end
        self.query_one("#ratio", Digits).update(ratio)
        self.set_class(True, "-ended")
        self.query_one(f"#{race.winner}").add_class("-won")

    async def action_replay(self) -> None:
        """Show the race again, from the top; all of it at once where motion is not wanted."""
        if (race := self.race) is None:
            return
        with self.app.batch_update():  # no frame in between, without texts and figures
            self.set_class(False, "-ended")
            for view, lane in zip(self.query(LaneView), (race.ar, race.dflash)):
                view.remove_class("-won")
                whole = Track.of(lane)
                marked = lane.mode == "dflash" and not race.in_server
                await view.begin(LaneLayout(whole, marked), len(whole.text))
            self.run_of.replay()
            if self.app.animation_level == "none":
                await self.action_skip()
            else:
                await self._step(race)

    async def action_skip(self) -> None:
        """Show the end of the replay."""
        if self.run_of.replaying and self.race is not None:
            self.run_of.advance(to_end=True)
            await self._step(self.race)

    def action_pace(self, pace: float) -> None:
        """Replay at that share of the true speed."""
        self.run_of.pace = pace

    def action_save(self) -> None:
        """Save the race in the current folder as a page that plays it, and say the file's name."""
        if self.race is None:
            return
        file = Path(time.strftime("race-%Y%m%d-%H%M%S.html"))
        try:
            write_atomic(file, SAVED[file.suffix](self.race, self._about(self.race)))
        except OSError as error:
            self.notify(f"{file}: {error.strerror}", severity="error", markup=False)
        else:
            self.notify(f"saved: {file}", markup=False)

    def action_leave(self) -> None:
        if self.race is None:
            self.run_of.cancel()
        self.dismiss(self.race)

    def _set_result(self, text: str) -> None:
        self.query_one("#result", Static).update(Content(text))


def _follow(other: VerticalScroll, y: float) -> None:
    other.scroll_to(y=y, animate=False, immediate=True)
