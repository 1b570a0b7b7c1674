"""A race: one prompt with and without drafting, run one after the other, replayed side by side at true speed."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, Static

from dflash_local.app.notices import Notify
from dflash_local.errors import DFlashError
from dflash_local.events import Event, Finished, LoadProgress, Mode, Notice, Step
from dflash_local.service.race import MODES, Race, Racer
from dflash_local.terminal import safe, safe_line
from dflash_local.ui.replay import COMPARING, RUNNING, Replay
from dflash_local.ui.tui.jobs import Ended, Inbox, Jobs
from dflash_local.ui.tui.widgets.lane import LaneView

PULSE_S = 0.03
Prepare = Callable[[Notify], Racer]  # may load the pair; called on a thread


class RaceScreen(Screen[Race | None]):
    """Runs the race, then replays it. It is dismissed with the race, or None when there was none.

    Args:
        title: the pair. prompt: what both reply to. prepare: gets the racer.
    """

    CSS_PATH = "race.tcss"
    BINDINGS = [
        Binding("escape,q", "leave", "Back"),
        Binding("space", "skip", "To the end"),
        Binding("r", "replay", "Replay"),
    ]

    def __init__(self, title: str, prompt: str, prepare: Prepare) -> None:
        super().__init__()
        self._title, self._prompt, self._prepare = title, prompt, prepare
        self._inbox = Inbox()
        self.jobs = Jobs(self._inbox)
        self._racer: Racer | None = None
        self._leaving = False
        self._tokens: dict[Mode, int] = dict.fromkeys(MODES, 0)
        self._replay: Replay | None = None
        self.race: Race | None = None
        self.error: DFlashError | None = None

    def compose(self) -> ComposeResult:
        yield Static(Content(safe_line(f"dflash race · {self._title}")), id="title")
        yield Static(Content(safe(self._prompt)), id="prompt")
        with Horizontal(id="lanes"):
            for mode in MODES:
                yield LaneView(mode)
        yield Static("", id="result", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self._set_status("getting ready")
        self.jobs.start(self._run)
        self.set_interval(PULSE_S, self._pulse)

    @property
    def done(self) -> bool:
        """True when the race was run and all of it is shown."""
        return self._replay is not None and self._replay.done

    def _run(self) -> Race:
        """Race, on the job's thread."""
        self._racer = self._prepare(self._inbox.put)
        if self._leaving:
            self._racer.cancel()
        return self._racer.run(lambda mode, event: self._inbox.put((mode, event)))

    async def _pulse(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, Ended):
                await self._ended(item)
            elif isinstance(item, LoadProgress):
                self._set_status(f"{safe_line(item.stage)} {item.fraction:.0%}")
            elif isinstance(item, Notice):
                self.notify(safe_line(item.message), markup=False)
            else:
                self._count(*item)
        await self._advance()

    def _count(self, mode: Mode, event: Event) -> None:
        if isinstance(event, Step):
            self._tokens[mode] += len(event.token_ids)
            self.query_one(f"#{mode}", LaneView).set_status(f"running: {self._tokens[mode]} tokens")
            self._set_status(RUNNING[mode])
        elif isinstance(event, Finished) and self._racer is not None and mode == self._racer.order[-1]:
            self._set_status(COMPARING)

    async def _ended(self, ended: Ended) -> None:
        if isinstance(ended.result, Race):
            self.race = ended.result
            await self.action_replay()
        elif ended.error is not None:
            self.error = ended.error
            hint = f"\n{ended.error.hint}" if ended.error.hint else ""
            self._set_status(f"error: {safe(ended.error.message + hint)}")

    async def action_replay(self) -> None:
        """Show the race again, at the speed it was run."""
        if self.race is None:
            return
        for lane in self.query(LaneView):
            await lane.clear()
        self._set_status("replay at true speed; Space goes to the end")
        self._replay = Replay(self.race)

    async def action_skip(self) -> None:
        await self._advance(float("inf"))

    async def _advance(self, seconds: float | None = None) -> None:
        """Show what had come by now, or by ``seconds``, and at the end what came of it."""
        race, replay = self.race, self._replay
        if race is None or replay is None or self.done:
            return
        replay.advance(seconds)
        for lane in self.query(LaneView):
            await lane.show(replay.tracks[lane.mode])
        if replay.done:
            length = race.dflash.finished.stats.mean_acceptance_length
            acceptance = f" · acceptance length {length:.2f}" if length is not None else ""
            self._set_status(f"{race.verdict} · seed {race.seed}\n{race.ratios}{acceptance}")

    def action_leave(self) -> None:
        self._leaving = True
        if self._racer is not None and self.race is None:
            self._racer.cancel()
        self.dismiss(self.race)

    def _set_status(self, text: str) -> None:
        self.query_one("#result", Static).update(Content(text))
