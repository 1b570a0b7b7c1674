"""Training on a target's own text: masks, labels, the schedule, the walk, and files that the program reads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dflash_local.adapt.dialogues import Dialogues
from dflash_local.adapt.drafter_file import read_module
from dflash_local.adapt.trainer import Recipe, Trainer, labels, pick_anchors
from dflash_local.adapt.windows import Windows, pack
from dflash_local.drafters.dflash.reference import DrafterModel
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.pair import open_drafter
from dflash_local.models.shared_windows import attend, dense_mask, drafted, same_text
from tests.families import save_model
from tools.train.acceptance import Reply, Walker, cycles
from tools.train.frozen_target import FrozenTarget
from tools.train.own_export import config_json, new_drafter, save

CPU = torch.device("cpu")
TAPS = [1, 2]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder: Path = tmp_path_factory.mktemp("target")
    save_model("llama", folder, rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    return FrozenTarget.load(folder, "cpu")


def dialogues(amount: int = 40) -> Dialogues:
    """Answers that count upwards from the question's last id."""
    draw = np.random.default_rng(0)
    length, answer = draw.integers(20, 60, amount), draw.integers(4, 10, amount)
    ids = np.concatenate([(draw.integers(0, 30) + np.arange(size)) % 40 for size in length])
    return Dialogues(ids, ids, length, answer)


def windows(rows: int = 2, length: int = 96) -> Windows:
    return next(pack(dialogues(), rows, length, 1))[1]


def test_windows_hold_whole_dialogues_side_by_side() -> None:
    found = dialogues()
    found = replace(found, ids=np.arange(len(found.ids)))
    batch = next(pack(found, 2, 96, 1))[1]
    starts = np.concatenate([[0], np.cumsum(found.length)[:-1]])
    for row in range(2):
        for text in range(int(batch.texts[row].max()) + 1):
            here = batch.texts[row] == text
            ids = batch.ids[row, here].tolist()
            index = next(i for i, at in enumerate(starts) if found.ids[at : at + len(ids)].tolist() == ids)
            assert batch.places[row, here].tolist() == list(range(len(ids)))
            assert batch.own[row, here].tolist() == [n >= found.answer[index] for n in range(len(ids))]
    made = pack(dialogues(), 4, 96, 1)
    assert max(next(made)[0] for _ in range(12)) > 1  # it goes on behind the last dialogue


def test_a_window_sees_what_its_texts_see_alone(target: FrozenTarget) -> None:
    batch = windows()
    mask = dense_mask(same_text(batch.texts), 2, 96, 96, CPU)
    taps = target.taps(batch.ids, batch.places, mask, TAPS)
    here = batch.texts[1] == 1
    ids = batch.ids[1:, here]
    causal = torch.ones(ids.shape[1], ids.shape[1]).tril()[None, None] > 0
    alone = target.taps(ids, torch.arange(ids.shape[1])[None], causal, TAPS)
    torch.testing.assert_close(taps[1:, here], alone, atol=1e-5, rtol=1e-4)


def test_flex_attention_equals_the_dense_mask() -> None:
    texts, anchors = torch.arange(128).expand(2, -1) // 50, torch.tensor([[7, 60, 101, 126], [1, 49, 50, 99]])
    rule = drafted(texts, anchors, 8)
    q, k, v = torch.randn(2, 6, 32, 16), torch.randn(2, 2, 160, 16), torch.randn(2, 2, 160, 16)
    blocks = create_block_mask(rule, 2, None, 32, 160, device="cpu")
    torch.testing.assert_close(attend(q, k, v, blocks), attend(q, k, v, dense_mask(rule, 2, 32, 160, CPU)))


def test_anchors_are_followed_by_their_answer() -> None:
    batch = windows()
    anchors, counts = pick_anchors(batch, 40, None, torch.Generator().manual_seed(1))
    rows = torch.arange(2).unsqueeze(1)
    assert (batch.own[rows, anchors] & (batch.texts[rows, anchors] == batch.texts[rows, (anchors + 1) % 96]))[
        counts
    ].all()
    assert all(len(set(row.tolist())) == 40 for row in anchors)


