"""Attention over windows that several texts share, and who sees whom there; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

Mask = torch.Tensor | BlockMask  # dense: [b, 1, n, s], True where visible
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # batch, head, query, key


@cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    """Return what makes a mask, compiled where it is first needed: importing the compiler takes a second."""
    return torch.compile(create_block_mask, dynamic=False)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scale: float | None = None) -> torch.Tensor:
    """Attention of q [b, h, n, d] over k and v [b, h / group, s, d]; the scale is 1 / sqrt(d) unless told."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    if isinstance(mask, BlockMask):
        found = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        assert isinstance(found, torch.Tensor)
        return found
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def same_text(texts: torch.Tensor) -> Rule:
    """Causal within each text; texts [b, s]: which one a place belongs to."""

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (texts[b, q] == texts[b, k])

    return seen


def drafted(
    texts: torch.Tensor, anchors: torch.Tensor, size: int, window: int | None = None, causal: bool = False
) -> Rule:
    """Of blocks of ``size`` rows at anchors [b, a]: the places of the same text before the anchor, and the own block.
    Keys are the s places, then the rows.

    Args:
        window: so many keys to either side are seen, the own one included; None: all. causal: none of a later row.
    """
    length = texts.shape[1]
    of_anchor = texts.gather(1, anchors)

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        block, context = q // size, k < length
        place = torch.where(context, k, 0)
        before = (place < anchors[b, block]) & (texts[b, place] == of_anchor[b, block])
        found = torch.where(context, before, (k - length) // size == block)
        back = anchors[b, block] + q % size - torch.where(context, k, anchors[b, block] + (k - length) % size)
        if causal:
            found = found & (back >= 0)
        return found if window is None else found & (back.abs() < window)

    return seen


def mask_of(rule: Rule, batch: int, queries: int, keys: int, device: torch.device) -> Mask:
    """In blocks on CUDA, where flex attention skips what nobody sees; dense elsewhere."""
    if device.type != "cuda":
        return dense_mask(rule, batch, queries, keys, device)
    made = _compiled_block_mask()(rule, batch, None, queries, keys, device=device)
    assert isinstance(made, BlockMask)
    return made


def dense_mask(rule: Rule, batch: int, queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[b, 1, queries, keys], for shapes that come once."""
    return create_mask(rule, batch, 1, queries, keys, device=str(device))
