"""The drafter as a trainable module: ``models.drafter`` over many anchors at once.

Tensor names are the published ones. It knows the target only through taps, embeddings and head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dflash_local.adapt.packing import Mask, attend, dense_mask, drafted
from dflash_local.drafters.dflash.layout import DFlashConfig


class Norm(nn.Module):
    """Qwen3's RMSNorm (weight starts at one; never the 1 + weight form of Qwen3.5 targets)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate-half RoPE over the whole head; x [b, h, n, d], positions [b, n]."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions.unsqueeze(-1).float() * rates).unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class DraftAttention(nn.Module):
    """Block queries over context keys (from c) and block keys (from u), one set of weights for both."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, heads, kv, dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv, self.theta = heads, kv, config.rope.theta
        self.q_proj = nn.Linear(width, heads * dim, bias=False)
        self.k_proj = nn.Linear(width, kv * dim, bias=False)
        self.v_proj = nn.Linear(width, kv * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, width, bias=False)
        self.q_norm, self.k_norm = Norm(dim, config.rms_norm_eps), Norm(dim, config.rms_norm_eps)

    def forward(
        self, u: torch.Tensor, c: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        """u [b, n, w] at positions [b, n], c [b, s, w] at places [b, s], mask over [n, s + n]."""
        both, everywhere = torch.cat((c, u), 1), torch.cat((places, positions), 1)
        q = rotate(self.q_norm(self.q_proj(u).unflatten(-1, (self.heads, -1))).transpose(1, 2), positions, self.theta)
        k = rotate(self.k_norm(self.k_proj(both).unflatten(-1, (self.kv, -1))).transpose(1, 2), everywhere, self.theta)
        v = self.v_proj(both).unflatten(-1, (self.kv, -1)).transpose(1, 2)
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer; only the block stream is updated, the context feature c is not."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config)
        self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)

    def forward(
        self, x: torch.Tensor, c: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), c, places, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModule(nn.Module):
    """All blocks of a batch in one forward.

    Args:
        target_hidden: width of the target, whose taps ``fc`` takes.
    """

    def __init__(self, config: DFlashConfig, target_hidden: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.windows = config, config.windows
        self.fc = nn.Linear(len(config.taps) * target_hidden, width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(Layer(config) for _ in self.windows)
        self.norm = Norm(width, eps)

    def forward(self, taps: torch.Tensor, x: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Rows that are whole texts: taps [b, s, T * w], block embeddings x [b, a, size, w], anchors [b, a].

        Returns:
            hidden after the norm, shaped as x.
        """
        length, block, device = taps.shape[1], x.shape[2], anchors.device
        places = torch.arange(length, device=device).expand(len(taps), -1)
        positions = (anchors.unsqueeze(-1) + torch.arange(block, device=device)).flatten(1)
        rules = {window: drafted(torch.zeros_like(places), anchors, block, window) for window in self.windows}
        shape = len(taps), positions.shape[1], length + positions.shape[1]
        masks = {window: dense_mask(rule, *shape, device) for window, rule in rules.items()}
        return self.packed(taps, x.flatten(1, 2), places, positions, masks).view_as(x)

    def packed(
        self,
        taps: torch.Tensor,
        x: torch.Tensor,
        places: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[int | None, Mask],
    ) -> torch.Tensor:
        """Rows of any texts: taps [b, s, T * w] at places [b, s], block rows x [b, n, w] at positions [b, n].

        Args:
            masks: who sees whom over [n, s + n], by a layer's window.

        Returns:
            hidden after the norm, shaped as x.
        """
        c = self.hidden_norm(self.fc(taps))
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = layer(x, c, places, positions, masks[window])
        return self.norm(x)


def block_inputs(
    ids: torch.Tensor,
    anchors: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    size: int,
    mask_id: int,
) -> torch.Tensor:
    """Embeddings [b, a, size, w] of [anchor, mask_id, ...] for anchors [b, a] in ids [b, s]."""
    block = torch.full((*anchors.shape, size), mask_id, device=ids.device)
    block[..., 0] = ids.gather(1, anchors)
    return embed(block)