def test_labels_end_with_the_text_and_behind_the_first_disagreement() -> None:
    ids = torch.arange(20).unsqueeze(0)
    best, texts = ids.clone(), (ids >= 12).long()
    best[0, 7] = 99
    batch = Windows(ids, best, ids, texts, torch.ones_like(ids).bool(), ids)
    wanted, valid = labels(batch, torch.tensor([[4, 9, 15]]), 7)
    assert wanted[0, 0, :3].tolist() == [5, 6, 99] and valid[0, 0].tolist() == [True] * 3 + [False] * 4
    assert valid[0, 1].tolist() == [True] * 2 + [False] * 5  # the next text begins
    assert valid[0, 2].tolist() == [True] * 4 + [False] * 3  # the window ends


def trainer(target: FrozenTarget, seconds: float = 1e9) -> Trainer:
    config = config_json(target, layers=2, taps=TAPS, block=8, mask_id=39)
    recipe = Recipe(windows=2, length=96, anchors=12, warm_up=5, seconds=seconds)
    return Trainer(target, new_drafter(config, target.head.shape[1], 1), recipe)


def test_twenty_steps_lower_the_loss(target: FrozenTarget) -> None:
    made, batches = trainer(target), pack(dialogues(), 2, 96, 1)
    losses = [float(made.step(next(batches)[1])[0]) for _ in range(20)]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert made.updates == 40


def test_training_goes_on_where_it_was_saved(target: FrozenTarget, tmp_path: Path) -> None:
    first, batches = trainer(target), pack(dialogues(), 2, 96, 1)
    for _, batch in itertools.islice(batches, 3):
        first.step(batch)
    torch.save(first.state(), tmp_path / "state.pt")
    second = trainer(target)
    second.load(tmp_path / "state.pt")
    _, batch = next(batches)
    assert torch.equal(first.step(batch), second.step(batch))
    for left, right in zip(first.average.parameters(), second.average.parameters(), strict=True):
        assert torch.equal(left, right)


def test_walk_counts_cycles() -> None:
    hits = torch.zeros(10, 7, dtype=torch.bool)
    assert cycles(hits) == 10
    hits[0, :3] = True  # three drafts and the bonus: on to the fifth id
    hits[4, 1:] = True  # a wrong first draft ends the cycle
    hits[5] = True
    assert cycles(hits) == 3  # 0, 4, 5; all seven and the bonus reach beyond the end
    assert cycles(hits[:, :2]) == 6  # 0, 3, 4, 5, 8, 9


def test_walk_is_what_the_programs_drafter_proposes(target: FrozenTarget, tmp_path: Path) -> None:
    config = config_json(target, layers=2, taps=TAPS, block=8, mask_id=39)
    drafter = new_drafter(config, target.head.shape[1], 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    prompt, reply = tuple(range(6)), tuple((7 * n) % 40 for n in range(20))
    for codes in (False, True):
        folder = tmp_path / str(codes)
        save(drafter, config, folder, codes=codes)
        running = DrafterModel.load(Checkpoint.open(folder), device="cpu", dtype=torch.float32)
        ids = torch.tensor([*prompt, *reply])
        causal = torch.ones(len(ids), len(ids)).tril()[None, None] > 0
        taps = target.taps(ids[None], torch.arange(len(ids))[None], causal, TAPS)[0]
        drafts = []
        for anchor in range(len(prompt), len(ids) - 1):
            cache = running.new_cache()
            running.write_context(cache, taps[:anchor], 0)
            block = torch.full((8,), 39)
            block[0] = ids[anchor]
            hidden = running.draft_hidden(cache, target.embed(block), anchor)
            drafts.append((hidden[1:] @ target.head.t()).argmax(-1))
        # A reply that follows the first of these drafts: hits and misses both occur.
        walker = Walker(target, [Reply("code", prompt, reply), Reply("list", prompt, reply[:9])])
        stored = read_module(open_drafter(folder))
        known = torch.tensor([*reply, *[-1] * 8])
        wanted = torch.stack([row == known[n + 1 : n + 8] for n, row in enumerate(drafts)])
        assert torch.equal(walker.hits(stored)[1], wanted)
        told = walker.acceptance(stored)
        b8 = told["b8"]
        assert isinstance(b8, dict) and b8["mean"] == pytest.approx((b8["code"] + b8["list"]) / 2, abs=1e-3)
    assert (tmp_path / "True/model.safetensors").stat().st_size < 0.8 * (
        tmp_path / "False/model.safetensors"
    ).stat().st_size
