"""Training of a layer for multi-token prediction sees what drafting sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_local.drafters.mtp.reference import MTPLayer
from dflash_local.engine import LoadConfig, load
from dflash_local.models.transformers_target import TransformersTarget
from tests.engine_sessions import random_prompt
from tests.mtp_checkpoints import Recipe, own_pair, save_target
from tools.train.mtp import chain_loss

DRAFTS = 3


def test_each_step_of_a_chain_is_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any token the drafts are given, as in training: what comes out is what the recipe's last row has."""
    folder = save_target("qwen3_5", tmp_path / "target")
    proposer = load(own_pair(folder), LoadConfig(device="cpu", dtype="float32")).runner.proposer
    layer: MTPLayer = proposer.layer
    target: TransformersTarget = proposer.target
    recipe, ids = Recipe(folder), random_prompt(12)
    known = recipe.hidden(ids)
    outputs: list[torch.Tensor] = []
    monkeypatch.setattr(target, "head", lambda hidden: outputs.append(hidden) or hidden)
    chain_loss(layer, target, torch.tensor([ids, ids]), known.float().expand(2, -1, -1), DRAFTS)
    embed = recipe.model.get_input_embeddings()
    for first in range(len(ids) - DRAFTS):
        hidden = known[: first + 1]
        for step in range(DRAFTS):
            behind = embed(torch.tensor(ids[1 : first + step + 2]))
            expected = recipe._layer(behind, hidden)[-1:]
            torch.testing.assert_close(outputs[1 + step][1, first].double(), expected[0], atol=1e-4, rtol=1e-4)
            hidden = torch.cat((hidden, expected))
