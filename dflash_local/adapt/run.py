"""Adapting a drafter to its user's texts: the target answers, the drafter learns, held-out acceptance decides.

The target is in memory for its texts, and again for the measurement of what was learnt; not while the drafter trains.
What was done stays in a folder, so that an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from dflash_local.adapt.asked import AskedPrompt, of_conversations, of_itself, with_its_own
from dflash_local.adapt.dialogues import Dialogues, repeat_start
from dflash_local.adapt.drafter_file import LearningDrafter, new_module, read_fc, read_module, trainable
from dflash_local.adapt.gain import Gain, HeldOut, gain, gains, refusal
from dflash_local.adapt.held_out import REPLY, Measured, chosen, measure
from dflash_local.adapt.kept_texts import (
    DIALOGUES,
    KeptTexts,
    TargetTables,
    WrittenText,
    keep_tables,
    keep_texts,
    stored,
)
from dflash_local.adapt.trainer import Recipe, Trainer, train
from dflash_local.adapt.windows import pack
from dflash_local.bench import provenance
from dflash_local.bench.fidelity import give_back
from dflash_local.bench.report import Progress
from dflash_local.bench.trial import scored_target, write
from dflash_local.catalog.bundled import Pair
from dflash_local.check.record import digest, pair_files
from dflash_local.engine.session import Session
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.json_text import parse_json
from dflash_local.load_config import LoadConfig
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import open_drafter
from dflash_local.request import Limits, Request
from dflash_local.store.adaptations import SAME, Adaptation, metadata, read
from dflash_local.store.atomic import make_private, write_atomic
from dflash_local.transcripts.source_conversation import SourceConversation

SHORTEST = 4  # tokens of a reply that is learnt from
LEAST = 1000  # tokens of replies that are learnt from; a quarter of that is held out
WRITING = 1 / 3  # of the minutes at most are for the texts
LOOKS = 10  # at the held-out texts while it learns
RECIPES = {  # by the device's type; ``length`` is what is kept of a text, its reply the last of it
    "cpu": Recipe(windows=1, length=512, anchors=32, rounds=1, matrix_rate=3e-3, norm_rate=1e-3, warm_up=10),
    "cuda": Recipe(
        windows=8, length=2048, anchors=128, rounds=1, at_once=1, matrix_rate=3e-3, norm_rate=1e-3, warm_up=10
    ),
}
A_MINUTE, MOST_TOKENS = 2**14, 2**20  # of the texts that are kept, for each minute and in all
LEARN, HELD, PROMPTS = "learn", "held", "held.json"
DONE, STATE, CURVE, BEST = "texts.json", "state.pt", "curve.json", "best.safetensors"
Open = Callable[[Pair], AbstractContextManager[Session]]


class Learnt(NamedTuple):
    """How it ended: facts as ``store.adaptations`` keeps them, and why nothing is kept, empty where it is."""

    facts: dict[str, Any]
    refusal: str


def adapt(
    pair: Pair,
    conversations: Sequence[SourceConversation] | None,
    minutes: float,
    config: LoadConfig,
    folder: Path,
    kept: Path,
    open_pair: Open,
    progress: Progress,
) -> Learnt:
    """Train a pair's drafter, and keep what it learnt where that pays.

    Args:
        conversations: None: the target writes its own. config: how the pair is loaded. folder: where runs leave what a
            later one goes on with. kept: the file of what was learnt. open_pair: loads it so.

    Raises:
        UsageError: there is too little text. PairError: such a drafter is not trained. OSError: a file cannot be
            written. DFlashError: see the engine.
    """
    trained_drafter(pair)  # refused before anything is loaded
    work, same = work_folder(pair, folder), _same(pair, conversations, minutes, config)
    if not (work / DONE).is_file() or (work / SAME).read_text(encoding="utf-8") != same:
        shutil.rmtree(work, ignore_errors=True)
        make_private(work)
        (work / SAME).write_text(same, encoding="utf-8")  # nothing is gone on with before DONE is there
        with open_pair(pair) as session:
            try:
                _prepare(session, pair, conversations, minutes, work, progress)
            except UsageError:  # too little text: nothing to go on with
                shutil.rmtree(work)
                raise
        del session
        give_back()
    told = parse_json((work / DONE).read_text(encoding="utf-8"))
    _train(pair, work, minutes * 60 - told["seconds"], torch.device(told["device"]), progress)
    prompts = [AskedPrompt(*each) for each in parse_json((work / PROMPTS).read_text(encoding="utf-8"))]

    def measured(adaptation: Adaptation) -> Measured:
        with open_pair(replace(pair, adaptation=adaptation)) as session:
            found = measure(session, prompts, progress)
        del session
        give_back()
        return found

    after = measured(Adaptation(work / BEST, {"made": "", "id": "in trial"}))
    before = Measured([HeldOut(*each) for each in told["before"][0]], told["before"][1])
    both = before.conversations, after.conversations
    total, kinds = gain(*both), gains(*both)
    why_not, files = refusal(total, kinds), digest(pair_files(pair))
    earlier = None if why_not else _earlier(kept, files)
    if earlier is not None:
        why_not = _earlier_refusal(earlier, gain(before.conversations, measured(earlier).conversations), total)
    data = (work / BEST).read_bytes()
    facts = {
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "id": hashlib.sha256(data).hexdigest()[:6],
        "files": files,
        **_whose(pair),
        "minutes": minutes,
        "texts": told["amounts"],
        "curve": parse_json((work / CURVE).read_text(encoding="utf-8")),
        "total": total._asdict(),
        "kinds": {kind: each._asdict() for kind, each in kinds.items()},
        "tokens_per_s": [before.tokens_per_s, after.tokens_per_s],
        "versions": provenance.versions(),
    }
    if not why_not:
        write_atomic(kept, save(load(data), metadata(facts)))
    shutil.rmtree(work, ignore_errors=True)  # not before: a run that was ended here is measured again, not learnt again
    return Learnt(facts, why_not)


def _earlier(kept: Path, files: str) -> Adaptation | None:
    """Return what was kept of the same files before; None where there is nothing that a load would take."""
    try:
        found = read(kept)
    except CheckpointError:
        return None
    return found if found is not None and found.facts["files"] == files else None


def _earlier_refusal(earlier: Adaptation, its: Gain, total: Gain) -> str:
    """Return why what was kept before stays; empty where this does more for the same texts."""
    if total.after > its.after:
        return ""
    return f"what is kept already ({earlier.label}) gives {its.after:.2f} tokens a cycle here, this {total.after:.2f}"


def trained_drafter(pair: Pair) -> Checkpoint:
    """Return a pair's drafter. PairError: such a drafter is not trained."""
    assert pair.drafter is not None
    files = open_drafter(pair.drafter)
    trainable(files)
    return files


