"""The chat: the conversation, the meter beside it, the field to type in, and the job that runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer, Static, TextArea

from dflash_local.app.chat_session import ChatSession
from dflash_local.errors import DFlashError
from dflash_local.events import LoadProgress, Notice, Step
from dflash_local.service.conversation import Answer
from dflash_local.terminal import safe_line
from dflash_local.ui.origins import LEGEND
from dflash_local.ui.reading_text import reply_line
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.jobs import Ended, Inbox, Jobs, Notification
from dflash_local.ui.tui.memory_watch import MemoryWatch
from dflash_local.ui.tui.own_commands import OWN, load_dialog, named_model, own_command
from dflash_local.ui.tui.widgets.composer import Composer
from dflash_local.ui.tui.widgets.messages import Note, UserMessage
from dflash_local.ui.tui.widgets.meter import Meter, one_line
from dflash_local.ui.tui.widgets.reply import ReplyView
from dflash_local.ui.tui.widgets.transcript import Transcript

PULSE_S = 0.03  # how often what came is drawn
METER_S = 0.1  # figures that change faster cannot be read
NOTHING_CAME = "nothing came of it; your message is back in the field"


class ChatScreen(Screen[None]):
    """Shows one conversation; everything that takes time is a job, and one job runs at a time."""

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (40, "-tall")]
    BINDINGS = [
        Binding("f1", "command('/help')", "Help"),
        Binding("escape", "stop", "Stop"),
        Binding("f2", "meter", "Meter"),
        Binding("f3", "origins", "Origins"),
        Binding("f4", "command('/editor')", "Editor", show=False),
        Binding("f5", "command('/race')", "Race"),
        Binding("f7", "command('/models')", "Models", show=False, priority=True),
        Binding("f8", "command('/edit')", "Edit last", show=False),
        Binding("f9", "command('/copy')", "Copy", show=False),
        Binding("ctrl+r", "command('/regen')", "Again"),
        Binding("pageup", "scroll_page(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "scroll_page(1)", "Down", show=False, priority=True),
    ]

    def __init__(self, session: ChatSession, greeting: str) -> None:
        super().__init__()
        self.session, self._greeting = session, greeting
        self.conversation = session.conversation
        self.readings = Readings(mode=self.conversation.options.mode, state="loading")
        self.commands = {command.usage: command.help for command in session.commands.values() if command.act}
        self.commands |= {usage: about for usage, (about, _) in OWN.items()}
        self._board = Board(self, session, self.readings)
        self._inbox = Inbox()
        self.jobs = Jobs(self._inbox)
        self.memory = MemoryWatch(session.memory, self._inbox.put)
        self._job: Callable[[Ended], Any] | None = None  # what to do at the end of the running job
        self._answer: Answer | None = None
        self._stopping = False
        self._view: ReplyView | None = None
        self._by_origin = False
        self.drawings = 0

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="middle"):
            yield Transcript()
            yield Meter()
        yield Static(id="hint", markup=False)
        yield Static(id="status", markup=False)
        yield Composer(usage.split()[0] for usage in self.commands)
        yield Footer()

    async def on_mount(self) -> None:
        self.add_class("-metered")
        self.session.listen(self._receive)
        if self._greeting:
            await self.show(self._greeting)
        await self.transcript.offer(self.session.examples)
        self.begin(self.session.open, self._loaded)
        self.memory.start()
        self.set_interval(PULSE_S, self._drain)
        self.query_one(Composer).focus()

    def _receive(self, event: Notice | LoadProgress) -> None:
        """Take an event from any thread: the program's notice becomes a note, a reply's an alarm of the meter."""
        warning = isinstance(event, Notice) and event.level == "warning"
        level: Literal["note", "warning"] = "warning" if warning else "note"
        self._inbox.put(Notification(event.message, level) if isinstance(event, Notice) else event)

    @property
    def busy(self) -> bool:
        return self._job is not None

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    async def show(self, text: str, level: str = "note") -> None:
        await self.transcript.add(Note(text, level))

    async def show_error(self, error: DFlashError) -> None:
        await self.show(f"{error.message}\n{error.hint}" if error.hint else error.message, "error")

    def begin(self, work: Callable[[], Any], then: Callable[[Ended], Any]) -> bool:
        """Start a job, unless one runs; ``then`` gets its end."""
        if self._job is not None:
            self.notify("one thing at a time: Esc stops the reply", markup=False)
            return False
        self._job, self._stopping = then, False
        self.jobs.start(work)
        self.redraw()
        return True

    def stop(self) -> bool:
        """End the running reply early, or take back what waits to be sent; False when there is neither."""
        if held := self.transcript.let_go():
            self.composer.give_back(held)
            self.notify(NOTHING_CAME, markup=False)
        if self._view is None or (self._answer is not None and self._answer.finished is not None):
            return bool(held)
        self._stopping = True
        if self._answer is not None:
            self._answer.cancel()
        self.readings.state = "stopping"
        self.redraw()
        return True

    def stop_quietly(self) -> bool:
        """Cancel the reply without drawing: the screen is gone. False when no reply is under way."""
        self._stopping = True
        if self._answer is not None:
            self._answer.cancel()
        return self._view is not None

    async def _drain(self) -> None:
        """Draw all that came since the last time, at once."""
        items = self._inbox.take()
        if not items:
            return
        self.drawings += 1
        steps = [item for item in items if isinstance(item, Step)]
        if steps and self._view is not None:
            await self._view.feed(steps)
        for item in items:
            if isinstance(item, Notification):
                await self.show(item.text, item.level)
            elif isinstance(item, LoadProgress):
                self.readings.state = f"{safe_line(item.stage)} {item.fraction:.0%}"
            elif isinstance(item, Ended):
                await self._end(item)
            else:
                self.readings.take(item)
        self.redraw(at_once=not self.busy)

    async def _end(self, ended: Ended) -> None:
        then, self._job = self._job, None
        if then is not None:
            await then(ended)
        await self._go_on(failed=ended.error is not None)

    def redraw(self, at_once: bool = True) -> None:
        """Show the figures and the pair as they are now."""
        self._board.draw(at_once)

    async def _loaded(self, ended: Ended) -> None:
        if ended.error is not None:
            self.app.exit(ended.error)
            return
        self.take_facts()

    def take_facts(self) -> None:
        """Take over what is loaded, which may be another pair."""
        facts = self.session.facts
        self.memory.look()
        if facts is not None:
            self.readings.load(facts)
            self.readings.mode = self.conversation.options.mode
        else:
            self.set_ready()

    @on(Composer.Sent)
    async def _sent(self, message: Composer.Sent) -> None:
        await self._take(message.text)

    async def _take(self, line: str) -> None:
        """Act on a message or a command; one that comes while a command runs waits for its end."""
        command = line.startswith("/") and not line.startswith("//")
        if self.busy and not (command and own_command(line.split()[0])):
            if self._view is not None or not await self.transcript.hold(line):
                self.composer.give_back(line)
                self.notify("not yet: Esc stops what is coming", markup=False)
        elif command:
            await self.action_command(line)
        else:
            await self.send(line[1:] if line.startswith("//") else line)

    async def _go_on(self, failed: bool) -> None:
        """Send what waited for the end of a command, unless that failed or led elsewhere."""
        held = "" if self.busy else self.transcript.let_go()
        if held and not failed and self.app.screen is self:
            await self._take(held)
        elif held:
            self.composer.give_back(held)

    async def send(self, text: str) -> None:
        """Send a message and show the reply as it comes."""
        await self.transcript.offer(())
        shown = UserMessage(text)
        await self.transcript.add(shown)

        async def then(ended: Ended) -> None:
            if not await self.reply_ended(ended):
                await shown.remove()
                self.composer.give_back(text)

        await self.ask(lambda: self.conversation.answer(text), then)

    async def ask(self, ask: Callable[[], Answer], then: Callable[[Ended], Any]) -> None:
        """Start a reply; ``then`` closes its view by ``reply_ended``."""
        self._view = ReplyView(self._by_origin)
        await self.transcript.add(self._view)
        self.transcript.anchor()
        self.readings.begin(self.conversation.options.mode)
        self.begin(lambda: self._listen(ask), then)

    def _listen(self, ask: Callable[[], Answer]) -> Answer:
        """Listen to a reply, on the job's thread."""
        with ask() as answer:
            self._answer = answer
            if self._stopping:
                answer.cancel()
            for event in answer:
                self._inbox.put(event)
        return answer

    async def reply_ended(self, ended: Ended) -> bool:
        """Close the view of a reply; False when it was not kept."""
        view, answer = self._view, self._answer
        self._view = self._answer = None
        if ended.error is not None:
            self.readings.state = "failed"
            await self.show_error(ended.error)
            if self.session.broken:
                await self.show("the session broke: /model NAME loads a pair again, Ctrl+Q leaves", "error")
        if view is None:
            return False
        if answer is None or answer.turn is None:
            await view.remove()
            if ended.error is None:
                await self.show(NOTHING_CAME)
            return False
        await view.finish(reply_line(self.readings), answer.turn.ending)
        return True

    async def action_command(self, line: str) -> None:
        """Run a command: the screen's own, or one that every chat has."""
        word, _, argument = line.partition(" ")
        own = own_command(word)
        if own is not None:
            await own(self, argument.strip())
            return
        name = named_model(word, argument) if self.session.loads_here else ""
        started = load_dialog(self, name, line) if name else self.run_command(lambda: self.session.execute(line))
        if not started:
            self.composer.put(line)

    def run_command(self, work: Callable[[], str]) -> bool:
        """Start what every chat can do, show what it returns and what it changed; False while something runs."""
        before, loaded = list(self.conversation.turns), self.session.facts

        async def then(ended: Ended) -> None:
            if ended.error is not None:
                await self.show_error(ended.error)
            elif ended.result:
                await self.show(ended.result)
            if self.conversation.turns != before:
                await self.transcript.rebuild(self.conversation.turns, self._by_origin)
            if self.session.facts is not loaded:
                self.take_facts()
            if self.conversation.turns != before or self.session.facts is not loaded:
                await self.transcript.offer(() if self.conversation.turns else self.session.examples)
            self.set_ready()
            self.readings.mode = self.conversation.options.mode

        return self.begin(work, then)

    def set_ready(self) -> None:
        """Say that nothing runs any more."""
        self.readings.state = "ready" if self.session.facts is not None else "no model is loaded"

    def action_stop(self) -> None:
        self.stop()

    def action_meter(self) -> None:
        """Show or hide the panel; a narrow screen has its line instead."""
        self.toggle_class("-metered")
        if not self.has_class("-wide"):
            self.notify("the panel needs 100 columns; the line below has the figures", markup=False)
        self.redraw()

    async def action_origins(self) -> None:
        """Show where tokens came from, or the text laid out."""
        self._by_origin = not self._by_origin
        for view in self.transcript.replies:
            await view.show_origins(self._by_origin)
        self._hint(LEGEND if self._by_origin else "")

    def action_scroll_page(self, direction: int) -> None:
        """Scroll the conversation, wherever the cursor is."""
        self.transcript.page(direction)

    @on(TextArea.Changed)
    def _complete(self) -> None:
        names = self.composer.completions
        self._hint("Tab: " + "  ".join(names) if names else LEGEND if self._by_origin else "")

    @on(Composer.Refused)
    def _refused(self, message: Composer.Refused) -> None:
        self.notify(message.reason, severity="warning", markup=False)

    def _hint(self, text: str) -> None:
        hint = self.query_one("#hint", Static)
        hint.display = bool(text)
        hint.update(Content(text))


