"""A differentiable Gated-DeltaNet layer in block form, for training only; no cache, no rollback."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CHUNK = 64


def gated_delta(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The gated delta rule from a zero state.

    query, key [b, h, s, dk] (normalised, query scaled), value [b, h, s, dv], decay (log, <= 0) and beta [b, h, s];
    returns [b, h, s, dv]. Inside a chunk with G = cumsum(decay): (I + L) U = beta (V - e^G K S0),
    L[t, s] = beta_t e^(G_t - G_s) k_t.k_s for s < t. U splits into a part without S0, solved for all chunks at once.
    """
    batch, heads, length, width = key.shape
    pad = -length % CHUNK
    query, key, value = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (query, key, value))
    decay, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (decay, beta))
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    system = beta.unsqueeze(-1) * pairs * (key @ key.transpose(-1, -2))  # solve_triangular ignores the diagonal
    right = beta.unsqueeze(-1) * torch.cat((value, total.exp().unsqueeze(-1) * key), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, seen = solved.split((value.shape[-1], width), -1)
    inner = pairs * (query @ key.transpose(-1, -2))
    query = total.exp().unsqueeze(-1) * query
    fold = ((total[..., -1:] - total).exp().unsqueeze(-1) * key).transpose(-1, -2)
    kept = total[..., -1].exp()[..., None, None]
    state = value.new_zeros(batch, heads, width, value.shape[-1])
    outputs = []
    for chunk in range(key.shape[2]):
        update = fresh[:, :, chunk] - seen[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + inner[:, :, chunk] @ update)
        state = kept[:, :, chunk] * state + fold[:, :, chunk] @ update
    return torch.cat(outputs, 2)[:, :, :length]


def _forward(layer: Any, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    batch, length, _width = hidden_states.shape
    mixed = layer.in_proj_qkv(hidden_states).transpose(1, 2)
    weight = layer.conv1d.weight.to(mixed.dtype)
    mixed = F.conv1d(F.pad(mixed, (weight.shape[-1] - 1, 0)), weight, groups=mixed.shape[1])
    mixed = F.silu(mixed).transpose(1, 2)
    query, key, value = mixed.split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    repeat = layer.num_v_heads // layer.num_k_heads
    query, key = (x.unflatten(-1, (-1, layer.head_k_dim)).repeat_interleave(repeat, 2) for x in (query, key))
    value = value.unflatten(-1, (-1, layer.head_v_dim))
    with torch.autocast(hidden_states.device.type, enabled=False):
        query, key, value = (x.transpose(1, 2).float() for x in (query, key, value))
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
        beta = layer.in_proj_b(hidden_states.float()).sigmoid().transpose(1, 2)
        rate = layer.in_proj_a(hidden_states.float()) + layer.dt_bias
        decay = (-layer.A_log.float().exp() * F.softplus(rate)).transpose(1, 2)
        core = gated_delta(query * layer.head_k_dim**-0.5, key, value, decay, beta)
    core = core.transpose(1, 2).to(hidden_states.dtype).reshape(-1, layer.head_v_dim)
    gate = layer.in_proj_z(hidden_states).reshape(-1, layer.head_v_dim)
    return layer.out_proj(layer.norm(core, gate).reshape(batch, length, -1))


def use_block_form(model: nn.Module) -> None:
    """Make every Gated-DeltaNet layer of a transformers Qwen3.5 model run this module's forward."""
    for layer in model.modules():
        if type(layer).__name__.endswith("GatedDeltaNet"):
            layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
