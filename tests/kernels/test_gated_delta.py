"""The gated delta rule: block form, chunked form and commit agree with the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from dflash_local.kernels import gated_delta

H, DK, DV = 3, 16, 8


def tokens(rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, g, beta, state."""
    gen = torch.Generator().manual_seed(seed)
    q, k = (gated_delta.normalise(torch.randn(H, rows, DK, generator=gen)) for _ in range(2))
    v = torch.randn(H, rows, DV, generator=gen)
    g = -torch.rand(H, rows, generator=gen) * 2
    beta = torch.rand(H, rows, generator=gen)
    return q * DK**-0.5, k, v, g, beta, torch.randn(H, DK, DV, generator=gen)


def recurrence(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token, in float64."""
    q, k, v, g, beta, state = (x.double() for x in parts)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None].exp()
        delta = beta[:, t, None] * (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t]))
        state = state + k[:, t, :, None] * delta[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_block_form_equals_the_recurrence_and_leaves_the_state(rows: int) -> None:
    parts = tokens(rows)
    before = parts[-1].clone()
    out, _ = gated_delta.block(*parts)
    assert torch.equal(parts[-1], before)
    assert (out - recurrence(parts)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_chunked_form_equals_the_recurrence(rows: int) -> None:
    parts = tokens(rows)
    out, state = gated_delta.chunked(*parts)
    want_out, want_state = recurrence(parts)
    assert (out - want_out).abs().max() < 1e-5
    assert (state - want_state).abs().max() < 1e-5


def test_commit_in_parts_is_bitwise_the_commit_in_one() -> None:
    _, k, v, g, beta, state = tokens(16)
    parts, whole = state.clone(), state.clone()
    gated_delta.commit(whole, k, v, g, beta)
    for at, end in ((0, 1), (1, 6), (6, 6), (6, 16)):
        gated_delta.commit(parts, k[:, at:end], v[:, at:end], g[:, at:end], beta[:, at:end])
    assert torch.equal(parts, whole)
