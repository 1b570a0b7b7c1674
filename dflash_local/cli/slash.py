"""The commands inside a chat: what each is called, says and does to the ``Talk``."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_local.cli.console import Console
from dflash_local.cli.reply import figures
from dflash_local.cli.resolve import resolve
from dflash_local.cli.talk import Talk, histogram
from dflash_local.cli.thinking import thinking_notice
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.service.chat_options import SAMPLING, SETTABLE, parse_setting
from dflash_local.service.conversation import Conversation
from dflash_local.store import export, history
from dflash_local.store.records import Turn, encode_chat


class Quit(Exception):
    """The user wants to leave."""


class CommandContext:
    """A talk and what its commands need besides: where chats lie, and which names are its own.

    Attributes:
        show_turns: /load prints what was said; a screen shows it itself.
    """

    def __init__(self, talk: Talk, folder: Path | None) -> None:
        self.talk = talk
        self.folder = folder
        self.saved: set[str] = set()
        self.show_turns = True

    @property
    def console(self) -> Console:
        """Where the commands answer."""
        return self.talk.console

    @property
    def conversation(self) -> Conversation:
        """What the commands change."""
        return self.talk.conversation


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command; ``act`` gets the context and the rest of the line."""

    usage: str
    help: str
    act: Callable[[CommandContext, str], None]


def execute(line: str, context: CommandContext) -> None:
    """Run one line that begins with a slash.

    Raises:
        Quit: it was /quit. UsageError: no such command, or a bad argument. DFlashError: it failed.
    """
    word, _, argument = line.partition(" ")
    name = ALIASES.get(word.lower(), word.lower())
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "/help shows the commands"
        raise UsageError(f"unknown command {word}", f"{hint} A message may begin with // instead of /")
    COMMANDS[name].act(context, argument.strip())


def _help(context: CommandContext, _argument: str) -> None:
    for command in COMMANDS.values():
        context.console.note(f"  {command.usage:24s} {command.help}")
    context.console.note('  """                      begins and ends a message of several lines')
    context.console.note("  Ctrl-C                   stops the reply; twice, or Ctrl-D, leaves")


def _model(context: CommandContext, argument: str) -> None:
    words = _words(argument)
    if not words:
        facts = context.conversation.service.facts
        context.console.note(f"{context.talk.pair.label}: {facts.loaded_as}; block {facts.block_size}")
        context.console.note("/model NAME changes it, dflash models lists names; or /model FOLDER DRAFTER_FOLDER")
        return
    if len(words) > 2:
        raise UsageError("too many words", "/model NAME, or /model FOLDER DRAFTER_FOLDER")
    talk = context.conversation
    drafter = words[1] if len(words) == 2 else None
    pair = resolve(words[0], drafter, context.talk.user, context.console, draft=talk.options.mode == "dflash")
    if pair.drafter is None and context.conversation.options.mode == "dflash":
        raise UsageError(f"no drafter is known for {pair.name}", "/model FOLDER DRAFTER_FOLDER, or first /mode ar")
    context.conversation.change_model(pair)
    context.console.note(f"now talking to {context.talk.pair.label}")
    notice = thinking_notice(pair, talk.options.thinking)
    if notice:
        context.console.warn(notice)


def _check(context: CommandContext, _argument: str) -> None:
    checks = context.conversation.service.facts.checks
    for line in (line for verdict in checks for line in verdict.lines):
        context.console.note(line)
    if not checks:
        name = context.talk.pair.name
        context.console.note(f"not checked (a pair is at its first load on a CUDA card); dflash check {name} checks it")


def _mode(context: CommandContext, argument: str) -> None:
    modes: dict[str, Mode] = {"dflash": "dflash", "ar": "ar"}
    if argument:
        if argument not in modes:
            raise UsageError(f"unknown mode {argument!r}", "/mode dflash or /mode ar")
        if argument == "dflash" and context.conversation.service.facts.drafter is None:
            raise UsageError(f"{context.talk.pair.name} was loaded without a drafter", "/model FOLDER DRAFTER_FOLDER")
        context.conversation.options.mode = modes[argument]
    context.console.note(f"mode {context.conversation.options.mode}")


def _set(context: CommandContext, argument: str) -> None:
    talk = context.conversation
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        values = {key: getattr(talk.sampling, key) for key in SAMPLING}
        values["seed"] = "random" if values["seed"] is None else values["seed"]
        values |= {"max_new_tokens": talk.options.limits.max_new_tokens, "stop": list(talk.options.limits.stop)}
        values |= {
            "block_size": talk.options.block_size or "auto",
            "thinking": "on" if talk.options.thinking else "off",
        }
        for key, shown in values.items():
            context.console.note(f"  {key:20s} {shown}")
        return
    if name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of: {', '.join(SETTABLE)}"
        raise UsageError(f"unknown setting {name!r}", hint)
    if not value.strip():
        raise UsageError(f"/set {name} needs a value", "/set shows the values there are")
    for changed, new in parse_setting(talk.options, name, value.strip()).items():
        setattr(talk.options, changed, new)
    context.console.note(f"{name} {value.strip()}")


