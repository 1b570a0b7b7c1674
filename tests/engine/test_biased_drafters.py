"""Drafters as gpt-oss has them (biases, heads of 64, YaRN, eight layers): both engines draft the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.reference import DrafterModel
from dflash_local.models.drafter_weights import DrafterWeights, random_weights
from dflash_local.models.fused.target import FusedTarget
from tests.drafter_configs import read_decoder
from tests.engine_sessions import random_prompt
from tests.families import HIDDEN, VOCAB
from tests.fused_models import TAPS, fused_target

BLOCK, MASK = 8, 5
FAMILY = "llama_biased"
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 150000.0}
GPT_OSS = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": True,
    "block_size": BLOCK,
    "rope_parameters": YARN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "sliding and causal": SLIDING,
    "sliding on both sides": {**SLIDING, "is_causal": False},
    "no biases": {"attention_bias": False},
}


def config(**changes: Any) -> DFlashConfig:
    return read_decoder({**GPT_OSS, **changes}, "config.json")


def weights_of(drafter: DFlashConfig) -> DrafterWeights:
    return random_weights(drafter, HIDDEN, 1, torch.device("cpu"), torch.float32)


def drafted(drafter: DFlashConfig, weights: DrafterWeights, text: torch.Tensor) -> tuple[torch.Tensor, FusedTarget]:
    """Logits behind the text's last token: its first twenty came as a prompt, the others as a block."""
    target = fused_target(FAMILY, 100, BLOCK)
    proposer = DFlashBlocks(drafter, weights, target)
    prompt = target.prefill(text[:20], True)
    assert prompt.taps is not None
    proposer.write_context(prompt.taps, 0)
    target.verify(text[20:-1], True)
    proposer.inject(len(text) - 21)
    target.commit(len(text) - 21)
    target.tokens[0] = text[-1]
    proposer.block(len(text) + BLOCK)
    return proposer.drafts.clone(), target


def drafted_by_reference(drafter: DFlashConfig, text: torch.Tensor) -> torch.Tensor:
    """The same, all of its text as one prompt."""
    target = fused_target(FAMILY, 100, BLOCK)
    proposer = DrafterModel(drafter, weights_of(drafter))
    taps = target.prefill(text[:-1], True).taps
    assert taps is not None
    memory = proposer.new_cache()
    proposer.write_context(memory, taps, 0)
    block = target.embed(torch.tensor([int(text[-1]), *[MASK] * (BLOCK - 1)]))
    return target.head(proposer.draft_hidden(memory, block, len(text) - 1)[1:])


@pytest.mark.parametrize("name", VARIANTS)
def test_it_drafts_what_the_reference_engine_drafts(name: str) -> None:
    drafter, text = config(**VARIANTS[name]), torch.tensor(random_prompt(26))
    found, want = drafted(drafter, weights_of(drafter), text)[0], drafted_by_reference(drafter, text)
    torch.testing.assert_close(found, want, atol=1e-3, rtol=1e-4)
    assert torch.equal(found.argmax(-1), want.argmax(-1))
