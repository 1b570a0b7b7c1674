"""The chat on a full screen: decides whether the terminal can show one, and serves it the chat's commands."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dflash_local import terminal
from dflash_local.cli.attaching import running_server
from dflash_local.cli.console import Console
from dflash_local.cli.slash import COMMANDS, CommandContext, Quit, execute
from dflash_local.errors import EngineError
from dflash_local.events import LoadProgress, Notice, PullProgress
from dflash_local.service.conversation import Conversation

if TYPE_CHECKING:
    from dflash_local.cli.fit import Loaded
    from dflash_local.planner.occupancy import Occupancy
    from dflash_local.ui.offers import Offer
    from dflash_local.ui.tui.backend import Hear

STAND_INS = {
    **dict.fromkeys("─━═–—▔", "-"),
    **dict.fromkeys("│┃║▏▎▍▊▌▐", "|"),
    **dict.fromkeys("░·•…", "."),
    **dict.fromkeys("▁▂▃", "_"),
    "■": "*",
    "▶": ">",
    "▲": "!",
    "‹": "<",
    "›": ">",
    "▓": "=",
}
LEAVE_OUT = ("/help", "/regen", "/quit")  # the screen has its own


class ScreenConsole(Console):
    """Says to a screen what a console says to a terminal; before one listens, it keeps what was said."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self._hear: Callable[[str, str], None] | None = None
        self._load: Callable[[str, float], None] = lambda _text, _fraction: None
        self._kept: list[tuple[str, str]] = []
        self._line = ""

    def attach(self, hear: Callable[[str, str], None], load: Callable[[str, float], None]) -> None:
        """Tell ``hear`` (text, level) and ``load`` (what, 0..1) from now on, and what was kept."""
        self._hear, self._load = hear, load
        for text, level in self._kept:
            hear(text, level)
        self._kept = []

    @property
    def live(self) -> bool:
        """Never: no line of the terminal is to be written again."""
        return False

    @property
    def can_ask(self) -> bool:
        """Never: nobody reads the terminal under the screen."""
        return False

    def raw(self, text: str, style: str = "", end: str = "") -> None:
        self._say(text + end, "note")

    def note(self, text: str = "", style: str = "", end: str = "\n") -> None:
        self.note_text(terminal.safe_line(text), style, end)

    def note_text(self, text: str, style: str = "", end: str = "\n") -> None:
        self._line += text + end
        if end:
            line, self._line = self._line, ""
            self._say(line, "note")

    def raw_note(self, text: str, style: str = "", end: str = "") -> None:
        self._say(text + end, "note")

    def warn(self, text: str) -> None:
        self._say(text, "warning")

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, float], None]]:
        yield lambda text, fraction: self._load(text, fraction)

    def _say(self, text: str, level: str) -> None:
        if not text.strip():
            return
        if self._hear is None:
            self._kept.append((text, level))
        else:
            self._hear(text, level)


class ScreenBackend:
    """The chat's commands for a screen; what one command says comes as one note."""

    def __init__(self, context: CommandContext, console: ScreenConsole, greeting: str) -> None:
        self._context, self._console, self._greeting = context, console, greeting
        context.show_turns = False  # the screen shows them itself
        self._hear: Hear | None = None
        self._gathering: list[str] | None = None

    @property
    def conversation(self) -> Conversation:
        return self._context.conversation

    @property
    def greeting(self) -> str:
        return self._greeting

    @property
    def examples(self) -> Sequence[str]:
        from dflash_local.cli.examples import examples

        return examples(self.conversation.pair)

    @property
    def commands(self) -> Mapping[str, str]:
        return {command.usage: command.help for name, command in COMMANDS.items() if name not in LEAVE_OUT}

    def attach(self, hear: Hear) -> None:
        self._hear = hear
        self._console.attach(self._heard, lambda text, fraction: hear(LoadProgress(text, fraction)))

    def execute(self, line: str) -> None:
        self._gathering = []
        try:
            execute(line, self._context)
        except Quit:
            return
        finally:
            said, self._gathering = "\n".join(self._gathering), None
            self._tell(said, "note")

    def offers(self) -> Sequence[Offer]:
        from dflash_local.cli.offers import offers

        return offers(self._context.talk.user, self._loaded)

    def offer(self, name: str) -> Offer:
        from dflash_local.cli.offers import offer

        return offer(name, self._context.talk.user, self._loaded)

    def pull(self, name: str, hear: Callable[[PullProgress | Notice], None], cancelled: Callable[[], bool]) -> None:
        from dflash_local.cli.offers import pull

        pull(name, self._context.talk.user, hear, cancelled)

    def memory(self) -> Occupancy:
        from dflash_local.planner.occupancy import Occupancy, occupancy
        from dflash_local.remote.attached import AttachedFacts

        facts, user = self.conversation.facts, self._context.talk.user
        if facts is None:
            return Occupancy()
        server = running_server(user) if isinstance(facts, AttachedFacts) else None
        return occupancy(facts.device, user.environ, server.get("pid") if server else None)

    @property
    def _loaded(self) -> Loaded | None:
        from dflash_local.cli.fit import Loaded

        facts = self.conversation.facts
        return Loaded(self.conversation.pair, facts) if facts is not None else None

    def _heard(self, text: str, level: str) -> None:
        if level == "note" and self._gathering is not None:
            self._gathering.append(text.rstrip("\n"))
        else:
            self._tell(text, level)

    def _tell(self, text: str, level: str) -> None:
        from dflash_local.ui.tui.backend import Notification

        if self._hear is not None and text.strip():
            self._hear(Notification(text, "warning" if level == "warning" else "note"))


def can_show(console: Console, environ: Mapping[str, str]) -> bool:
    """True where a person sits before a terminal that knows control sequences; screens paint on stderr."""
    return console.interactive and terminal.is_terminal(console.err) and not terminal.is_dumb(environ)


def draw_plainly() -> None:
    """Where stderr's encoding lacks the signs of a screen (``LC_ALL=C``), let others stand for them: bars stay bars."""
    codecs.register_error("dflash-screen", _stand_ins)
    reconfigure = getattr(sys.__stderr__, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="dflash-screen")


def _stand_ins(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_stand_in, error.object[error.start : error.end])), error.end


def _stand_in(sign: str) -> str:
    if sign in STAND_INS:
        return STAND_INS[sign]
    if "\u2500" <= sign < "\u2580":
        return "+"  # corners and crossings
    return "#" if "\u2580" <= sign < "\u25a0" else "?"


def application(console: Console) -> Any | None:
    """The screens' ``run``; None, and a note, where they cannot be had."""
    try:
        from dflash_local.ui.tui.app import run
    except (ImportError, AttributeError) as error:  # not installed, or another version than it claims
        console.note(f"the screen cannot be shown ({error}); this is the line chat", "dim")
        return None
    return run


def show(run: Any, conversation: Conversation, backend: ScreenBackend) -> int:
    """Run the screen to its end and give the model back.

    Raises:
        DFlashError: the pair could not be loaded, or is broken at the end.
    """
    draw_plainly()
    try:
        code = run(backend)
        if conversation.broken:
            raise EngineError("the session broke", "dflash doctor looks at this machine")
        return int(code)
    finally:
        conversation.close()
