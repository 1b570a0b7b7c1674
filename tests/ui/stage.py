"""The chat application over a scripted session, driven by keys."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from textual import app as textual_app
from textual import pilot as textual_pilot
from textual.app import App
from textual.events import Paste
from textual.pilot import Pilot

from dflash_local import settings
from dflash_local.app.chat_commands import ChatCommand
from dflash_local.app.chat_session import ChatSession
from dflash_local.app.download import BeforeDownload, OnPull
from dflash_local.app.load_choices import LoadChoice, LoadChoices
from dflash_local.app.model_entries import ModelEntry
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Notice, Piece, Step
from dflash_local.load_config import LoadConfig
from dflash_local.planner.occupancy import Occupancy
from dflash_local.service.backend import Backend
from dflash_local.service.chat_options import ChatOptions
from dflash_local.store.records import Turn
from dflash_local.ui.tui.app import ChatApp
from dflash_local.ui.tui.chat import ChatScreen
from dflash_local.ui.tui.composer import Composer
from tests.service.scripted import ScriptedModels, ScriptedSession

Start = Callable[[Pair, LoadConfig], Backend]
Play = Callable[["Stage"], Awaitable[None]]
COLLECT_EVERY = 16  # plays
POLL_S = 0.01
QUIET_ROUNDS = 2
_PLAYS = count()


class ScriptedChat(ChatSession):
    """A chat whose commands are functions of the test, and whose registry and downloads are the test's."""

    examples: Sequence[str] = ()
    commands: Mapping[str, ChatCommand] = {
        "/model": ChatCommand("/model [NAME [DRAFTER]]", "change the pair", lambda *_: ""),
        "/set": ChatCommand("/set [NAME VALUE]", "change", lambda *_: ""),
        "/stats": ChatCommand("/stats", "figures", lambda *_: ""),
    }

    def __init__(
        self, options: ChatOptions, start: Start, examples: Sequence[str] = (), pair: Pair | None = None
    ) -> None:
        pair = pair or Pair("scripted", Path("nowhere"), Path("nowhere"), bundled=False)
        super().__init__(ScriptedModels(start), pair, LoadConfig(), options, settings.load({}), keep=False)
        self.examples = examples
        self.acts: dict[str, Callable[[], None]] = {}
        self.executed: list[str] = []
        self.registry: list[ModelEntry] | DFlashError = []
        self.pulls: list[str] = []
        self.plans: list[tuple[str, int | None, bool]] = []
        self.plan: Callable[[str, int | None, bool], LoadChoices | None] = lambda *_: None
        self.loaded: list[LoadChoice] = []
        self.on_pull: Callable[[OnPull, Callable[[], bool]], None] = lambda _on_event, _cancelled: None
        self.held = Occupancy()
        self.read: Callable[[], Occupancy] | None = None

    def execute(self, line: str) -> str:
        self.executed.append(line)
        self.acts.get(line, lambda: None)()
        return ""

    def entries(self) -> list[ModelEntry]:
        if isinstance(self.registry, DFlashError):
            raise self.registry
        return self.registry

    def entry(self, name: str) -> ModelEntry:
        found = next((entry for entry in self.entries() if entry.name == name), None)
        if found is None:
            raise UsageError(f"unknown model {name!r}", "did you mean another?")
        return found

    def load_choices(self, name: str, context: int | None = None, draft: bool = True) -> LoadChoices | None:
        self.plans.append((name, context, draft))
        return self.plan(name, context, draft)

    def load(self, choice: LoadChoice) -> str:
        self.loaded.append(choice)
        return f"now talking to {choice.model}"

    def before_download(self, name: str) -> BeforeDownload:
        return BeforeDownload("apache-2.0", "512 GiB free for /models")

    def pull(self, name: str, on_event: OnPull, cancelled: Callable[[], bool], draft: bool = True) -> None:
        self.pulls.append(name if draft else f"{name} without its drafter")
        self._mark(name, "partial")
        self.on_pull(on_event, cancelled)
        self._mark(name, "local")

    def _mark(self, name: str, state: str) -> None:
        if isinstance(self.registry, list):
            self.registry = [replace(entry, state=state) if entry.name == name else entry for entry in self.registry]

    def memory(self) -> Occupancy:
        return self.read() if self.read is not None else self.held

    def say(self, text: str) -> None:
        self._emit(Notice(text))


