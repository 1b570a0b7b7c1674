"""The plain line chat: reads lines, tells commands from messages, shows replies, and knows what Ctrl-C means."""

from __future__ import annotations

import importlib
import sys

from dflash_local.app.chat_commands import ALIASES
from dflash_local.app.chat_session import ChatSession
from dflash_local.app.reply_text import headline
from dflash_local.cli.console import Console
from dflash_local.cli.reply import print_reply
from dflash_local.errors import DFlashError, EngineError
from dflash_local.service.gathered import Answer

PROMPT = ">>> "
MORE = "... "
FENCE = '"""'


class Quit(Exception):
    """The user wants to leave."""


def repl(chat: ChatSession, console: Console) -> None:
    """Talk until /quit, end of input or Ctrl-C twice; EngineError where the engine is broken then."""
    if console.interactive:
        _offer_line_editing()
    pressed = False  # Ctrl-C at the last prompt
    while True:
        try:
            message = _read_message(console)
            pressed = False
            if message.strip():
                _act(message, chat, console)
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
    fault = chat.service.fault
    if isinstance(fault, EngineError):
        raise EngineError(f"the engine is broken: {fault.message}", fault.hint)


def _act(message: str, chat: ChatSession, console: Console) -> None:
    """Run a command, or show the reply to a message."""
    is_command = message.startswith("/") and not message.startswith("//")
    try:
        answer = _execute(message, chat, console) if is_command else chat.conversation.answer(message.removeprefix("/"))
        if answer is None:
            return
        with answer:
            print_reply(answer, console)
    except DFlashError as error:
        console.error(error)
        return
    if answer.finished is None or answer.turn is None:  # Ctrl-C came before any text
        kept = "the earlier reply stays" if is_command else "your message is taken back"
        console.note(f"nothing came of it, {kept}", "dim")
        return
    if ending := answer.turn.ending:
        console.note(f"[{ending}]", "yellow")
    console.note(headline(answer.finished), "dim")


def _execute(line: str, chat: ChatSession, console: Console) -> Answer | None:
    """Run a command: the line chat's own, or one that every chat has; return the reply that it asks for."""
    word, _, argument = line.partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name == "/quit":
        raise Quit
    if name == "/help":
        _help(chat, console)
    elif name == "/regen":
        answer = chat.conversation.regenerate()
        if answer.request.sampling.greedy:
            console.note("greedy: the reply will be the same; /set temperature 0.7 changes that", "dim")
        return answer
    elif name == "/continue":
        return chat.conversation.continue_reply()
    else:
        with console.progress():
            console.note_text(chat.execute(line))
        if (name == "/load" and argument.strip()) or (name == "/clear" and argument):
            show_turns(chat, console)
    return None


def show_turns(chat: ChatSession, console: Console) -> None:
    """Print the conversation so far."""
    for turn in chat.conversation.turns:
        console.note(PROMPT if turn.role == "user" else "", "dim", end="")
        console.note_text(turn.content + (f" [{turn.ending}]" if turn.ending else ""))


def _help(chat: ChatSession, console: Console) -> None:
    for command in chat.commands.values():
        console.note(f"  {command.usage:24s} {command.help}")
    console.note('  """                      begins and ends a message of several lines')
    console.note("  Ctrl-C                   stops the reply; twice, or Ctrl-D, leaves")


def _read_message(console: Console) -> str:
    """One line, or the lines between two marks of three quotes."""
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