def _system(context: CommandContext, argument: str) -> None:
    if argument:
        context.conversation.set_system("" if argument in ("off", '""') else argument)
    context.console.note_text(f"system message: {context.conversation.options.system or 'none'}")


def _stats(context: CommandContext, _argument: str) -> None:
    last, talk = context.conversation.last, context.conversation
    if last is None:
        raise UsageError("there is no reply yet")
    stats = last.stats
    context.console.note(figures(last))
    context.console.note(
        f"mode {stats.mode}, block {stats.block_size}, seed {stats.seed}, first token after {stats.ttft_s:.3f} s; "
        f"draft {stats.draft_s:.3f} s, verify {stats.verify_s:.3f} s, other {stats.other_s:.3f} s"
    )
    if stats.acceptance_lengths:
        shares = ", ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
        context.console.note(f"accepted per position: {shares}")
        context.console.note("cycles by acceptance length:")
        for line in histogram(last, "█" if context.console.can_show("█") else "#"):
            context.console.note(line)
    tokens = sum(reply.usage.completion_tokens for reply in talk.replies)
    context.console.note(f"this session: {len(talk.replies)} replies, {tokens} tokens")


def _regen(context: CommandContext, _argument: str) -> None:
    context.talk.regenerate()


def _save(context: CommandContext, argument: str) -> None:
    if not argument:
        raise UsageError("/save needs a name")
    if not context.conversation.turns:
        raise UsageError("there is nothing to save yet")
    chat = encode_chat(context.talk.pair.name, context.conversation.options.system, context.conversation.turns)
    path = history.save(context.folder, argument, chat, replace=argument in context.saved)
    context.saved.add(argument)
    context.console.note(f"saved: {path}")


def _load(context: CommandContext, argument: str) -> None:
    if not argument:
        known = history.names(context.folder)
        for line in [f"  {name}" for name in known] or ["there are no chats yet"]:
            context.console.note(line)
        return
    path, chat = history.load(context.folder, argument)
    talk = context.conversation
    talk.take_up(chat)
    talk.recorder.go_on(path)
    if chat.bad_lines:
        context.console.warn(f"{chat.bad_lines} damaged line(s) of {argument} were passed over")
    context.console.note(f"{len(chat.turns)} messages of a chat with {chat.model or 'an unknown model'}")
    for turn in chat.turns if context.show_turns else ():
        _show(context, turn)


def _show(context: CommandContext, turn: Turn) -> None:
    context.console.note(">>> " if turn.role == "user" else "", "dim", end="")
    context.console.note_text(turn.content + (f" [{turn.ending}]" if turn.ending else ""))


def _clear(context: CommandContext, _argument: str) -> None:
    context.conversation.start_over()
    context.console.note("a new conversation")


def _export(context: CommandContext, argument: str) -> None:
    words = _words(argument)
    if len(words) != 1:
        raise UsageError("/export needs one file name", "/export talk.md or /export talk.json")
    path = Path(os.path.expanduser(words[0]))
    export.export(path, context.talk.pair.name, context.conversation.options.system, context.conversation.turns)
    context.console.note(f"written: {path}")


def _quit(_context: CommandContext, _argument: str) -> None:
    raise Quit


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"{argument!r}: {error}", "close the quotes") from error


COMMANDS: dict[str, Command] = {
    "/help": Command("/help", "this list", _help),
    "/model": Command("/model [NAME [DRAFTER]]", "show or change the pair", _model),
    "/check": Command("/check", "what the check of the pair on this card found", _check),
    "/mode": Command("/mode [dflash|ar]", "draft and verify, or one token at a time", _mode),
    "/set": Command("/set [NAME VALUE]", "show or change sampling and limits", _set),
    "/system": Command("/system [TEXT|off]", "show or change the system message", _system),
    "/stats": Command("/stats", "the last reply's figures in full", _stats),
    "/regen": Command("/regen", "the last reply again, with a fresh seed", _regen),
    "/save": Command("/save NAME", "keep this chat under a name", _save),
    "/load": Command("/load [NAME]", "list the chats, or go on with one", _load),
    "/clear": Command("/clear", "begin a new conversation", _clear),
    "/export": Command("/export FILE", "write the chat as .md or .json", _export),
    "/quit": Command("/quit", "leave (/bye, /exit)", _quit),
}
ALIASES = {"/bye": "/quit", "/exit": "/quit", "/q": "/quit", "/?": "/help", "/h": "/help"}
