"""``dflash chat``: from its options to a running conversation."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from dflash_local.app.examples import examples
from dflash_local.app.server_pairs import sampling_notice
from dflash_local.catalog.bundled import Pair
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.cli.screen import application, can_show, show
from dflash_local.cli.server_options import KeptServerOptions, origin
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, SamplingParams
from dflash_local.service.chat_options import MAX_NEW_TOKENS, ChatOptions, merged
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
    if model is None and served.url is None and served.program is None and user.model is None:
        model = chosen_model(call, load)
    source = origin(call, model, drafter, load, served)
    pair, load = source.pair, source.load
    options = ChatOptions(sampling, limits, opt.mode_name(mode), block_size, call.thinks(pair, think), system)
    from dflash_local.app.chat_session import ChatSession
    from dflash_local.cli.repl import repl

    if source.models.label and "temperature" not in sampling and (notice := sampling_notice(pair)):
        console.note(notice)
    chosen = "" if model or user.model or served.url is not None else " (no MODEL was given)"
    run_screen = application(console) if not plain and can_show(console, user.environ) else None
    models = source.models if run_screen is None else source.models.without_questions()
    session = ChatSession(models, pair, load, options, user, keep=user.history and not no_history)
    if run_screen is not None:
        raise typer.Exit(show(run_screen, session, greeting(pair, chosen)))
    session.listen(console.notify)
    session.bar = "█" if console.can_show("█") else "#"
    with closing(session):
        with console.progress():
            session.open()
        console.note(f"talking to {pair.label}{chosen}; /help shows the commands, /quit leaves")
        console.note(hint(pair))
        repl(session, console)


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
