"""The Gated-DeltaNet layer of Qwen3-Next or Qwen3.5 from transformers, with a forward over our own recurrent cache.

No transformers cache restores a recurrent state after partial acceptance.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflash_local.kernels.gated_delta import causal_conv, normalise
from dflash_local.models.recurrent_cache import RecurrentCache, RecurrentShape


class ReferenceGatedDeltaNet(nn.Module):
    """One recurrent token mixer, batch 1. ``source``: the transformers module whose parameters are borrowed."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads = source.num_k_heads, source.num_v_heads
        self.key_dim, self.value_dim = source.head_k_dim, source.head_v_dim
        self.fused = hasattr(source, "in_proj_qkvz")  # Qwen3-Next interleaves q, k, v, z per key head
        names = ("in_proj_qkvz", "in_proj_ba") if self.fused else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        for name in (*names, "conv1d", "norm", "out_proj"):
            self.add_module(name, getattr(source, name))
        self.A_log, self.dt_bias = source.A_log, source.dt_bias
        self.scale = self.key_dim**-0.5
        self.cache: RecurrentCache | None = None
        self.slot = 0

    @property
    def shape(self) -> RecurrentShape:
        weight: torch.Tensor = self.conv1d.weight  # type: ignore[union-attr,assignment]
        return RecurrentShape(weight.shape[0], weight.shape[-1], self.num_v_heads, self.key_dim, self.value_dim)

    def attach(self, cache: RecurrentCache, slot: int) -> None:
        """Keep this layer's state in row ``slot`` of ``cache``."""
        self.cache, self.slot = cache, slot
        # Constant per layer; float32 as the published code computes the decay.
        self._rate = -self.A_log.detach().float().exp()
        self._bias = self.dt_bias.detach().float()

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return hidden_states [1, M, H] -> [1, M, H]; reads and records through the attached cache."""
        if self.cache is None:
            raise RuntimeError("ReferenceGatedDeltaNet.attach was not called")
        rows = hidden_states.shape[1]
        mixed, z, b, a = self._project(hidden_states[0])
        inputs = self.cache.conv_inputs(self.slot, mixed.t())
        weight: torch.Tensor = self.conv1d.weight  # type: ignore[union-attr,assignment]
        mixed = causal_conv(inputs, weight[:, 0])  # [C, M]
        keys = self.num_k_heads * self.key_dim
        q, k, v = mixed.split((keys, keys, self.num_v_heads * self.value_dim))
        shape = (-1, self.key_dim, rows)
        qk = normalise(torch.stack((q, k)).view(2, *shape).transpose(-1, -2))
        repeats = self.num_v_heads // self.num_k_heads
        if repeats > 1:  # each key head serves consecutive value heads
            qk = qk.repeat_interleave(repeats, dim=1)
        values = v.view(-1, self.value_dim, rows).transpose(-1, -2).float()
        # beta is rounded to the model's dtype, as the published code does
        beta = b.sigmoid().t().float()
        g = (self._rate * F.softplus(a.float() + self._bias)).t()
        out = self.cache.run(self.slot, qk[0] * self.scale, qk[1], values, g, beta)
        out = out.transpose(0, 1).to(hidden_states.dtype).reshape(-1, self.value_dim)
        gated = self.norm(out, z.reshape(-1, self.value_dim))  # type: ignore[operator]
        return self.out_proj(gated.view(1, rows, -1))  # type: ignore[operator, no-any-return]

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x [M, H] -> qkv [M, C], z [M, Hv*dv], b and a [M, Hv]."""
        if not self.fused:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)  # type: ignore[operator]
        groups, per_group = self.num_k_heads, self.num_v_heads // self.num_k_heads
        wide = per_group * self.value_dim
        qkvz = self.in_proj_qkvz(x).view(len(x), groups, -1)  # type: ignore[operator]
        q, k, v, z = qkvz.split((self.key_dim, self.key_dim, wide, wide), dim=-1)
        b, a = self.in_proj_ba(x).view(len(x), groups, -1).split((per_group, per_group), dim=-1)  # type: ignore[operator]
        flat = [part.reshape(len(x), -1) for part in (q, k, v, z, b, a)]
        return torch.cat(flat[:3], dim=-1), flat[3], flat[4], flat[5]
