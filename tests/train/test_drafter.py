"""The trainable drafter: the same mathematics as the one that runs, and no look ahead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_local.catalog.bundled import FOLDER
from dflash_local.drafters.dflash.reference import DrafterModel
from dflash_local.drafters.dflash.training import DraftModule
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.shared_windows import dense_mask, drafted
from tests.drafter_configs import read_decoder

PAIRS = ("demo", "demo-hybrid")  # attention over everything; a causal sliding layer of 64 before one
BLOCK, HIDDEN, TAPS = 8, 192, 4


def module_of(name: str) -> tuple[dict[str, object], DraftModule]:
    """The shape of a bundled drafter over fresh weights."""
    told = json.loads((FOLDER / name / "drafter" / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(3)
    return told, DraftModule(read_decoder(told, name), HIDDEN).requires_grad_(False)


@pytest.mark.parametrize("name", PAIRS)
def test_equals_the_drafter_that_runs(name: str, tmp_path: Path) -> None:
    told, module = module_of(name)
    for parameter in module.parameters():
        parameter.data = (parameter + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    save_file({key: value.bfloat16() for key, value in module.state_dict().items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(told), encoding="utf-8")
    running = DrafterModel.load(Checkpoint.open(tmp_path), device="cpu", dtype=torch.float32)
    taps, x = torch.randn(1, 150, TAPS * HIDDEN), torch.randn(1, 3, BLOCK, HIDDEN)
    anchors = torch.tensor([[1, 40, 149]])  # before, inside and beyond the window of 64
    with torch.no_grad():
        batched = module(taps, x, anchors)[0]
    for row, anchor in enumerate(anchors[0].tolist()):
        cache = running.new_cache()
        running.write_context(cache, taps[0, :anchor], 0)
        single = running.draft_hidden(cache, x[0, row], anchor)
        torch.testing.assert_close(batched[row], single, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (None, True), (6, True), (6, False)])
def test_mask_shows_only_the_past_and_the_own_block(window: int | None, causal: bool) -> None:
    rule = drafted(torch.zeros(1, 12), torch.tensor([[5, 9]]), BLOCK, window, causal)
    mask = dense_mask(rule, 1, 2 * BLOCK, 12 + 2 * BLOCK, torch.device("cpu"))[0, 0]
    assert mask.shape == (2 * BLOCK, 12 + 2 * BLOCK)
    for query in range(2 * BLOCK):
        anchor, slot = (5, 9)[query // BLOCK], query % BLOCK
        for key in range(12 + 2 * BLOCK):
            if key < 12:
                wanted = key < anchor and (window is None or anchor + slot - key < window)
            else:
                other, own = divmod(key - 12, BLOCK)
                wanted = other == query // BLOCK and (window is None or abs(slot - own) < window)
                wanted = wanted and (own <= slot or not causal)
            assert bool(mask[query, key]) == wanted, (query, key)
