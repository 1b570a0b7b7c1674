"""The chat: the conversation, the meter beside it, the field to type in, and the job that runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static, TextArea

from dflash_local.app.chat_session import ChatSession
from dflash_local.app.reply_text import headline
from dflash_local.errors import DFlashError
from dflash_local.events import Event, LoadProgress, Notice, Step
from dflash_local.planner.occupancy import Occupancy
from dflash_local.service.gathered import Answer
from dflash_local.service.pieces import LEGEND
from dflash_local.terminal import safe_line
from dflash_local.ui.job import Job
from dflash_local.ui.readings import Readings
from dflash_local.ui.tui.command_menu import CommandMenu
from dflash_local.ui.tui.composer import Composer
from dflash_local.ui.tui.meter import Meter, one_line
from dflash_local.ui.tui.own_commands import OWN, load_dialog, named_model, own_command
from dflash_local.ui.tui.transcript import Note, ReplyView, Transcript, UserMessage

PULSE_S = 0.03  # how often what came is drawn
METER_S = 0.1  # figures that change faster cannot be read
MEMORY_S = 2.0
NOTHING_CAME = "nothing came of it; your message is back in the field"
R = TypeVar("R")


class ChatScreen(Screen[None]):
    """Shows one conversation. What takes time is a job on a thread, one at a time; events wait for the next drawing."""

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
        self._drawing = asyncio.Lock()  # who waits for all to be drawn waits for what the timer took, too
        self._came: SimpleQueue[Event | Occupancy | tuple[str, str]] = SimpleQueue()
        self.job: Job[Any] | None = None
        self._memory: Job[None] | None = None
        self.busy = False
        self._answer: Answer | None = None
        self._stopping = False
        self._view: ReplyView | None = None
        self._by_origin = False
        self._metered, self._stale = -METER_S, False  # when the panel was drawn, and whether more is to be drawn
        self.drawings = 0

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="middle"):
            yield Transcript()
            yield Meter()
        yield Static(id="hint", markup=False)
        yield Static(id="status", markup=False)
        yield CommandMenu()
        yield Composer(self.commands)
        yield Footer()

    async def on_mount(self) -> None:
        self.add_class("-metered")
        self.session.listen(self._receive)
        if self.conversation.turns:
            await self.rebuild()
        if self._greeting:
            await self.show(self._greeting)
        if not self.conversation.turns:
            await self.transcript.offer(self.session.examples)
        self.start(self._open())
        self.set_interval(PULSE_S, self._drain)
        self.set_interval(MEMORY_S, self.look_at_memory)
        self.composer.focus()

    def _receive(self, event: Notice | LoadProgress) -> None:
        """Take an event from any thread: the program's notice becomes a note, a reply's an alarm of the meter."""
        self._came.put((event.message, event.level) if isinstance(event, Notice) else event)

    def look_at_memory(self) -> None:
        """Ask how full the device is, unless the last answer is still awaited: a driver may take seconds."""
        if self._memory is None or not self._memory.running:
            self._memory = Job(lambda: self._came.put(self.session.memory()))

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    async def rebuild(self) -> None:
        """Show the conversation anew, as its turns are now."""
        await self.transcript.rebuild(self.conversation.turns)
        await self.fold()

    async def fold(self) -> None:
        """Show which messages are not sent any more."""
        sent, turns = self.conversation.sent, len(self.conversation.turns)
        unsent = sent.unsent if sent.unsent < turns else 0
        await self.transcript.fold(turns - unsent, unsent, bool(sent.summary))

    async def show(self, text: str, level: str = "note") -> None:
        await self.transcript.add(Note(text, level))

    async def show_error(self, error: DFlashError) -> None:
        await self.show(f"{error.message}\n{error.hint}" if error.hint else error.message, "error")

    # what takes time

    def start(self, course: Coroutine[Any, Any, object]) -> bool:
        """Begin what takes time, unless something runs; an error that it ends with is shown."""
        if self.busy:
            course.close()
            self.notify("one thing at a time: Esc stops the reply", markup=False)
            return False
        self.busy, self._stopping = True, False
        self.run_worker(self._run(course))
        return True

    async def _run(self, course: Coroutine[Any, Any, object]) -> None:
        failed = False
        try:
            await course
        except DFlashError as error:
            failed = True
            await self.show_error(error)
        self.busy = False
        self.redraw()
        held = self.transcript.let_go()
        if held and not failed and self.app.screen is self:
            await self._take(held)
        elif held:
            self.composer.give_back(held)

    async def do(self, work: Callable[[], R]) -> R:
        """Return what ``work`` returns, done on a thread; all that was said meanwhile is drawn by then.

        Raises:
            DFlashError: it failed.
        """
        self.job = job = Job(work)
        self.redraw()
        async for _ in job.pulses(PULSE_S):
            pass
        await self._drain()
        return job.result

    async def dialog(self, screen: Screen[R]) -> R | None:
        """Show a screen over the chat and return what it is dismissed with; nothing runs meanwhile."""
        if held := self.transcript.let_go():
            self.composer.give_back(held)
        self.busy = False
        self.set_ready()
        self.redraw()
        found = await self.app.push_screen_wait(screen)
        self.busy = True
        return found

    def stop(self) -> bool:
        """End the running reply early, or take back what waits to be sent; False when there is neither."""
        if held := self.transcript.let_go():
            self.composer.give_back(held)
            self.notify(NOTHING_CAME, markup=False)
        if self._view is None or (self._answer is not None and self._answer.finished is not None):
            return bool(held)
        self.readings.state = "stopping"
        self.stop_quietly()
        self.redraw()
        return True

    def stop_quietly(self) -> bool:
        """Cancel the reply without drawing: the screen may be gone. False when no reply is under way."""
        self._stopping = True
        if self._answer is not None:
            self._answer.cancel()
        return self._view is not None

    # drawing

    async def _drain(self) -> None:
        """Draw all that came since the last time, at once."""
        async with self._drawing:
            items = []
            while not self._came.empty():
                items.append(self._came.get())
            if items:
                self.drawings += 1
            steps = [item for item in items if isinstance(item, Step)]
            if steps and self._view is not None:
                await self._view.feed(steps)
            for item in items:
                if isinstance(item, tuple):
                    await self.transcript.add(Note(*item), before=self._view)
                elif isinstance(item, LoadProgress):
                    self.readings.state = f"{safe_line(item.stage)} {item.fraction:.0%}"
                else:
                    self.readings.take(item)
            if items or self._stale:
                self.redraw(at_once=not self.busy)

    def redraw(self, at_once: bool = True) -> None:
        """Show the figures and the pair as they are now; the panel a moment later unless ``at_once``."""
        facts = self.session.facts
        how = f" · {facts.loaded_as}" if facts is not None else ""
        mode = "" if self.readings.mode == "dflash" else " · plain"
        self._set_text("#title", safe_line(f"dflash · {self.session.pair.label}{how}{mode}"))
        self._set_text("#status", one_line(self.readings))
        now = time.monotonic()
        self._stale = not at_once and now - self._metered < METER_S
        if not self._stale:
            self._metered = now
            if self.has_class("-wide") and self.has_class("-metered"):
                self.query_one(Meter).show(self.readings)

    def _set_text(self, where: str, text: str) -> None:
        place = self.query_one(where, Static)
        if str(place.content) != text:
            place.update(Content(text), layout=False)

    # the pair

    async def _open(self) -> None:
        try:
            await self.do(self.session.open)
        except DFlashError as error:
            self.app.exit(error)
        else:
            self._take_facts()

    def _take_facts(self) -> None:
        """Take over what is loaded, which may be another pair."""
        facts = self.session.facts
        self.look_at_memory()
        if facts is not None:
            self.readings.load(facts)
        self.set_ready()

    def set_ready(self) -> None:
        """Say that nothing runs any more."""
        self.readings.state = "ready" if self.session.facts is not None else "no model is loaded"
        self.readings.mode = self.conversation.options.mode

    # what the user sends

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
            self.start(self._send(line[1:] if line.startswith("//") else line))

    async def _send(self, text: str) -> None:
        """Send a message and show the reply as it comes."""
        await self.transcript.offer(())
        shown = UserMessage(text)
        await self.transcript.add(shown)
        if not await self.reply(lambda: self.conversation.answer(text)):
            await shown.remove()
            self.composer.give_back(text)

    async def reply(self, ask: Callable[[], Answer]) -> bool:
        """Show a reply as it comes; False when it was not kept."""
        self._view = view = ReplyView(self._by_origin)
        await self.transcript.add(view)
        self.transcript.anchor()
        self.readings.begin(self.conversation.options.mode)
        failed = False
        try:
            await self.do(lambda: self._listen(ask))
        except DFlashError as error:
            failed, self.readings.state = True, "failed"
            await self.show_error(error)
            if self.session.broken:
                await self.show("the session broke: /model NAME loads a pair again, Ctrl+Q leaves", "error")
        answer = self._answer
        self._view = self._answer = None
        if answer is None or answer.turn is None:
            await view.remove()
            if not failed:
                await self.show(NOTHING_CAME)
            return False
        figures = headline(answer.finished) if answer.finished is not None else ""
        await view.finish(figures, answer.turn.ending)
        await self.fold()
        return True

    def _listen(self, ask: Callable[[], Answer]) -> None:
        """Listen to a reply, on the job's thread."""
        with ask() as answer:
            self._answer = answer
            if self._stopping:
                answer.cancel()
            while answer.notices:  # of the conversation, not of the reply
                self._receive(answer.notices.popleft())
            for event in answer:
                self._came.put(event)

    async def action_command(self, line: str) -> None:
        """Run a command: the screen's own, or one that every chat has."""
        word, _, argument = line.partition(" ")
        own = own_command(word)
        if own is not None:
            await own(self, argument.strip())
            return
        name = named_model(word, argument) if self.session.loads_here else ""
        course = load_dialog(self, name, line) if name else self.run_command(lambda: self.session.execute(line))
        if not self.start(course):
            self.composer.put(line)

    async def run_command(self, work: Callable[[], str]) -> None:
        """Do what every chat can do; show what it returns and what it changed, also where it fails."""
        before, loaded, text = list(self.conversation.turns), self.session.facts, ""
        try:
            text = await self.do(work)
        finally:
            said, other = self.conversation.turns != before, self.session.facts is not loaded
            if said:  # begun anew, or another one taken up
                self.readings.forget()
                await self.rebuild()
            if text:
                await self.show(text)
            if other:
                self._take_facts()
            if said or other:
                await self.transcript.offer(() if self.conversation.turns else self.session.examples)
            self.set_ready()

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
    def _offer(self) -> None:
        self.composer.chosen = 0
        self._show_menu()

    @on(Composer.Chose)
    def _show_menu(self) -> None:
        self.query_one(CommandMenu).show(self.composer.offered, self.composer.chosen)

    @on(OptionList.OptionSelected, "#commands")
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        self.composer.choose(event.option_index, send=False)

    @on(Composer.Refused)
    def _refused(self, message: Composer.Refused) -> None:
        self.notify(message.reason, severity="warning", markup=False)

    def _hint(self, text: str) -> None:
        hint = self.query_one("#hint", Static)
        hint.display = bool(text)
        hint.update(Content(text))