def work_folder(pair: Pair, folder: Path) -> Path:
    """Return where a run for this pair leaves in ``folder`` what a later one goes on with."""
    return folder / digest({"pair": pair.drafting_name})


def _same(pair: Pair, conversations: Sequence[SourceConversation] | None, minutes: float, config: LoadConfig) -> str:
    """Return as JSON what must be the same for a run to go on with what an earlier one left."""
    texts = None if conversations is None else [each.digest for each in conversations]
    how = {"load": asdict(config), "versions": provenance.versions()}
    facts = digest({"files": digest(pair_files(pair)), "texts": texts, "minutes": minutes, **how})
    return json.dumps({**_whose(pair), "facts": facts})


def _whose(pair: Pair) -> dict[str, str]:
    """Return what ``adaptations.of_targets`` finds it by."""
    return {"pair": pair.name, "target": str(pair.target.resolve())}


def kept_tokens(minutes: float) -> int:
    """Return of how many tokens at most texts and features are kept."""
    return min(MOST_TOKENS, round(A_MINUTE * minutes))


def _prepare(
    session: Session,
    pair: Pair,
    conversations: Sequence[SourceConversation] | None,
    minutes: float,
    work: Path,
    progress: Progress,
) -> None:
    """Have the target answer, keep what it says with its taps, and measure the drafter as it was published."""
    began, target = time.monotonic(), scored_target(session)
    seconds, room, longest = minutes * 60 * WRITING, kept_tokens(minutes), RECIPES[target.device.type].length
    files = trained_drafter(pair)
    if conversations is None:
        asked = of_itself(session)
    else:
        asked = with_its_own(session, of_conversations(session, conversations, REPLY))
    texts: dict[str, list[WrittenText]] = {LEARN: [], HELD: []}
    held_out: list[AskedPrompt] = []
    for text, prompt in _answered(session, asked, began, seconds, progress):
        room -= min(len(text.ids), longest)
        if room < 0:
            break
        texts[HELD if prompt.held_out else LEARN].append(text)
        held_out += [prompt] * prompt.held_out
    amounts = {name: sum(len(text.ids) - text.answer for text in own) for name, own in texts.items()}
    if amounts[LEARN] < LEAST or amounts[HELD] < LEAST // 4:
        more = "more --minutes" if conversations is None else "more text, more --minutes, or take --from self"
        raise UsageError(
            f"too little text: replies of {amounts[LEARN]:,} tokens to learn from and {amounts[HELD]:,} held out",
            f"{LEAST:,} and {LEAST // 4:,} are needed: give {more}",
        )
    fc = read_fc(files).to(target.device, target.dtype)
    for name, own in texts.items():
        keep_texts(work / name, own, longest, target, fc, progress)
    del fc
    with torch.device("meta"):  # nothing of it is asked but what it borrows
        module = new_module(files)
    ids = {each for own in texts.values() for text in own for each in text.ids}
    keep_tables(work, {*ids, module.config.mask_token_id}, target, module, files)
    prompts = chosen(held_out)
    write_atomic(work / PROMPTS, json.dumps(prompts))
    told = {
        "amounts": {**amounts, "replies": sum(map(len, texts.values()))},
        "device": str(target.device),
        "seconds": min(seconds, time.monotonic() - began),
        "before": measure(session, prompts, progress),
    }
    write_atomic(work / DONE, json.dumps(told))


