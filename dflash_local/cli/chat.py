"""``dflash chat``: from its options to a running conversation."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer

from dflash_local import terminal
from dflash_local.app.examples import examples
from dflash_local.app.server_pairs import sampling_notice
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.screen import application, can_show, pick_chat, show
from dflash_local.cli.server_options import KeptServerOptions, origin
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, SamplingParams
from dflash_local.service.chat_options import MAX_NEW_TOKENS, ChatOptions, merged
from dflash_local.store import history
from dflash_local.store.history import ChatEntry
from dflash_local.store.paths import chats_folder
from dflash_local.tables import wrapped
from dflash_local.ui.plan_text import machine_line

EXAMPLES = ("dflash chat", "dflash chat Qwen/Qwen3.5-9B --variant autoround-int4")


def chat(
    model: opt.ModelOrDefault = None,
    drafter: opt.Drafter = None,
    mode: opt.Mode = opt.ModeChoice.dflash,
    system: opt.System = "",
    max_new_tokens: opt.MaxNewTokens = None,
    *,
    sampling: dict[str, float | int],
    block_size: opt.BlockSize = None,
    think: opt.Think = None,
    plain: Annotated[bool, typer.Option("--plain", help="Line by line, also where a screen could be shown.")] = False,
    continue_: Annotated[bool, typer.Option("--continue", help="Go on with the last chat.")] = False,
    resume: Annotated[
        str | None, opt.named("--resume", "[CHAT]", "Go on with a chat: its name, its title's beginning, or a list.")
    ] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="Keep nothing of this chat on disk.")] = False,
    served: KeptServerOptions,
    debug: opt.Debug = False,
    load: LoadConfig,
) -> None:
    """Talk with a model: a screen on a terminal, else line by line. Sampling as its authors advise."""
    call, load = Invocation.begin(), opt.drafting(load, mode)
    user, console = call.user, call.console
    if user.temperature is not None:
        sampling = {"temperature": user.temperature, **sampling}
    merged(SamplingParams(), sampling)  # an error comes before anything is downloaded or loaded
    limits = Limits(opt.first(max_new_tokens, user.max_new_tokens, MAX_NEW_TOKENS))
    run_screen = application(console) if not plain and can_show(console, user.environ) else None
    entry = taken_up(call, continue_, resume, on_screen=run_screen is not None)
    if model is None and served.url is None and served.program is None and user.model is None and entry is None:
        model = chosen_model(call, load)
    own = entry is not None and model is None and served.url is None
    try:
        source = origin(call, entry.model if entry is not None and own else model, drafter, load, served)
    except UnknownModelError as error:
        if entry is None or not own:
            raise
        other = "dflash chat MODEL --continue, or --resume, goes on with another"
        raise UsageError(f"the chat is with {entry.model}, and no such model is here", other) from error
    pair, load = source.pair, source.load
    options = ChatOptions(
        *(sampling, limits, opt.mode_name(mode), block_size, call.thinks(pair, think), system, user.full_context)
    )
    from dflash_local.app.chat_session import ChatSession
    from dflash_local.cli.repl import repl, show_turns

    if source.models.label and "temperature" not in sampling and (notice := sampling_notice(pair)):
        console.note(notice)
    chosen = "" if model or user.model or served.url is not None or own else " (no MODEL was given)"
    models = source.models if run_screen is None else source.models.without_questions()
    keep = user.history and not no_history and terminal.is_terminal(sys.stdin)  # what a program pipes in is no chat
    session = ChatSession(models, pair, load, options, user, keep=keep)
    taken = session.take_up(entry.name) if entry is not None else ""
    if run_screen is not None:
        raise typer.Exit(show(run_screen, session, taken or greeting(pair, chosen)))
    session.listen(console.notify)
    session.bar = "█" if console.can_show("█") else "#"
    with closing(session):
        with console.progress():
            session.open()
        console.note(f"talking to {pair.label}{chosen}; /help shows the commands, /quit leaves")
        console.note(taken or hint(pair))
        show_turns(session, console)
        repl(session, console)


def taken_up(call: Invocation, last: bool, wanted: str | None, on_screen: bool) -> ChatEntry | None:
    """Return the chat to go on with; None for a new one.

    Raises:
        UsageError: there is no such chat, or nobody can choose one. Interrupted: none was chosen.
    """
    from dflash_local.app import kept_chats

    folder, console = chats_folder(call.user), call.console
    if last and wanted is not None:
        raise UsageError("--continue and --resume are given", "leave one out")
    if last:
        return kept_chats.newest(folder)
    if wanted:
        return kept_chats.chosen(folder, wanted)
    if wanted is None:
        return None
    kept_chats.newest(folder)  # there is one
    if on_screen:
        return pick_chat(folder)
    entries = history.entries(folder)
    if not console.can_ask:
        raise UsageError("--resume needs a chat where nobody can choose one", "give its name or how its title begins")
    for line in kept_chats.listing(entries, console.note_columns):
        console.note(line)
    return entries[console.choose(min(len(entries), kept_chats.SHOWN)) - 1]


def chosen_model(call: Invocation, load: LoadConfig) -> str | None:
    """What somebody at a terminal picks of what this card could run; None without a card, a person or a choice."""
    from dflash_local.app.fitting import machine
    from dflash_local.app.offers import offers

    console = call.console
    where = machine(call.user, device=load.device) if console.can_ask else None
    if where is None or not where.runs_kernels(dense=True):
        return None
    found = offers(call.user, where)
    if not found:
        return None
    console.note(f"no MODEL was given; on {machine_line(where)} these would run:")
    for number, offer in enumerate(found, 1):
        for line in wrapped(f"{number:3d}  {offer.model}: {offer.text}", console.note_columns, 5):
            console.note(line)
    return found[console.choose(len(found)) - 1].model


def greeting(pair: Pair, chosen: str) -> str:
    """What the screen says first; a toy is called one."""
    lines = [f"Talking to {pair.label}{chosen}. F1 shows the keys, / the commands."]
    if pair.toy:
        lines.append("It shows how drafting works, not what a model knows: it was taught a few topics only.")
        lines.append("With a GPU, dflash models lists real pairs and dflash pull gets one.")
    return "\n".join(lines)


def hint(pair: Pair) -> str:
    return f"try: {examples(pair)[-1]}"
