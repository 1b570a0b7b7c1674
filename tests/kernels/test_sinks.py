"""Attention sinks on the CPU against softmax with one more column, in float64."""

from __future__ import annotations

from typing import Any

import torch

from dflash_local.kernels.prefill_attention import prefill_attention

HEADS, KV_HEADS = 6, 2


def test_a_prompts_sinks_are_not_rounded_to_bfloat16() -> None:
    """They pass through the products of the queries' dtype; 8 bits of mantissa would make 65 of this one."""
    queries, sink = torch.zeros(3, HEADS, 16, dtype=torch.bfloat16), 65.2
    cache: Any = (torch.zeros(KV_HEADS, 8, 16, dtype=torch.bfloat16), torch.ones(KV_HEADS, 8, 16, dtype=torch.bfloat16))
    queries[..., 0] = 1
    cache[0][..., 0] = 16.0  # equal scores of 64 with this scale
    found = prefill_attention(queries, cache, 2, 4.0, None, torch.full((HEADS,), sink))
    keys = torch.tensor([3.0, 4.0, 5.0])
    want = keys / (keys + torch.tensor(sink - 64.0, dtype=torch.float64).exp())
    assert (found.view(3, HEADS, 16) - want[:, None, None]).abs().max() < 2**-8 * 1.01
    rounded = keys / (keys + torch.tensor(65.0 - 64.0, dtype=torch.float64).exp())
    assert (want - rounded).abs().min() > 0.03
