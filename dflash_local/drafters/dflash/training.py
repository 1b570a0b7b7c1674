"""A DFlash drafter as a module that can be trained: what ``reference`` computes, over many anchors at once.

Tensor names are the published ones. It knows the target only through taps, embeddings and head. The other kinds that
are trained override what they have beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from dflash_local.drafters.dflash.layout import DFlashConfig
from dflash_local.drafters.dflash.reference import Part, Sublayer
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.head_loss import head_loss
from dflash_local.models.shared_windows import Mask, attend, dense_mask, drafted

if TYPE_CHECKING:
    from dflash_local.engine.runner import ScoringTarget

Sight = tuple[int | None, bool]  # of a layer: its window, and whether it is causal
Embed = Callable[[torch.Tensor], torch.Tensor]  # ids [...] to rows [..., w]


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
        def attention(rows: torch.Tensor) -> torch.Tensor:
            return self.self_attn(rows, c, places, positions, mask)  # type: ignore[no-any-return]

        x = x + self._around("attention", attention, self.input_layernorm(x))
        return x + self._around("mlp", self.mlp, self.post_attention_layernorm(x))

    def _around(self, part: Part, sublayer: Sublayer, rows: torch.Tensor) -> torch.Tensor:
        """Return the output of a sublayer on normed rows [b, n, w]; a kind may have something around it."""
        return sublayer(rows)


class DraftModule(nn.Module):
    """All blocks of a batch in one forward.

    Args:
        target_hidden: width of the target, whose taps ``fc`` takes.
    """

    layer: ClassVar[type[Layer]] = Layer

    def __init__(self, config: DFlashConfig, target_hidden: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.sights: tuple[Sight, ...] = tuple(zip(config.windows, config.causal, strict=True))
        self.fc = nn.Linear(len(config.taps) * target_hidden, width, bias=False)
        self.hidden_norm = Norm(width, eps)
        self.layers = nn.ModuleList(self.layer(config) for _ in self.sights)
        self.norm = Norm(width, eps)

    def forward(self, taps: torch.Tensor, x: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Rows that are whole texts: taps [b, s, T * w], block embeddings x [b, a, size, w], anchors [b, a].

        Returns:
            hidden after the norm, shaped as x.
        """
        length, block, device = taps.shape[1], x.shape[2], anchors.device
        places = torch.arange(length, device=device).expand(len(taps), -1)
        positions = (anchors.unsqueeze(-1) + torch.arange(block, device=device)).flatten(1)
        rules = {sight: drafted(torch.zeros_like(places), anchors, block, *sight) for sight in self.sights}
        shape = len(taps), positions.shape[1], length + positions.shape[1]
        masks = {sight: dense_mask(rule, *shape, device) for sight, rule in rules.items()}
        return self.packed(taps, x.flatten(1, 2), places, positions, masks).view_as(x)

    def packed(
        self,
        taps: torch.Tensor,
        x: torch.Tensor,
        places: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[Sight, Mask],
    ) -> torch.Tensor:
        """Rows of any texts: taps [b, s, T * w] at places [b, s], block rows x [b, n, w] at positions [b, n].

        Args:
            masks: who sees whom over [n, s + n], by ``sights`` of layers.

        Returns:
            hidden after the norm, shaped as x.
        """
        c = self.hidden_norm(self.fc(taps))
        for layer, sight in zip(self.layers, self.sights, strict=True):
            x = layer(x, c, places, positions, masks[sight])
        return self.norm(x)  # type: ignore[no-any-return]

    def loss(
        self,
        hidden: torch.Tensor,
        head: torch.Tensor,
        before: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of the weighted losses of drafted rows, and the ids [n] that would be drafted behind ``before``.

        Args:
            hidden: [n, w], of the head's dtype. head: [vocabulary, w], never trained.
            before, labels, weights: [n]; the right ids before, the right ids, and zero where a row is left out.
        """
        return head_loss(labels, weights, hidden, head)

    def learning(self) -> list[nn.Module]:
        """Return the parts whose matrices learn where the drafter is too large to learn as a whole."""
        return [self.layers[-1]]

    def borrowed(self, target: ScoringTarget, files: Checkpoint) -> tuple[Embed, torch.Tensor | None]:
        """Return what gives the rows of ids as blocks take them, and the head [vocabulary, w] of the checkpoint that
        drafts in the place of the target's; None where it has none.
        """
        return target.embed, None


def block_inputs(
    ids: torch.Tensor,
    anchors: torch.Tensor,
    embed: Embed,
    size: int,
    mask_id: int,
) -> torch.Tensor:
    """Embeddings [b, a, size, w] of [anchor, mask_id, ...] for anchors [b, a] in ids [b, s]."""
    block = torch.full((*anchors.shape, size), mask_id, device=ids.device)
    block[..., 0] = ids.gather(1, anchors)
    return embed(block)


MODULE = DraftModule
