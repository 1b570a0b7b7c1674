"""What ``bench``, ``certify`` and ``check`` do beside the model: each loads what it measures and returns what it found.

``app.local_process.measure`` calls one of these in the engine's process, as ``partial(function, ...)``, with its
settings and who is told how far it is. The command that asked needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dflash_local.app.adaptation_plan import adaptation_folders
from dflash_local.app.load_planning import planned_peak
from dflash_local.app.loading import engine_session, load_steps_of, named_when_missing
from dflash_local.app.notices import Notify, progress_of
from dflash_local.catalog.bundled import Pair
from dflash_local.errors import DoesNotFitError
from dflash_local.events import Notice
from dflash_local.load_config import FUSED, LoadConfig
from dflash_local.request import fresh_seed
from dflash_local.settings import Settings, quiet_libraries
from dflash_local.store.kept import take_unkept

if TYPE_CHECKING:
    from dflash_local.app.adapting import TextSource
    from dflash_local.bench.prompts import Prompt
    from dflash_local.bench.report import Found
    from dflash_local.check.record import Report
    from dflash_local.engine.session import Session


def bench_pair(
    pair: Pair,
    load: LoadConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    block_size: int | None,
    thinking: bool,
    user: Settings,
    notify: Notify,
) -> Found:
    """Write every reply with and without drafts."""
    with engine_session(pair, load, user, notify) as session:
        from dflash_local.bench import speed

        options = speed.SpeedOptions(max_new_tokens, block_size, thinking)
        found = speed.compare(session, prompts, options, progress_of(notify))
        return speed.presented(pair, session.facts, found, options)


def bench_fidelity(
    pair: Pair,
    original: Pair,
    load: LoadConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    thinking: bool,
    user: Settings,
    notify: Notify,
) -> Found:
    """Load the original, then the quantised target, both without a drafter, and tell how far apart they are."""
    alone = replace(load, draft=False)
    engine = FUSED if load.needs_fused else load.engine  # one for both
    plain = replace(alone, quantize=None, kv_cache="auto", engine=engine)
    with engine_session(original, plain, user, notify) as session:
        from dflash_local.bench import fidelity

        texts = fidelity.score_original(session, prompts, max_new_tokens, thinking, progress_of(notify))
        before = session.facts
    del session
    fidelity.give_back()
    with engine_session(pair, alone, user, notify) as session:
        found = fidelity.distances(session, texts, progress_of(notify))
        return fidelity.presented(pair, session.facts, original, before, texts, found)


def certify_pair(
    pair: Pair,
    load: LoadConfig,
    prompts: Sequence[Prompt],
    thinking: bool,
    user: Settings,
    notify: Notify,
    max_new_tokens: int = 128,
    block_sizes: Sequence[int] = (),
    planted: bool = False,
    seed: int | None = None,
) -> Found:
    """Compare replies with and without drafting, greedy and sampled. ``block_sizes``: none is the trained one."""
    with engine_session(pair, load, user, notify) as session:
        from dflash_local.bench import certificate, certify
        from dflash_local.bench.trial import prompt_ids

        seed = fresh_seed() if seed is None else seed
        plan = certify.CertifyPlan(
            prompts=tuple(prompt_ids(session, each, thinking) for each in prompts),
            cases=certify.cases(seed),
            block_sizes=tuple(block_sizes) or (session.facts.block_size,),
            max_new_tokens=max_new_tokens,
            planted=planted,
        )
        found = certify.certify(session, plan, progress_of(notify), load_plain=_plain_target(pair, session))
        return certificate.presented(pair, session.facts, prompts, plan, seed, found)


def _plain_target(pair: Pair, session: Session) -> Callable[[], Any] | None:
    """How to load the target once more, as transformers has it, for a session whose engine holds it otherwise."""
    from dflash_local.models.checkpoint import Checkpoint
    from dflash_local.models.load_target import load_target, placement
    from dflash_local.models.target_facts import TargetFacts

    if session.facts.engine != "fused":
        return None
    files = Checkpoint.open(pair.target)
    facts = TargetFacts.from_checkpoint(files).quantized(session.facts.load.quantize)
    where = placement(session.facts.device, session.facts.dtype)
    return lambda: load_target(files, facts, where)


def check_pair(pair: Pair, load: LoadConfig, again: bool, user: Settings, notify: Notify) -> Report:
    """Return what was found before where nothing speaks against it, else what is found now."""
    quiet_libraries()
    from dflash_local.check import record

    path = record.path_of(user.cache_dir, record.facts_of(pair, load))
    if again:
        load_steps_of(load, user).forget()  # a load that ended the program may be tried as it was asked for
    before = None if again else record.remembered(path)
    if before is not None and before.good:
        return before
    with engine_session(pair, load, user, notify) as session:
        from dflash_local.check import run

        planned = planned_peak(pair, session.facts.load, user)
        report = run.checked_now(session, pair, path, planned, progress_of(notify))
    warn_of_unkept(notify)
    return report


def probe_drafter(pair: Pair, load: LoadConfig, user: Settings, notify: Notify) -> Report:
    """Find out whether the drafter serves the target; the first use of a fine-tune knows it from then on."""
    quiet_libraries()
    with engine_session(pair, load, user, notify) as session:
        from dflash_local.check import run

        path = run.probe_path(pair, load, user.cache_dir)
        report = run.probed_now(session, pair, path, progress_of(notify))
    warn_of_unkept(notify)
    return report


def adapt_pair(
    pair: Pair, load: LoadConfig, source: TextSource, minutes: float, user: Settings, notify: Notify
) -> Found:
    """Have a pair's drafter learn; what it learnt is kept where held-out acceptance says so.

    Raises:
        UsageError: there is too little text, or no folder to keep anything in.
    """
    work, kept = adaptation_folders(pair, user)
    published = replace(load, adaptation=False)
    with named_when_missing():
        from dflash_local.adapt import report, run
    opened = partial(engine_session, load=published, user=user, notify=notify)
    try:
        learnt = run.adapt(pair, source.conversations, minutes, published, work, kept, opened, progress_of(notify))
    except OSError as error:
        what = f"{error.filename or work} cannot be written: {error.strerror}"
        raise DoesNotFitError(what, "make room there and run it again: it goes on where it was") from error
    return report.presented(pair, learnt, source.told)


def warn_of_unkept(notify: Notify) -> None:
    """Say what was found out and could not be kept."""
    lost = take_unkept()
    if lost:
        notify(Notice(lost, "warning"))


def try_kernels(pair: Pair, load: LoadConfig, again: bool, user: Settings, notify: Notify) -> Found:
    """Load the pair once: its kernels on this card are compiled, tried and chosen, and every later load finds them."""
    quiet_libraries()
    with named_when_missing():
        from dflash_local.kernels import kernel_record
    if again:
        kernel_record.forget_all()
    begin = time.monotonic()
    with engine_session(pair, load, user, notify) as session:
        from dflash_local.check.kernels import presented

        return presented(pair.name, session.facts, kernel_record.used_records(), time.monotonic() - begin)
