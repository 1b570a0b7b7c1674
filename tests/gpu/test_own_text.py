"""A drafter's training on a card: kernels of the slots, flex attention against dense, the graph of a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import save_model
from tools.train.frozen_target import FrozenTarget
from tools.train.head_loss import head_loss
from tools.train.own_drafter import Recipe, Trainer
from tools.train.own_export import config_json, new_drafter
from tools.train.packing import dense_mask, drafted, mask_of, same_text
from tools.train.slot_kernels import attend_slots, attend_slots_reference, choose
from tools.train.slots import Frame, Limits, Opening, Slots
from tools.train.windows import Windows

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder: Path = tmp_path_factory.mktemp("target")
    save_model("llama", folder, **SIZES, head_dim=64, vocab_size=300)
    return FrozenTarget.load(folder, "cuda")


def windows(rows: int, length: int) -> Windows:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 300, (rows, length), generator=generator)
    texts = torch.arange(length).expand(rows, -1) // 150
    places = torch.arange(length).expand(rows, -1) % 150
    return Windows(ids, ids, places, texts, places > 20).to(CUDA)


@pytest.mark.parametrize(("kv", "group", "dim"), [(3, 3, 64), (2, 4, 48)])
def test_attention_of_slots(kv: int, group: int, dim: int) -> None:
    draw = torch.Generator(CUDA).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=CUDA, generator=draw).to(torch.bfloat16)

    q, k, v = normal(64, kv * group, dim) / dim**0.5, normal(64, kv, dim), normal(64, kv, dim)
    keys, values = normal(64, kv, 300, dim), normal(64, kv, 300, dim)
    at = torch.randint(0, 300, (64,), device=CUDA, generator=draw)
    at[:2] = torch.tensor([0, 299])
    twins = keys.clone(), values.clone()
    found, wanted = attend_slots(q, k, v, keys, values, at), attend_slots_reference(q, k, v, *twins, at)
    torch.testing.assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert torch.equal(keys, twins[0]) and torch.equal(values, twins[1])


def test_choice_follows_the_shares() -> None:
    logits = torch.zeros(4000, 5000, device=CUDA, dtype=torch.bfloat16)
    logits[:, 4500], logits[:, 7] = 12.0, 11.0
    heat = torch.full((4000,), 1.0, device=CUDA)
    greedy = torch.arange(4000, device=CUDA) < 1000
    chosen, best = choose(logits, heat, greedy, -2.0, torch.tensor([5], device=CUDA))
    assert (best == 4500).all() and (chosen[:1000] == 4500).all()
    assert set(chosen[1000:].tolist()) == {7, 4500}
    assert abs(float((chosen[1000:] == 4500).float().mean()) - 0.731) < 0.04  # e / (e + 1)


def test_blocks_of_flex_attention_see_what_dense_masks_show(target: FrozenTarget) -> None:
    batch, layers = windows(2, 512), [1, 2]
    rule = same_text(batch.texts)
    masks = mask_of(rule, 2, 512, 512, CUDA), dense_mask(rule, 2, 512, 512, CUDA)
    blocks, dense = (target.taps(batch.ids, batch.places, mask, layers) for mask in masks)
    assert float((blocks - dense).float().norm() / dense.float().norm()) < 0.02
    config = config_json(target, layers=2, taps=layers, block=8, mask_id=299)
    drafter = new_drafter(config, SIZES["hidden_size"], 1).to(CUDA)
    anchors = torch.arange(30, 510, 30, device=CUDA).expand(2, -1)
    rows = anchors.shape[1] * 8
    positions = (batch.places.gather(1, anchors).unsqueeze(-1) + torch.arange(8, device=CUDA)).flatten(1)
    x = torch.randn(2, rows, SIZES["hidden_size"], device=CUDA).to(torch.bfloat16)
    own = drafted(batch.texts, anchors, 8)
    found: list[tuple[Any, ...]] = []
    for mask in (mask_of(own, 2, rows, 512 + rows, CUDA), dense_mask(own, 2, rows, 512 + rows, CUDA)):
        twin = copy.deepcopy(drafter)
        run = torch.compile(twin.packed, dynamic=False) if not isinstance(mask, torch.Tensor) else twin.packed
        with torch.autocast("cuda", torch.bfloat16):
            hidden = run(dense, x, batch.places, positions, {None: mask})
        hidden.float()[..., ::7].sum().backward()
        found.append((hidden.detach(), twin.fc.weight.grad, twin.layers[0].self_attn.k_proj.weight.grad))
    for left, right in zip(found[0], found[1], strict=True):
        assert float((left - right).float().norm() / right.float().norm()) < 0.1


def test_loss_through_the_head() -> None:
    hidden = torch.randn(300, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    head = 0.2 * torch.randn(500, 64, device=CUDA, dtype=torch.bfloat16)
    labels, weights = torch.randint(0, 500, (300,), device=CUDA), torch.rand(300, device=CUDA)
    loss, likeliest = head_loss(hidden, head, labels, weights)
    loss.backward()
    twin = hidden.detach().float().requires_grad_()
    logits = twin @ head.float().t()
    wanted = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    wanted.backward()
    assert hidden.grad is not None and twin.grad is not None
    torch.testing.assert_close(float(loss), float(wanted), rtol=1e-2, atol=0)
    assert float((likeliest == logits.argmax(1)).float().mean()) > 0.9
    assert float((hidden.grad.float() - twin.grad).norm() / twin.grad.norm()) < 0.02


def test_a_graph_of_the_step_writes_the_likeliest_ids(target: FrozenTarget) -> None:
    frame, rows = Frame((1, 2, 3), (4, 5), frozenset({0}), frozenset({0})), 16
    slots = Slots(target, frame, Limits(4, 40, rows), 1)
    openings = [Opening((7 + row,)) for row in range(rows)]
    slots.fill(range(rows), openings, answering=True)
    slots.capture()
    slots.restart()
    slots.fill(range(rows), openings, answering=True)
    for _ in range(3):
        slots.run()
    assert slots.ended.all()
    found = slots.take(torch.arange(rows, device=CUDA))
    ids, ends = found.ids.to(CUDA, torch.long), found.length.to(CUDA)
    keys, values = torch.zeros_like(slots.keys), torch.zeros_like(slots.values)
    behind = []  # by how much the id written falls short of the likeliest one, in logits of layers as they are
    for place in range(int(ends.max()) - 1):
        at = torch.full((rows,), place, device=CUDA)
        logits = target.next_logits(ids[:, place], at, keys, values, compiled=False).float()
        short = logits.amax(1) - logits.gather(1, ids[:, place + 1, None])[:, 0]
        behind.append(short[place + 1 < ends])
    # Ids themselves cannot be compared: bfloat16 leaves near-ties, and where two texts part they stay apart.
    assert float(torch.cat(behind).max()) < 0.5


def test_a_few_updates_lower_the_loss(target: FrozenTarget) -> None:
    config = config_json(target, layers=2, taps=[1, 2], block=8, mask_id=299)
    recipe = Recipe(anchors=32, rounds=2, warm_up=2, seconds=1e9)
    trainer = Trainer(target, new_drafter(config, SIZES["hidden_size"], 1), recipe)
    batch = windows(4, 512)
    losses = [float(trainer.step(batch)[0]) for _ in range(30)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
