"""The plain line chat: reads lines, tells commands from messages, and knows what Ctrl-C means."""

from __future__ import annotations

import importlib
import sys

from dflash_local.cli.console import Console
from dflash_local.cli.slash import CommandContext, Quit, execute
from dflash_local.errors import DFlashError

PROMPT = ">>> "
MORE = "... "
FENCE = '"""'


def repl(context: CommandContext) -> None:
    """Talk until /quit, end of input or Ctrl-C twice.

    Raises:
        EngineError: the session broke; no further reply can come from it.
    """
    console = context.console
    if console.interactive:
        _offer_line_editing()
    pressed = False  # Ctrl-C at the last prompt
    while True:
        try:
            message = _read_message(console)
            pressed = False
            if message.strip():
                _act(message, context)
        except (EOFError, Quit):
            break
        except KeyboardInterrupt:
            if pressed:
                break
            pressed = True
            console.note()
            console.note("Ctrl-C again, Ctrl-D or /quit leaves")
    if console.interactive:
        console.note("bye", "dim")


def _act(message: str, context: CommandContext) -> None:
    try:
        if message.startswith("/") and not message.startswith("//"):
            execute(message, context)
        else:
            context.talk.answer(message[1:] if message.startswith("//") else message)
    except DFlashError as error:
        if context.talk.broken:
            raise
        context.console.error(error)


def _read_message(console: Console) -> str:
    """One line, or the lines between two marks of three quotes.

    Raises:
        EOFError: there is no more.
    """
    line = _read_line(console, PROMPT)
    stripped = line.strip()
    if not stripped.startswith(FENCE):
        return stripped
    lines = [stripped[len(FENCE) :]]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(_read_line(console, MORE))
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def _read_line(console: Console, prompt: str) -> str:
    """A line without its end; the prompt is shown only where somebody types."""
    if console.interactive:
        return input(prompt)
    line = sys.stdin.readline() if sys.stdin is not None else ""
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _offer_line_editing() -> None:
    """Arrow keys, earlier lines and pastes of several lines as one message, where Python was built with them."""
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return
    if "libedit" not in (readline.__doc__ or ""):  # which knows no bracketed paste
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off for its own prompt
