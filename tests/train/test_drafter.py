"""The trainable drafter: same mathematics as the one that runs, no leak, labels that are the target's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import PreTrainedModel

from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.drafter import Drafter
from tools.train.corpus import Batch, build_corpus
from tools.train.drafter import (
    DraftModule,
    block_inputs,
    drafter_loss,
    labels,
    look,
    pick_anchors,
    save_drafter,
    visible,
)
from tools.train.shapes import BLOCK, HIDDEN, MASK_ID, PAIRS, TAPS

Trained = tuple[str, PreTrainedModel, DraftModule]


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> Batch:
    rows = build_corpus(tokenizer, 11, 60, torch.device("cpu")).rows
    one = rows[128]
    return Batch(one.ids[:4].long(), one.own[:4], one.real[:4])


@pytest.mark.parametrize("name", list(PAIRS))
def test_equals_the_drafter_that_runs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    module = DraftModule(PAIRS[name].drafter_config, HIDDEN)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_drafter(module, PAIRS[name], tmp_path)
    running = Drafter.load(Checkpoint.open(tmp_path), device="cpu", dtype=torch.float32)
    taps, x = torch.randn(1, 150, len(TAPS) * HIDDEN), torch.randn(1, 3, BLOCK, HIDDEN)
    anchors = torch.tensor([[1, 40, 149]])  # before, inside and beyond the window of 64
    with torch.no_grad():
        batched = module(taps, x, anchors)[0]
    for row, anchor in enumerate(anchors[0].tolist()):
        cache = running.new_cache()
        running.write_context(cache, taps[0, :anchor], 0)
        single = running.draft_hidden(cache, x[0, row], anchor)
        torch.testing.assert_close(batched[row], single, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 6])
def test_mask_shows_only_the_past_and_the_own_block(window: int | None) -> None:
    mask = visible(torch.tensor([[5, 9]]), 12, window)[0, 0]
    assert mask.shape == (2 * BLOCK, 12 + 2 * BLOCK)
    for query in range(2 * BLOCK):
        anchor, slot = (5, 9)[query // BLOCK], query % BLOCK
        for key in range(12 + 2 * BLOCK):
            if key < 12:
                wanted = key < anchor and (window is None or anchor + slot - key < window)
            else:
                other, own = divmod(key - 12, BLOCK)
                wanted = other == query // BLOCK and (window is None or 0 <= slot - own < window)
            assert bool(mask[query, key]) == wanted, (query, key)


def test_leak_taps_from_the_anchor_on_change_nothing(trained: Trained, batch: Batch) -> None:
    _, target, drafter = trained
    taps, _ = look(target, batch.ids)
    anchors = torch.full((len(batch.ids), 1), 60)
    x = block_inputs(batch.ids, anchors, target.get_input_embeddings())
    clean = drafter(taps, x, anchors)
    dirty = taps.clone()
    dirty[:, 60:] = dirty[:, 60:].flip(1) * 3 + 1
    assert torch.equal(drafter(dirty, x, anchors), clean)
    dirty[:, 59] += 1
    assert not torch.equal(drafter(dirty, x, anchors), clean)


def test_labels_are_the_targets_own_greedy_continuation(trained: Trained, batch: Batch) -> None:
    _, target, _ = trained
    _, greedy = look(target, batch.ids)
    anchors, counts = pick_anchors(batch, 6, torch.Generator().manual_seed(0))
    wanted, valid = labels(batch, greedy, anchors)
    assert valid[counts].any() and MASK_ID not in wanted[valid]
    row, column = (int(i) for i in (valid.all(-1) & counts).nonzero()[0])
    text = batch.ids[row, : int(anchors[row, column]) + 1]
    with torch.no_grad():
        for label in wanted[row, column].tolist():
            assert int(target(text.unsqueeze(0), use_cache=False).logits[0, -1].argmax()) == label
            text = torch.cat((text, torch.tensor([label])))


def test_labels_stop_after_the_first_disagreement() -> None:
    ids, own = torch.arange(20).unsqueeze(0), torch.ones(1, 20, dtype=torch.bool)
    greedy = torch.arange(1, 21).unsqueeze(0).clone()
    greedy[0, 6] = 99  # the target would write 99, not 7, at position 7
    wanted, valid = labels(Batch(ids, own, own), greedy, torch.tensor([[4, 15]]))
    assert wanted[0, 0].tolist()[:3] == [5, 6, 99]
    assert valid[0, 0].tolist() == [True] * 3 + [False] * 4
    assert valid[0, 1].tolist() == [True] * 4 + [False] * 3  # the row ends


def test_anchors_and_their_next_token_are_written_by_the_model(batch: Batch) -> None:
    anchors, counts = pick_anchors(batch, 24, torch.Generator().manual_seed(1))
    rows = torch.arange(len(anchors)).unsqueeze(1)
    assert counts.any()
    assert (batch.own[rows, anchors] & batch.own[rows, anchors + 1])[counts].all()


@torch.no_grad()
def test_trained_drafter_beats_a_fresh_one_and_wrong_taps(trained: Trained, batch: Batch) -> None:
    name, target, drafter = trained
    good, length = drafter_loss(target, drafter, batch, torch.Generator().manual_seed(2))
    assert float(length) > 5
    torch.manual_seed(0)
    untrained = DraftModule(PAIRS[name].drafter_config, HIDDEN)
    fresh, _ = drafter_loss(target, untrained, batch, torch.Generator().manual_seed(2))
    swapped = copy.deepcopy(drafter)
    swapped.fc.weight.data = swapped.fc.weight.data.roll(HIDDEN, 1)  # every tap read as its neighbour
    wrong, short = drafter_loss(target, swapped, batch, torch.Generator().manual_seed(2))
    assert float(good) < 0.5 * float(wrong) and float(good) < 0.1 * float(fresh)
    assert float(short) < float(length) - 1


def test_later_slots_are_harder(trained: Trained, tokenizer: Tokenizer) -> None:
    _, target, drafter = trained
    one = build_corpus(tokenizer, 12, 300, torch.device("cpu")).rows[128]
    rows = Batch(one.ids[:16].long(), one.own[:16], one.real[:16])
    taps, greedy = look(target, rows.ids)
    anchors, counts = pick_anchors(rows, 24, torch.Generator().manual_seed(3))
    wanted, valid = labels(rows, greedy, anchors)
    hidden = drafter(taps, block_inputs(rows.ids, anchors, target.get_input_embeddings()), anchors)[:, :, 1:]
    logits = F.linear(hidden, target.get_input_embeddings().weight)
    each = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view_as(wanted)
    whole = valid.all(-1) & counts
    slots = each[whole].mean(0)
    assert slots[-3:].mean() > slots[:3].mean()
