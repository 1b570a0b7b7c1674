"""``dflash adapt``: has a drafter learn its user's text, and keeps what it learnt where that pays."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from dflash_local.app import measurements
from dflash_local.app.adaptation_plan import plan_adaptation
from dflash_local.app.adapting import CHATS, read_source
from dflash_local.cli import options as opt
from dflash_local.cli.invocation import Invocation
from dflash_local.errors import Interrupted, UsageError
from dflash_local.events import Notice
from dflash_local.load_config import LoadConfig
from dflash_local.request import check_number
from dflash_local.store.adaptations import MOST_BYTES
from dflash_local.tables import amount
from dflash_local.transcripts.read import ReadReport

MINUTES, MOST_MINUTES = 20.0, 1440.0

EXAMPLES = ("dflash adapt smollm2 --from self --minutes 10", "dflash adapt Qwen/Qwen3.5-9B --from chats")


def adapt(
    model: opt.ModelOrDefault = None,
    drafter: opt.Drafter = None,
    source: Annotated[
        str, opt.named("--from", "SOURCE", "chats, self, a folder of transcripts, or a .jsonl of prompts or messages.")
    ] = CHATS,
    minutes: Annotated[float, opt.named("--minutes", "N", "How long it takes, the measurements aside.")] = MINUTES,
    yes: opt.Yes = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
    *,
    load: LoadConfig,
) -> None:
    """Have the drafter learn from your texts: replies stay the same. Kept only where held-out acceptance rises."""
    call = Invocation.begin()
    check_number("--minutes", minutes, 0.1, MOST_MINUTES)
    console, report = call.console, ReadReport()
    pair = call.pair(model or call.default_model(), drafter, load)
    if pair.drafter is None:
        raise UsageError(f"no drafter is known for {pair.name}", "name one with --drafter")
    with console.progress() as line:
        found = read_source(source, call.user, report, line)
    for problem in report.problems:
        console.notify(Notice(problem, "warning"))
    unasked = source == CHATS and not yes
    if unasked and not console.can_ask:
        raise UsageError("nobody can be asked whether your saved chats may be read", "--yes says so")
    plan = call.measure(pair.name, partial(plan_adaptation, pair, load, minutes))
    console.note(f"The drafter of {pair.name} is to learn from {found.told}.")
    console.note(
        f"The target answers all of it again, which takes a third of {minutes:g} minutes at most; the drafter learns "
        f"for the rest. Kept is a file of at most {amount(MOST_BYTES)} without any text; no text leaves this machine."
    )
    console.note(plan.told)
    if unasked and not console.ask("Go on?", default=True):
        raise Interrupted("nothing was learnt")
    content, lines = call.measure(pair.name, partial(measurements.adapt_pair, pair, plan.load, found, minutes))
    console.result({**content, "plan": plan.as_dict()}, lines, as_json)
