"""The chat application over a scripted session, driven by keys."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from textual.pilot import Pilot

from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DFlashError, UsageError
from dflash_local.events import Notice, PullProgress
from dflash_local.planner.occupancy import Occupancy
from dflash_local.service.chat_options import ChatOptions
from dflash_local.service.conversation import Conversation
from dflash_local.service.service import Service
from dflash_local.store.history import Recorder
from dflash_local.ui.offers import Offer
from dflash_local.ui.tui.app import ChatApp
from dflash_local.ui.tui.backend import Hear, Notification
from tests.service.scripted import ScriptedSession

Play = Callable[["Stage", Pilot[DFlashError]], Awaitable[None]]
COLLECT_EVERY = 16  # plays
_PLAYS = count()


@dataclass
class ScriptedBackend:
    """A backend whose commands are functions of the test."""

    conversation: Conversation
    greeting: str = "welcome"
    examples: Sequence[str] = ()
    commands: Mapping[str, str] = field(default_factory=lambda: {"/set [NAME VALUE]": "change", "/stats": "figures"})
    acts: dict[str, Callable[[], None]] = field(default_factory=dict)
    executed: list[str] = field(default_factory=list)
    hear: Hear | None = None
    registry: list[Offer] | DFlashError = field(default_factory=list)
    pulls: list[str] = field(default_factory=list)
    on_pull: Callable[[Callable[[PullProgress | Notice], None], Callable[[], bool]], None] = lambda _hear, _stop: None
    held: Occupancy = Occupancy()
    read: Callable[[], Occupancy] | None = None

    def attach(self, hear: Hear) -> None:
        self.hear = hear

    def execute(self, line: str) -> None:
        self.executed.append(line)
        self.acts.get(line, lambda: None)()

    def offers(self) -> list[Offer]:
        if isinstance(self.registry, DFlashError):
            raise self.registry
        return self.registry

    def offer(self, name: str) -> Offer:
        found = next((offer for offer in self.offers() if offer.name == name), None)
        if found is None:
            raise UsageError(f"unknown model {name!r}", "did you mean another?")
        return found

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        self.pulls.append(name)
        self.on_pull(hear, cancelled)

    def memory(self) -> Occupancy:
        return self.read() if self.read is not None else self.held

    def say(self, text: str) -> None:
        assert self.hear is not None
        self.hear(Notification(text))


@dataclass
class Stage:
    """A running application and what is behind it."""

    app: ChatApp
    backend: ScriptedBackend
    session: ScriptedSession

    @property
    def chat(self):  # type: ignore[no-untyped-def]
        return self.app.chat

    @property
    def screen_text(self) -> str:
        """Every cell of the screen, as lines."""
        return "\n".join(
            "".join(segment.text for segment in strip) for strip in self.app.screen._compositor.render_strips()
        )

    async def until(self, ready: Callable[[], bool], pilot: Pilot[DFlashError], seconds: float = 20.0) -> None:
        """Let the application work until something holds."""
        for _ in range(int(seconds / 0.02)):
            if ready():
                return
            await pilot.pause(0.02)
        raise AssertionError(f"not reached; the screen is\n{self.screen_text}")

    async def idle(self, pilot: Pilot[DFlashError]) -> None:
        """Until no job runs and all of it is drawn."""
        await self.until(lambda: not self.chat.busy, pilot)
        await pilot.pause()

    async def send(self, text: str, pilot: Pilot[DFlashError]) -> None:
        """Type a message, send it and wait for what comes of it."""
        self.chat.composer.put(text)
        await pilot.press("enter")
        await pilot.pause()
        await self.idle(pilot)


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
    load: Callable[[Pair, bool], Service] | None = None,
    examples: Sequence[str] = (),
) -> Stage:
    """Run the application off screen, let ``act`` drive it, and give everything back."""
    session = session or ScriptedSession()
    opened: list[Service] = []

    def scripted(_pair: Pair, _draft: bool) -> Service:
        opened.append(Service(session))
        return opened[-1]

    pair = Pair("scripted", Path("nowhere"), Path("nowhere"), bundled=False)
    recorder = Recorder(None, lambda _text: None, keep=False)
    conversation = Conversation(pair, load or scripted, options or ChatOptions(), recorder)
    backend = ScriptedBackend(conversation, examples=examples)
    stage = Stage(ChatApp(backend), backend, session)
    look_no_more()

    async def run() -> None:
        async with stage.app.run_test(size=size) as pilot:
            await stage.until(lambda: not stage.chat.busy or not stage.app.is_running, pilot)
            await act(stage, pilot)

    try:
        asyncio.run(run())
        stage.app.finish()
    finally:
        conversation.close()
    return stage
