"""What of a target's own layer is handed to an engine where it drafts beside another drafter."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.bench.trial import go_on, write
from dflash_local.catalog.bundled import Pair, find
from dflash_local.drafters.kinds import LOOKUP, OWN, folder_of
from dflash_local.drafters.mtp.layout import FINAL_NORM, PREFIX
from dflash_local.engine import LoadConfig, load, load_pair, scheduler
from dflash_local.engine.checked_pair import CheckedPair
from dflash_local.engine.costs import record_cycles
from dflash_local.engine.drafter_choice import Chosen, DrafterChoice
from dflash_local.engine.fused_runner import FusedRunner
from dflash_local.errors import CheckpointError, UsageError
from dflash_local.models.fused import target
from dflash_local.request import Limits, Request, SamplingParams, user_request
from tests.engine.test_load import save_drafter
from tests.families import save_model
from tests.gguf_models import GOLDEN
from tests.mtp_checkpoints import add, own_pair, save_target

BOTH = LoadConfig(device="cpu", dtype="float32", mtp=True)
COSTS, OWN_COSTS = {1: 1.0, 2: 1.1, 5: 1.2, 8: 1.3}, {1: 1.0, 2: 1.2, 3: 1.3, 5: 1.6}


class Checked(Exception):
    """Ends a load where an engine would begin."""

    def __init__(self, pair: CheckedPair) -> None:
        self.pair = pair


def own_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The layer and its files, as an engine gets them; None twice where it gets none."""

    def stop(pair: CheckedPair, _progress: object) -> None:
        raise Checked(pair)

    with monkeypatch.context() as patch, pytest.raises(Checked) as caught:
        patch.setattr(load_pair, "load_runner", stop)
        load(pair, BOTH)
    return caught.value.pair.own or (None, None)


def test_a_layer_is_read_as_where_it_drafts_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = save_target("qwen3_5", tmp_path / "target", {"mtp_block_size": 3})
    pair = replace(own_pair(folder), drafter=save_drafter(tmp_path / "drafter"))
    layer, files = own_of(pair, monkeypatch)
    assert (layer.kind, layer.block_size, layer.normed) == (OWN, 3, True)
    assert len(files.tensors) == 15 and all(name.startswith(PREFIX) for name in files.tensors)
    layer, _ = own_of(replace(pair, target_keys={FINAL_NORM: False}), monkeypatch)
    assert not layer.normed
    folder = save_target("qwen3_5", tmp_path / "said", {FINAL_NORM: True})
    layer, _ = own_of(replace(pair, target=folder, target_keys={FINAL_NORM: False}), monkeypatch)
    assert layer.normed, "what config.json says wins"
    add(folder, {"mtp.norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=r"mtp.norm.weight has shape \[3\], expected \[32\]"):
        load(replace(pair, target=folder), BOTH)
    session = load(find("demo-hybrid"), BOTH)
    assert session.facts.load.mtp and not session.facts.notices


@pytest.mark.parametrize("target", ["qwen3_5", "llama", "qwen35.gguf"])
def test_without_a_layer_the_drafter_drafts_alone_and_a_notice_says_so(
    target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = GOLDEN / target if target.endswith("gguf") else save_model(target, tmp_path / target)
    taps = {"mask_token_id": 5, "target_layer_ids": [0], "block_size": 4}
    drafter = save_drafter(tmp_path / "drafter", dflash_config=taps, num_target_layers=None)
    pair = replace(own_pair(folder), drafter=drafter)
    session = load(pair, BOTH)
    assert [text for text in session.facts.notices if "--mtp" in text] == [load_pair.NO_LAYER]
    assert session.facts.drafting and not session.facts.load.mtp
    assert load(pair, replace(BOTH, mtp=False)).facts.notices == session.facts.notices[:-1]


def test_beside_the_layer_itself_or_copies_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = own_pair(save_target("qwen3_5", tmp_path / "target"))
    assert own_of(pair, monkeypatch) == (None, None) and not load(pair, BOTH).facts.notices
    with pytest.raises(UsageError, match="--mtp goes with a drafter") as caught:
        load(replace(pair, drafter=folder_of(LOOKUP)), BOTH)
    assert caught.value.hint == "take --drafter mtp"


class AnyChoice(DrafterChoice):
    """Takes any drafter, any length and any cut."""

    draw = random.Random(5)

    def next(self) -> Chosen:
        super().next()
        drafter = self.draw.randrange(len(self.controls))
        lengths = list(self.controls[drafter].costs)
        cut = self.draw.choice((None, lambda _told: self.draw.choice(lengths)))
        return Chosen(drafter, self.draw.choice(lengths), cut, probe=self.draw.random() < 0.2)


def test_no_reply_runs_a_cycle_that_was_not_recorded_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted by either drafter, cut or not, and plain; behind a short text and a long one."""
    monkeypatch.setattr(scheduler, "DrafterChoice", AnyChoice)
    monkeypatch.setattr(target, "FIRST_BUCKET", 128)
    session, keys = load(find("demo-hybrid"), replace(BOTH, engine="fused")), set[Hashable]()
    runner = session.runner
    assert isinstance(runner, FusedRunner)
    vars(runner).update(costs=COSTS, verify_costs=COSTS, own_costs=OWN_COSTS)
    monkeypatch.setattr(runner._graphs, "run", lambda key, work: (keys.add(key), work()))
    record_cycles(runner)
    recorded, text = set(keys), session.render(user_request("Count from 3 to 17.")).ids
    keys.clear()
    for prompt in (text, text * 12):
        request = Request(prompt_ids=prompt, sampling=SamplingParams(temperature=0.0), limits=Limits(60))
        write(session, request)
        write(session, replace(request, mode="ar"))
    assert keys <= recorded and len(keys) > len(recorded) / 3, (len(keys), len(recorded))


@pytest.mark.parametrize("pair", [("reference", {}), ("fused", {}), ("fused", {"exact": True, "kv_cache": "int8"})])
def test_the_text_is_the_same_whoever_drafts(pair: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both contexts are kept up, behind a chat's second turn and a text that is cut back as well."""
    monkeypatch.setattr(scheduler, "DrafterChoice", AnyChoice)
    engine, options = pair
    session = load(find("demo-hybrid"), replace(BOTH, engine=engine, **options))
    vars(session.runner).update(costs=COSTS, own_costs=OWN_COSTS)
    mtp = drafted = 0
    for sampling in (SamplingParams(), SamplingParams(temperature=0.9, seed=3)):
        first = Request(prompt_ids=session.render(user_request("Count from 3 to 17.")).ids, sampling=sampling)
        first = replace(first, limits=Limits(40), mode="ar")
        expected = write(session, first)
        second = replace(first, prompt_ids=(*first.prompt_ids, *expected.ids[:30], 7, 9))
        third = replace(first, prompt_ids=second.prompt_ids[:25])
        plain = {request: write(session, request).ids for request in (second, third)} | {first: expected.ids}
        session.reset()
        for request in (first, second, third, first):
            reply = go_on(session, replace(request, mode="dflash"))
            assert reply.ids == plain[request]
            mtp, drafted = mtp + reply.stats.mtp_cycles, drafted + len(reply.stats.acceptance_lengths)
    assert 10 < mtp < drafted - 10
