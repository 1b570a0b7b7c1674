"""Programs of several rows against those of one, bit by bit, in Triton's interpreter: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.kernels import delta_step, qk_norm_rope_cache
from dflash_local.kernels.qk_norm_rope_cache import HeadLayout
from tests.kernels.cache_interpreted import empty_cache, unequal

Found = Iterator[tuple[str, int]]
Results = tuple[torch.Tensor, ...]
TOGETHER = 8
NEAR = 1e-5

KINDS = {
    "plain": HeadLayout(4, 2, 16, 16),
    "partial rotary, gated, norm_plus_one": HeadLayout(4, 2, 16, 8, gated=True, norm_plus_one=True),
    "of no power of two": HeadLayout(2, 2, 24, 24),
    "of many layers": HeadLayout(0, 6, 16, 16, per_head_norms=True),
}


def run_by(together: int | None, run: Callable[[], Results]) -> Results:
    """Results of programs of so many rows; None: of the reference."""
    for module in (qk_norm_rope_cache, delta_step):
        patched: Any = module
        patched.runs_kernels = lambda _tensor: together is not None
        patched.rows_of_program = lambda _rows, _width: (together, 1 if together == 1 else 4)
    torch.manual_seed(0)
    return run()


def compared(name: str, run: Callable[[], Results], near: float = NEAR) -> Found:
    """Numbers whose bits depend on the rows of a program, and those that are not what the reference gives."""
    one, many, reference = (run_by(together, run) for together in (1, TOGETHER, None))
    yield f"together, {name}", sum(unequal(a, b) for a, b in zip(one, many, strict=True))
    pairs = zip(many, reference, strict=True)
    yield f"reference, {name}", sum(int(((a.double() - b.double()).abs() > near).sum()) for a, b in pairs)


def heads(kind: HeadLayout, rows: int, coded: bool, normed: bool = True, rings: bool = False) -> Results:
    """Queries, cache and gates of rows with biases; without norms one row of the codes is no number."""
    room, head_dim, kv_heads = 40, kind.head_dim, kind.num_kv_heads
    qkv, bias = torch.randn(rows, kind.qkv_size) * 3, torch.randn(kind.qkv_size)
    queries = torch.zeros(rows, max(kind.num_heads, 1), head_dim)
    angles, start = torch.rand(room, kind.rotary_dim // 2).repeat(1, 2), torch.tensor([9], dtype=torch.int32)
    weights = torch.rand(head_dim), torch.rand(kv_heads, head_dim) if kind.per_head_norms else torch.rand(head_dim)
    counts = torch.tensor([21 + head % 2 * 9 for head in range(kv_heads)])  # which a block's rows go around, or do not
    begins = torch.stack((counts.cumsum(0) - counts, counts), 1) if rings else None
    cache = empty_cache(kv_heads, 30 if rings else room, head_dim)
    if rings:
        cache = tuple(part.flatten(0, 1) for part in cache)
    if not coded:
        cache = tuple(part.float() for part in cache[:2])
    elif not normed:
        qkv[rows // 2, -1] = float("nan")
    qk_norm_rope_cache.qk_norm_rope_cache(
        qkv, weights if normed else None, 1e-6, (angles.cos(), angles.sin()), start, queries, cache, kind, bias, begins
    )
    gates = qkv[:, : 2 * kind.num_heads * head_dim].view(rows, -1, 2, head_dim)[:, :, 1:] if kind.gated else qkv[:0]
    return tuple(part.nan_to_num(-1.0) for part in (queries, *cache, gates))


def every_head() -> Found:
    for name, kind in KINDS.items():
        for coded in (False, True):
            # A sum in another order than the reference's may be another code.
            near = 1.0 if coded else NEAR
            yield from compared(f"{name}, coded {coded}", partial(heads, kind, 13, coded), near)
    many, plain = KINDS["of many layers"], KINDS["plain"]
    for coded in (False, True):
        near = 1.0 if coded else NEAR
        yield from compared(f"rings, coded {coded}", partial(heads, many, 19, coded, rings=True), near)
    yield from compared("without norms", lambda: heads(plain, 8, False, normed=False))
    yield from compared("no number among codes", lambda: heads(plain, 9, True, normed=False))


def gated_norms() -> Found:
    shape = GatedDeltaNetConfig(2, 4, 16, 8, 4)

    def run(turns: int) -> Results:
        out, projected, to = torch.randn(16, 4, 8), torch.randn(11, shape.projection_size), torch.zeros(11, 32)
        delta_step.gated_norm(out, projected, torch.rand(8), 1e-6, shape, to, turns)
        return (to,)

    for turns in (1, 2):
        yield from compared(f"gated norm in {turns} turns", partial(run, turns))


def checks() -> Found:
    """Numbers that are not what they should be, by check."""
    yield from every_head()
    yield from gated_norms()
