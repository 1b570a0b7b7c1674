"""The terminal application: its keys that work everywhere, and how it begins and ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import TextArea

from dflash_local import settings
from dflash_local.app.chat_session import ChatSession
from dflash_local.errors import DFlashError
from dflash_local.report.race_file import About
from dflash_local.service.race import Race
from dflash_local.ui.race_run import Prepare
from dflash_local.ui.tui.chat import ChatScreen
from dflash_local.ui.tui.dialogs import PullScreen
from dflash_local.ui.tui.race import RaceScreen
from dflash_local.ui.tui.theme import use_theme

TWICE_S = 2.0  # two presses within this leave
SLEEP = Binding("ctrl+z", "suspend_process", "To the shell", show=False, priority=True)  # as in every shell
PALETTE = (
    ("Regenerate", "The last reply with a fresh seed", "/regen"),
    ("Edit last message", "Back into the field", "/edit"),
    ("Copy last reply", "To the clipboard", "/copy"),
    ("Models", "Choose another pair", "/models"),
    ("Race", "With and without drafting", "/race"),
)
STOP_S = 10.0  # a cycle or a prefill chunk ends well within this


class ChatApp(App[DFlashError]):
    """Chats with a loaded pair. It returns the error that ended it, if one did."""

    TITLE = "dflash"
    CSS_PATH = "screens.tcss"
    BINDINGS = [
        Binding("ctrl+c", "interrupt", "Stop", show=False, priority=True),
        Binding("ctrl+q", "quit", "Quit", priority=True),
        SLEEP,
    ]

    def __init__(self, session: ChatSession, greeting: str = "") -> None:
        super().__init__()
        self.chat = ChatScreen(session, greeting)
        self.ended_by: int | None = None  # a signal
        self._pressed = -TWICE_S

    def on_mount(self) -> None:
        use_theme(self, self.chat.session.user)
        self.push_screen(self.chat)
        end_on_signals(self)

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection, else stop the reply, else empty the field, else (twice) leave."""
        focused = self.focused
        typed = focused.selected_text if isinstance(focused, TextArea) else ""
        selected = typed or self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.screen.clear_selection()  # the next Ctrl+C stops again
            self.notify("copied", markup=False)
            return
        now = time.monotonic()
        again, self._pressed = now - self._pressed < TWICE_S, now
        if again:
            self.exit()
        elif self._stop():
            return
        elif self.screen is self.chat and self.chat.composer.text:
            self.chat.composer.clear()
            self._pressed = -TWICE_S  # the next one does not leave
        else:
            self.notify("Ctrl+C again leaves", markup=False)

    def _stop(self) -> bool:
        """End what runs; False when nothing does."""
        return self.screen.stop() if isinstance(self.screen, PullScreen) else self.chat.stop()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        for title, about, line in PALETTE:
            yield SystemCommand(title, about, partial(self.chat.action_command, line))
        yield SystemCommand("Token origins", "Show which tokens were drafted", self.chat.action_origins)
        yield SystemCommand("Meter", "Show or hide the panel", self.chat.action_meter)

    def finish(self) -> bool:
        """Stop what runs, after the screen is gone; False when a load goes on regardless."""
        wait_s = STOP_S if self.chat.stop_quietly() else 0.2
        return self.chat.job is None or self.chat.job.join(wait_s)


class RaceApp(App[DFlashError]):
    """Shows one race, with a pair that is loaded for it."""

    TITLE = "dflash race"
    CSS_PATH = "screens.tcss"
    BINDINGS = [Binding("ctrl+c,ctrl+q", "leave", "Quit", show=False, priority=True), SLEEP]

    def __init__(self, screen: RaceScreen) -> None:
        super().__init__()
        self.race_screen = screen
        self.ended_by: int | None = None

    def on_mount(self) -> None:
        use_theme(self, settings.load())
        self.push_screen(self.race_screen, lambda _race: self.exit())
        end_on_signals(self)

    def action_leave(self) -> None:
        self.race_screen.action_leave()


def end_on_signals(app: ChatApp | RaceApp) -> None:
    """Let SIGTERM and SIGHUP end the application as leaving does, so that the terminal is restored."""

    def end(number: int) -> None:
        app.ended_by = number
        app.exit()

    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            if number is not None:
                asyncio.get_running_loop().add_signal_handler(number, end, int(number))


def run(session: ChatSession, greeting: str) -> int:
    """Show the chat until the user leaves; returns the exit code, 128 + n for signal n.

    Raises:
        DFlashError: the pair could not be loaded.
    """
    app = ChatApp(session, greeting)
    error = app.run()
    app.finish()
    if error is not None:
        raise error
    return _code(app)


def run_race(title: str, prompt: str, prepare: Prepare, about: Callable[[Race], About]) -> tuple[int, Race | None]:
    """Show a race until the user leaves; returns the exit code and the race, None when it did not end.

    Raises:
        DFlashError: the pair could not be loaded, or a reply failed.
    """
    app = RaceApp(RaceScreen(title, prompt, prepare, about))
    app.run()
    app.race_screen.run_of.join(STOP_S)
    if app.race_screen.error is not None and app.ended_by is None:
        raise app.race_screen.error
    return _code(app), app.race_screen.race


def _code(app: ChatApp | RaceApp) -> int:
    return 128 + app.ended_by if app.ended_by is not None else app.return_code or 0
