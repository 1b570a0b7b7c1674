"""Drafters of each kind, those of gpt-oss among them: both engines compute the same logits and choose the same ids."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from dflash_local.drafters.dflash.fused import DFlashBlocks
from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.reference import DFlashProposer
from dflash_local.drafters.dflash2.fused import DFlash2Blocks
from dflash_local.drafters.dflash2.reference import DFlash2Proposer
from dflash_local.drafters.dspark.fused import DSparkBlocks
from dflash_local.drafters.dspark.reference import DSparkProposer, Tables
from dflash_local.engine.sampling import Sampler
from dflash_local.kernels.choose import Chooser, Choosing
from dflash_local.kernels.markov_walk import ConfidenceHead
from dflash_local.models.drafter_weights import random_weights
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import SamplingParams
from tests.drafter_configs import read_decoder
from tests.dspark_checkpoints import raw
from tests.engine_sessions import random_prompt
from tests.families import HIDDEN, VOCAB, random_model
from tests.fused_models import TAPS, fused_target

KINDS: dict[str, tuple[Any, Any]] = {
    "dflash": (DFlashBlocks, DFlashProposer),
    "dflash2": (DFlash2Blocks, DFlash2Proposer),
    "dspark": (DSparkBlocks, DSparkProposer),
}
BASE = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "rope_theta": 150000.0}
GPT_OSS = {
    **BASE, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 8, "head_dim": 64, "attention_bias": True,
    "block_size": 8, "rope_parameters": YARN, "max_position_embeddings": 2048, "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": list(TAPS)},
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 6}
SECOND = read_decoder({
    **BASE, "architectures": ["DFlash2DraftModel"], "num_hidden_layers": 2, "head_dim": 8, "rope_theta": 1e4,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "is_causal": False,
    "dflash_config": {
        "block_size": 8, "mask_token_id": 5, "target_layer_ids": list(TAPS), "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 6, "output_multiplier": 0.5,
        "input_embedding_scale": 3.0,
    },
}, "x")  # fmt: skip
FIRST = DFlashConfig(**{part.name: getattr(SECOND, part.name) for part in fields(DFlashConfig)})


def dspark(markov_rank: int) -> DFlashConfig:
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "target_layer_ids": list(TAPS),
        "mask_token_id": 5,
    }
    return read_decoder(raw(**sizes, markov_rank=markov_rank), "x")


# Also where the target scales its embedding and caps its logits, which is not every drafter's way.
CASES: dict[str, tuple[str, DFlashConfig, bool]] = {  # the target's family, the drafter, and whether it has own tables
    "gpt-oss": ("llama_biased", read_decoder(GPT_OSS, "x"), False),
    "gpt-oss, sliding": ("llama_biased", read_decoder({**GPT_OSS, **SLIDING}, "x"), False),
    "gpt-oss, both sides": ("llama_biased", read_decoder({**GPT_OSS, **SLIDING, "is_causal": False}, "x"), False),
    "gpt-oss, no biases": ("llama_biased", read_decoder({**GPT_OSS, "attention_bias": False}, "x"), False),
    "DFlash, plain": ("qwen3", FIRST, False),
    "DFlash, capped": ("gemma2", FIRST, False),
    "DFlash 2, plain": ("qwen3", SECOND, False),
    "DFlash 2, capped": ("gemma2", SECOND, False),
    "DSpark, plain": ("qwen3", dspark(12), True),
    "DSpark, capped, no walk": ("gemma2_full", dspark(0), True),
    "DSpark, capped, borrowing": ("gemma2_full", dspark(12), False),
}


def chosen(blocks: Any, params: SamplingParams, at: int) -> tuple[list[int], torch.Tensor]:
    """Ids and margins."""
    count, vocab = blocks.drafts.shape
    chooser = blocks.selector or Chooser.allocate(count, vocab, torch.device("cpu"))
    out, margins = torch.empty(count, dtype=torch.int64), torch.empty(count)
    if params.greedy:
        chooser.choose(blocks.drafts, out, Choosing(None, margins))
    else:
        start = torch.tensor([at], dtype=torch.int32)
        noise = torch.tensor([params.temperature]), torch.tensor([11]), start
        chooser.choose(blocks.drafts, out, Choosing(noise, margins))
    return out.tolist(), margins


@pytest.mark.parametrize("name", CASES)
def test_both_engines_draft_the_same(name: str) -> None:
    """Behind a prompt and a block in one engine, behind all of the text at once in the other."""
    family, config, own = CASES[name]
    make, propose = KINDS[config.kind]
    weights = random_weights(config, HIDDEN, 3, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(VOCAB + 3, HIDDEN, generator=generator) for _ in "ab")
    sure = ConfidenceHead(torch.randn(1, HIDDEN + 12, generator=generator), torch.ones(1))
    tables = {"tables": Tables(embedding, head, sure)} if own else {}
    text, target = torch.tensor(random_prompt(26)), fused_target(family, 100, config.block_size)
    blocks, at = make(config, weights, target, **tables), len(text) - 1
    blocks.write_context(target.prefill(text[:20], True).taps, text[:20], 0)
    target.verify(text[20:-1], True)
    blocks.inject(target.tapped[: at - 20])
    target.commit(at - 20)
    target.tokens[0] = text[-1]
    blocks.block(at + 20)
    other = TransformersTarget(random_model(family), TAPS)
    reference = propose(propose.model(config, weights), other, **tables)
    reference.extend(fused_target(family, 100).prefill(text[:-1], True).taps, 0)
    ids = torch.tensor([int(text[-1]), *[config.mask_token_id] * (config.draft_rows - 1)])
    hidden = reference.drafter.draft_hidden(reference._cache, reference._embed(ids), at)[config.first_draft :]
    torch.testing.assert_close(blocks.drafts, reference._logits(hidden), atol=1e-4, rtol=1e-4)
    assert (blocks.selector is None) == (config.kind == "dflash" or name.endswith("no walk"))
    for params in (SamplingParams(), SamplingParams(temperature=0.7)):
        sampler = Sampler(params, 11, VOCAB, text)
        drafts, confidences = reference.propose(
            text.tolist(), len(blocks.drafts), sampler, sampler.noise(at + 1, len(blocks.drafts))
        )
        likeliest, margins = chosen(blocks, params, at)
        assert drafts.tolist() == likeliest
        torch.testing.assert_close(margins, confidences, atol=1e-4, rtol=1e-4)
