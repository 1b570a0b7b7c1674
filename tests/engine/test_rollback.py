"""A recurrent target's state after any accept pattern is the commit of what it recorded."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels import gated_delta
from dflash_local.models.transformers_target import TransformersTarget
from tests.families import VOCAB, random_model

BLOCK = 4


HYBRIDS = (("qwen3_5", 150), ("qwen3_next", 40), ("qwen3_5_moe", 40), ("qwen3_5_wrapped", 40))


@pytest.mark.parametrize(("family", "cycles"), [*HYBRIDS, pytest.param("qwen3_5", 10_000, marks=pytest.mark.slow)])
def test_state_equals_a_commit_from_scratch_over_random_cycles(family: str, cycles: int) -> None:
    """Random accepts against a commit from scratch of the recorded inputs, compared bit for bit."""
    torch.manual_seed(3)
    target = TransformersTarget(random_model(family), (0,))
    (cache,) = target.recurrent
    with torch.inference_mode():
        target.prefill(torch.randint(0, VOCAB, (9,)), False)
        state, conv = cache.state.clone(), cache.conv.clone()
        heads = cache.shape.num_heads * len(cache.state)
        for cycle in range(cycles):
            if target.length > 400:
                target.kv.length = 9  # bounds the attention's cost; the recurrent state goes on
            before = cache.state.clone()
            target.verify(torch.randint(0, VOCAB, (BLOCK,)), False)
            assert torch.equal(cache.state, before), "a verify must not touch the committed state"
            keep = int(torch.randint(0, BLOCK + 1, ()))
            k, v, g, beta, inputs = cache.log(BLOCK)
            target.commit(keep)
            parts = (x[:, :, :keep].reshape(heads, keep, *x.shape[3:]) for x in (k, v, g, beta))
            gated_delta.commit(state.view(heads, *state.shape[2:]), *parts)
            conv = torch.cat((conv, inputs[:, :, cache.shape.conv_kernel_size - 1 :][:, :, :keep]), -1)[:, :, -3:]
            assert torch.equal(cache.state, state), f"state differs in cycle {cycle} after keeping {keep}"
            assert torch.equal(cache.conv, conv), f"convolution differs in cycle {cycle} after keeping {keep}"


def test_snapshot_restores_bitwise_and_truncate_of_a_recurrent_state_is_refused() -> None:
    target = TransformersTarget(random_model("qwen3_5"), (0,))
    (cache,) = target.recurrent
    with torch.inference_mode():
        target.prefill(torch.randint(0, VOCAB, (9,)), False)
        point, before = target.snapshot(), cache.state.clone()
        target.prefill(torch.randint(0, VOCAB, (5,)), False)
        assert not torch.equal(cache.state, before)
        with pytest.raises(RuntimeError, match="recurrent"):
            target.truncate(9)
        target.restore(point)
    assert torch.equal(cache.state, before) and target.length == 9
