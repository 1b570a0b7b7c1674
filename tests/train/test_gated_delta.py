"""The training form of Gated DeltaNet equals the recurrence and transformers' layer."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tools.train.gated_delta import gated_delta, use_block_form
from tools.train.shapes import PAIRS


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_block_form_equals_the_recurrence(length: int) -> None:
    draw = torch.Generator().manual_seed(length)
    shape = (2, 3, length)
    q, k, v = (torch.randn(*shape, width, generator=draw, dtype=torch.float64) for width in (8, 8, 5))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(shape, generator=draw, dtype=torch.float64)
    beta = torch.rand(shape, generator=draw, dtype=torch.float64)
    state = torch.zeros(2, 3, 8, 5, dtype=torch.float64)
    rows = []
    for t in range(length):
        state = state * decay[..., t].exp()[..., None, None]
        delta = beta[..., t, None] * (v[..., t, :] - (state * k[..., t, :, None]).sum(-2))
        state = state + k[..., t, :, None] * delta.unsqueeze(-2)
        rows.append((state * q[..., t, :, None]).sum(-2))
    torch.testing.assert_close(gated_delta(q, k, v, decay, beta), torch.stack(rows, 2))


def test_block_form_has_right_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 5, 3, generator=draw, dtype=torch.float64, requires_grad=True) for _ in range(3))
    decay = -torch.rand(1, 1, 5, generator=draw, dtype=torch.float64)
    beta = torch.rand(1, 1, 5, generator=draw, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k, v: gated_delta(q, k, v, decay, beta), (q, k / 2, v))


def test_layer_equals_transformers() -> None:
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**PAIRS["demo-hybrid"].target)).eval()
    ids = torch.randint(0, 1000, (2, 90))
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        use_block_form(model)
        after = model(ids, use_cache=False).logits
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