def _answered(
    session: Session, asked: Iterable[AskedPrompt], began: float, seconds: float, progress: Progress
) -> Iterator[tuple[WrittenText, AskedPrompt]]:
    """Yield the target's greedy replies and what they answer, of the kind that they are, as long as there is time."""
    for number, prompt in enumerate(asked, 1):
        gone = time.monotonic() - began
        if gone > seconds:
            return
        progress(f"the target answers, reply {number}", gone / seconds)
        reply = write(session, Request(prompt_ids=prompt.ids, limits=Limits(REPLY)))
        kept = repeat_start(reply.ids)
        if kept >= SHORTEST:
            text = WrittenText((*prompt.ids, *reply.ids[:kept]), len(prompt.ids))
            yield text, prompt._replace(kind="code") if "```" in reply.text else prompt


def _train(pair: Pair, work: Path, seconds: float, device: torch.device, progress: Progress) -> None:
    """Train by the clock, from where an earlier run was; leaves what was best in the held-out texts."""
    tables = TargetTables.load(work, device)
    dialogues = {name: Dialogues.load(work / name / DIALOGUES) for name in (LEARN, HELD)}
    learn, held = (KeptTexts.open(work / name, tables, len(own.ids)) for name, own in dialogues.items())
    files = trained_drafter(pair)
    drafter = LearningDrafter(files, read_module(files), learn.dtype)
    recipe = replace(RECIPES[device.type], seconds=seconds)
    trainer = Trainer(learn, drafter.module.to(device), recipe)
    curve: list[dict[str, float]] = []
    if (work / STATE).is_file():
        trainer.load(work / STATE)
        curve = parse_json((work / CURVE).read_text(encoding="utf-8"))
    rows = math.ceil(len(dialogues[HELD].ids) / recipe.length)
    unseen = [batch for _, batch in islice(pack(dialogues[HELD], 1, recipe.length, 0), rows)]

    def evaluate(trainer: Trainer, passes: float, loss: float) -> None:
        length = trainer.measure(held, unseen)
        if all(length > point["held_out"] for point in curve):
            write_atomic(work / BEST, save(drafter.tensors(trainer.average)))
        curve.append({"minutes": round(trainer.used / 60, 3), "passes": round(passes, 2), "held_out": round(length, 3)})
        progress(f"learning, held-out {length:.2f} tokens a cycle", min(1.0, trainer.used / seconds))
        write_atomic(work / CURVE, json.dumps(curve))
        write_atomic(work / STATE, stored(trainer.state()))

    if not curve:
        evaluate(trainer, 0.0, 0.0)
    if trainer.used < seconds:
        batches = pack(dialogues[LEARN], recipe.windows, recipe.length, trainer.updates)
        train(trainer, batches, seconds, seconds / LOOKS, evaluate)