class Board:
    """Draws the title, the line below the conversation and the panel; the panel less often than the text."""

    def __init__(self, screen: Screen[None], session: ChatSession, readings: Readings) -> None:
        self._screen, self._session, self._readings = screen, session, readings
        self._drawn = -METER_S
        self._later: Timer | None = None

    def draw(self, at_once: bool) -> None:
        """Show the figures as they are now; the panel a moment later unless ``at_once``."""
        pair, facts = self._session.pair, self._session.facts
        how = f" · {facts.loaded_as}" if facts is not None else ""
        mode = "" if self._readings.mode == "dflash" else " · without drafting (ar)"
        self._set_text("#title", safe_line(f"dflash · {pair.label}{how}{mode}"))
        self._set_text("#status", one_line(self._readings))
        due = self._drawn + METER_S - time.monotonic()
        if at_once or due <= 0:
            self._meter()
        elif self._later is None:
            self._later = self._screen.set_timer(due, self._meter)

    def _meter(self) -> None:
        if self._later is not None:
            self._later.stop()
            self._later = None
        self._drawn = time.monotonic()
        if self._screen.has_class("-wide") and self._screen.has_class("-metered"):
            self._screen.query_one(Meter).show(self._readings)

    def _set_text(self, where: str, text: str) -> None:
        place = self._screen.query_one(where, Static)
        if str(place.content) != text:
            place.update(Content(text), layout=False)
