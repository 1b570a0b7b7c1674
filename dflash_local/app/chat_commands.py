"""The commands inside a chat: what each is called, does to the chat and says."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from dflash_local.app import kept_chats
from dflash_local.app.reply_text import details, headline, histogram
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.service.chat_options import SAMPLING, SETTABLE, parse_setting
from dflash_local.settings import FullContext
from dflash_local.store import export, history
from dflash_local.store.records import encode_chat
from dflash_local.tables import counted
from dflash_local.terminal import safe, safe_line

if TYPE_CHECKING:
    from dflash_local.app.chat_session import ChatSession

Act = Callable[["ChatSession", str], str]


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One slash command; ``act`` gets the chat and the rest of the line. Without one it is each screen's own."""

    usage: str
    help: str
    act: Act | None = None


def _lines(*lines: str) -> str:
    """What a command says, each line harmless."""
    return "\n".join(map(safe_line, lines))


def _model(chat: ChatSession, argument: str) -> str:
    named = words(argument)
    if not named:
        facts = chat.service.load()
        return _lines(
            f"{chat.pair.label}: {facts.loaded_as}; block {facts.block_size or '-'}",
            "/model NAME changes it, dflash models lists names; or /model FOLDER DRAFTER_FOLDER",
        )
    if len(named) > 2:
        raise UsageError("too many words", "/model NAME, or /model FOLDER DRAFTER_FOLDER")
    options = chat.conversation.options
    pair = chat.resolve(named[0], named[1] if len(named) == 2 else None)
    if pair.drafter is None and options.mode == "dflash":
        raise UsageError(f"no drafter is known for {pair.name}", "/model FOLDER DRAFTER_FOLDER, or first /mode ar")
    chat.change_model(pair)
    return _lines(f"now talking to {pair.label}")


def _check(chat: ChatSession, _argument: str) -> str:
    checks = chat.service.load().checks
    if not checks:
        name = chat.pair.name
        return _lines(f"not checked (a pair is at its first load on a CUDA card); dflash check {name} checks it")
    return _lines(*(line for verdict in checks for line in verdict.lines))


def _mode(chat: ChatSession, argument: str) -> str:
    modes: dict[str, Mode] = {"dflash": "dflash", "ar": "ar"}
    options = chat.conversation.options
    if argument:
        if argument not in modes:
            raise UsageError(f"unknown mode {argument!r}", "/mode dflash or /mode ar")
        if argument == "dflash" and not chat.service.load().drafting:
            raise UsageError(f"{chat.pair.name} was loaded without a drafter", "/model FOLDER DRAFTER_FOLDER")
        options.mode = modes[argument]
    return _lines(f"mode {options.mode}")


def _set(chat: ChatSession, argument: str) -> str:
    options = chat.conversation.options
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_")
    if not name:
        sampling = chat.conversation.sampling
        values = {key: getattr(sampling, key) for key in SAMPLING}
        values["seed"] = "random" if values["seed"] is None else values["seed"]
        values |= {"max_new_tokens": options.limits.max_new_tokens, "stop": list(options.limits.stop)}
        values |= {"block_size": options.block_size or "auto", "thinking": "on" if options.thinking else "off"}
        values["full_context"] = f"{options.full_context} (or {' or '.join(get_args(FullContext))})"
        return _lines(*(f"  {key:20s} {shown}" for key, shown in values.items()))
    if name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, n=1)
        hint = f"did you mean {close[0]}?" if close else f"one of: {', '.join(SETTABLE)}"
        raise UsageError(f"unknown setting {name!r}", hint)
    if not value.strip():
        raise UsageError(f"/set {name} needs a value", "/set shows the values there are")
    for changed, new in parse_setting(options, name, value.strip()).items():
        setattr(options, changed, new)
    return _lines(f"{name} {value.strip()}")


def _system(chat: ChatSession, argument: str) -> str:
    if argument:
        chat.conversation.set_system("" if argument in ("off", '""') else argument)
    return safe(f"system message: {chat.conversation.options.system or 'none'}")