@dataclass
class Stage:
    """A running application and what is behind it."""

    app: ChatApp
    chat_session: ScriptedChat
    session: ScriptedSession
    pilot: Pilot[Any] = field(init=False)

    @property
    def chat(self) -> ChatScreen:
        return self.app.chat

    @property
    def composer(self) -> Composer:
        return self.chat.composer

    @property
    def turns(self) -> list[Turn]:
        return self.chat_session.conversation.turns

    @property
    def roles(self) -> list[str]:
        return [turn.role for turn in self.turns]

    @property
    def sent(self) -> list[str]:
        """The last message of each request."""
        return [request.messages[-1].content for request in self.session.requests]

    @property
    def notified(self) -> str:
        return "\n".join(note.message for note in self.app._notifications)

    @property
    def screen_text(self) -> str:
        return screen_text(self.app)

    async def until(self, ready: Callable[[], bool], seconds: float = 60.0) -> None:
        await until(ready, self.pilot, seconds)

    async def shows(self, *parts: str) -> None:
        """Wait until all of it stands on the screen."""
        await self.until(lambda: all(part in self.screen_text for part in parts))

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def idle(self) -> None:
        """Until no job runs and all of it is drawn."""
        await self.until(lambda: not self.chat.busy)
        await self.pilot.pause()

    async def enter(self, text: str) -> None:
        """Type a message and send it."""
        self.composer.put(text)
        await self.press("enter")

    async def send(self, text: str) -> None:
        """Send a message and wait for what comes of it."""
        await self.enter(text)
        await self.idle()

    async def post(self, text: str) -> None:
        """Paste it, as a terminal does: one event for all of it."""
        self.composer.post_message(Paste(text))
        await self.pilot.pause()


def screen_text(app: App[Any]) -> str:
    """Every cell of the screen, as lines."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(ready: Callable[[], bool], pilot: Pilot[Any], seconds: float = 60.0) -> None:
    """Let the application work until something holds."""
    limit = time.monotonic() + seconds
    while not ready() and time.monotonic() < limit:
        await pilot.pause(POLL_S)
    if not ready():
        raise AssertionError(f"not reached; the screen is\n{screen_text(pilot.app)}")


def saying(text: str, size: int = 0) -> ScriptedSession:
    """A session that says it, cut into bits of ``size`` characters."""
    bits = [text[at : at + size] for at in range(0, len(text), size)] if size else [text]
    return ScriptedSession(steps=[Step((Piece(bit),), (1,), 0, 0, 1, index / 1000) for index, bit in enumerate(bits)])


async def settle(pilot: Pilot[Any]) -> None:
    """Wait until every widget has handled all that it was sent, and what came of that."""
    quiet = 0
    while quiet < QUIET_ROUNDS and pilot.app.is_running:
        await asyncio.sleep(0)  # a key is sent to the loop as from another thread
        await pilot._wait_for_screen()
        pilot.app.screen._on_timer_update()
        pumps = (pilot.app, *pilot.app.screen.walk_children(with_self=True))
        quiet = quiet + 1 if all(pump.message_queue_size == 0 for pump in pumps) else 0


def drive(app: App[Any], act: Callable[[Pilot[Any]], Awaitable[None]], size: tuple[int, int]) -> None:
    """Run an application off screen while ``act`` drives it.

    After each key Textual waits until the processor looks idle, 40 ms at least and often in vain where others work on
    it; here it waits for what the application has yet to handle.
    """

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            with pytest.MonkeyPatch.context() as patch:
                for module in (textual_app, textual_pilot):
                    patch.setattr(module, "wait_for_idle", lambda *_: settle(pilot))
                await act(pilot)

    look_no_more()
    asyncio.run(run())


def look_no_more() -> None:
    """Screens collect garbage twice, and let go of all in the end: of libraries and tests that is a second each time.

    So they begin with all of that out of the collector's sight; what earlier tests left is collected now and then.
    """
    if next(_PLAYS) % COLLECT_EVERY == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


def play(
    act: Play,
    session: ScriptedSession | None = None,
    size: tuple[int, int] = (120, 36),
    options: ChatOptions | None = None,
    start: Start | None = None,
    examples: Sequence[str] = (),
) -> Stage:
    """Run the application off screen, let ``act`` drive it, and give everything back."""
    session = session or ScriptedSession()
    chat = ScriptedChat(options or ChatOptions(), start or (lambda *_: session), examples)
    stage = Stage(ChatApp(chat, "welcome"), chat, session)

    async def run(pilot: Pilot[Any]) -> None:
        stage.pilot = pilot
        await stage.until(lambda: not stage.chat.busy or not stage.app.is_running)
        await act(stage)

    try:
        drive(stage.app, run, size)
        stage.app.finish()
    finally:
        chat.close()
    return stage


def staged(make: Callable[[], ScriptedSession] = ScriptedSession, **how: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of ``async def test(stage, ...)``: the application runs while it does, over the session made."""

    def decorate(act: Callable[..., Any]) -> Any:
        @wraps(act)
        def test(**fixtures: Any) -> None:
            play(partial(act, **fixtures), make(), **how)

        given = signature(act)
        fixtures = [each for each in given.parameters.values() if each.name != "stage"]
        test.__signature__ = given.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return test

    return decorate
