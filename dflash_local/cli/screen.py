"""When ``dflash chat`` and ``dflash race`` take the whole screen, and how one is drawn where signs are lacking."""

from __future__ import annotations

import codecs
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local import terminal
from dflash_local.cli.console import Console
from dflash_local.errors import EngineError, Interrupted
from dflash_local.store.history import ChatEntry

if TYPE_CHECKING:
    from dflash_local.app.chat_session import ChatSession

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


def application(console: Console, run: str = "run") -> Any | None:
    """A function of the screens' application; None, and a note, where they cannot be had."""
    try:
        return getattr(importlib.import_module("dflash_local.ui.tui.app"), run)
    except (ImportError, AttributeError) as error:  # not installed, or another version than it claims
        console.note(f"the screen cannot be shown ({error}); this goes on line by line", "dim")
        return None


def pick_chat(folder: Path | None) -> ChatEntry:
    """Let a person choose a chat. Interrupted: none was chosen."""
    from dflash_local.ui.tui.chats import ChatsApp

    draw_plainly()
    entry = ChatsApp(folder).run()
    if entry is None:
        raise Interrupted("no chat was chosen")
    return entry


def show(run: Any, chat: ChatSession, greeting: str) -> int:
    """Run the screen to its end and give the model back; DFlashError where the pair cannot be loaded or is broken."""
    draw_plainly()
    try:
        code = run(chat, greeting)
        if chat.broken:
            raise EngineError("the session broke", "dflash doctor looks at this machine")
        return int(code)
    finally:
        chat.close()