def _stats(chat: ChatSession, _argument: str) -> str:
    last, replies = chat.conversation.last, chat.conversation.replies
    if last is None:
        raise UsageError("there is no reply yet")
    stats = last.stats
    lines = [headline(last), *details(last)]
    if stats.acceptance_lengths:
        shares = ", ".join(f"{share:.0%}" for share in stats.acceptance_per_position)
        lines += [
            f"accepted per position: {shares}",
            "how often each acceptance length came:",
            *histogram(last, chat.bar),
        ]
    tokens = sum(reply.usage.completion_tokens for reply in replies)
    return _lines(*lines, f"this session: {len(replies)} replies, {tokens} tokens")


def _save(chat: ChatSession, argument: str) -> str:
    if not argument:
        raise UsageError("/save needs a name")
    conversation = chat.conversation
    if not conversation.turns:
        raise UsageError("there is nothing to save yet")
    content = encode_chat(chat.pair.name, conversation.options.system, conversation.turns)
    path = history.save(chat.folder, argument, content, replace=argument in chat.saved)
    chat.saved.add(argument)
    return _lines(f"saved: {path}")


def _title(chat: ChatSession, argument: str) -> str:
    name = chat.conversation.recorder.name
    if name is None:
        raise UsageError(
            "this chat is not kept on disk", "a chat is kept from its first message on; /save NAME keeps it"
        )
    if argument:
        history.rename(chat.folder, name, argument)
    return _lines(f"title: {history.find(chat.folder, name).title}")


def _load(chat: ChatSession, argument: str) -> str:
    if not argument:
        known = kept_chats.listing(history.entries(chat.folder))
        return _lines(*(known or ["there are no chats yet"]), *(["/load NUMBER goes on with one"] if known else []))
    return chat.take_up(kept_chats.chosen(chat.folder, argument).name)


def _clear(chat: ChatSession, argument: str) -> str:
    if argument not in ("", "undo"):
        raise UsageError(f"/clear takes no {argument!r}", "/clear begins anew, /clear undo brings the last one back")
    if argument:
        chat.conversation.undo_start_over()
        return _lines(f"{counted(len(chat.conversation.turns), 'message')} brought back")
    chat.conversation.start_over()
    undo = "; /clear undo brings the last one back until you send a message" if chat.conversation.cleared else ""
    return _lines(f"a new conversation{undo}")


def _export(chat: ChatSession, argument: str) -> str:
    named = words(argument)
    if len(named) != 1:
        raise UsageError("/export needs one file name", "/export talk.md or /export talk.json")
    path = Path(os.path.expanduser(named[0]))
    export.export(path, chat.pair.name, chat.conversation.options.system, chat.conversation.turns)
    return _lines(f"written: {path}")


def words(argument: str) -> list[str]:
    """The words of a command's argument, those in quotes as one.

    Raises:
        UsageError: a quote is not closed.
    """
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"{argument!r}: {error}", "close the quotes") from error


COMMANDS: dict[str, ChatCommand] = {
    "/help": ChatCommand("/help", "this list"),
    "/model": ChatCommand("/model [NAME [DRAFTER]]", "show or change the pair", _model),
    "/check": ChatCommand("/check", "what the check of the pair on this card found", _check),
    "/mode": ChatCommand("/mode [dflash|ar]", "draft and verify, or one token at a time", _mode),
    "/set": ChatCommand("/set [NAME VALUE]", "show or change sampling and limits", _set),
    "/system": ChatCommand("/system [TEXT|off]", "show or change the system message", _system),
    "/stats": ChatCommand("/stats", "the last reply's figures in full", _stats),
    "/regen": ChatCommand("/regen", "the last reply again, with a fresh seed"),
    "/continue": ChatCommand("/continue", "let a reply that was cut off go on"),
    "/save": ChatCommand("/save NAME", "keep this chat under a name", _save),
    "/title": ChatCommand("/title [TITLE]", "show or change this chat's title in the lists", _title),
    "/load": ChatCommand("/load [CHAT]", "list the chats, or go on with one", _load),
    "/clear": ChatCommand("/clear [undo]", "begin a new conversation, or bring the last one back", _clear),
    "/export": ChatCommand("/export FILE", "write the chat as .md or .json", _export),
    "/quit": ChatCommand("/quit", "leave (/bye, /exit)"),
}
ALIASES = {"/bye": "/quit", "/exit": "/quit", "/q": "/quit", "/?": "/help", "/h": "/help"}
