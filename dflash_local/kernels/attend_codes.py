"""Attention over the splits of a cache of int8 codes on Hopper, by ``attend_codes.cu``: for up to 96 queries that share
a KV head of 256 dimensions. What it writes is what the first launch of ``decode_attention`` writes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from dflash_local.kernels import cuda_driver, nvrtc
from dflash_local.kernels.qk_norm_rope_cache import Cache, coded

SOURCE = Path(__file__).with_name("attend_codes.cu")
HOPPER, HEAD_DIM, THREADS = (9, 0), 256, 256
MOST_QUERIES, QUERY_STEP = 96, 16  # more outputs do not fit the registers; products are compiled for multiples
STEP = 128  # keys of a program's step, of which every split is a multiple
PANEL = 128  # bytes of a swizzled row


def compile_options(num_heads: int, num_kv_heads: int, queries: int, splits_per_doubling: int) -> list[str]:
    """Return the compiler's command line for ``attend_codes.cu``, but for the card. ``queries``: rounded up."""
    sizes = {"NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "QUERIES": queries}
    sizes["SPLITS_PER_DOUBLING"] = splits_per_doubling
    return ["--std=c++17", *(f"-D{name}={size}" for name, size in sizes.items())]


def shared_bytes(queries: int) -> int:
    """Sum queries in two parts, two steps of codes and scales, a step's weights, and numbers of each query."""
    codes, weights = 2 * 2 * STEP * (HEAD_DIM + 4), 2 * PANEL * queries
    return 2 * HEAD_DIM * queries + codes + weights + 4 * queries * (3 + THREADS // 32)


def takes(queries: torch.Tensor, cache: Cache) -> bool:
    """Return True for queries [M, heads, head_dim] and a cache of the kinds that it is for."""
    return queries.is_cuda and queries.dtype == torch.bfloat16 and queries.shape[2] == HEAD_DIM and len(cache) > 2


def kernel(
    device: torch.device, rows: int, num_heads: int, num_kv_heads: int, splits_per_doubling: int
) -> cuda_driver.LoadedKernel | None:
    """Load the kernel for so many rows; None for too many, and where it does not run: then Triton's does the same."""
    queries = -(-rows * num_heads // num_kv_heads // QUERY_STEP) * QUERY_STEP
    return None if queries > MOST_QUERIES else _loaded(device, num_heads, num_kv_heads, queries, splits_per_doubling)


@cache
def _loaded(
    device: torch.device, num_heads: int, num_kv_heads: int, queries: int, splits_per_doubling: int
) -> cuda_driver.LoadedKernel | None:
    capability = torch.cuda.get_device_capability(device)
    if capability != HOPPER or nvrtc.why_not(capability):
        return None
    options = compile_options(num_heads, num_kv_heads, queries, splits_per_doubling)
    try:
        compiled = cuda_driver.cubin(SOURCE.read_text(encoding="utf-8"), options, device, own_instructions=True)
    except RuntimeError:  # a compiler older than these instructions
        return None
    found = cuda_driver.LoadedKernel(compiled, SOURCE.stem, THREADS, shared_bytes(queries), device)
    return found if _is_right(found, queries * num_kv_heads // num_heads, num_heads, num_kv_heads, device) else None


class _Launchable(Protocol):
    def launch(self, blocks: int, arguments: Sequence[cuda_driver.Argument]) -> None: ...


def launch(
    found: _Launchable,
    queries: torch.Tensor,
    cache: Cache,
    start: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    splits: int,
    split_size: int,
    scale: float,
) -> None:
    """Write the partial results of so many splits: outputs and softmax statistics, as ``SplitKV`` has them.

    Args:
        queries: [M, heads, head_dim] bfloat16. cache: codes of keys and values, and their scales; no ring.
    """
    num_kv_heads, capacity = cache[0].shape[:2]
    sizes = (len(queries), partials[0].shape[1], ctypes.c_float(scale), capacity, split_size)
    found.launch(num_kv_heads * splits, (queries, *cache, start, *partials, *sizes))


def _is_right(found: _Launchable, rows: int, num_heads: int, num_kv_heads: int, device: torch.device) -> bool:
    """Return True where a kernel attends over two splits, to later keys more and more, as PyTorch does, to rounding."""
    generator, splits, split_size = torch.Generator().manual_seed(0), 2, 3 * STEP
    length = splits * split_size
    start = length - rows - 1

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, HEAD_DIM, generator=generator).to(device)

    queries, growth = random(rows, num_heads).bfloat16(), torch.linspace(0.1, 4, length, device=device)[:, None]
    keys, values = coded(random(num_kv_heads, length) * growth), coded(random(num_kv_heads, length))
    outputs, stats = (torch.full((splits, rows, num_heads, n), float("nan"), device=device) for n in (HEAD_DIM, 2))
    at = torch.tensor([start], dtype=torch.int32, device=device)
    small: Cache = (keys[0], values[0], keys[1], values[1])
    launch(found, queries, small, at, (outputs, stats), splits, split_size, HEAD_DIM**-0.5)
    shares = torch.exp2(stats[..., :1] - stats[..., :1].amax(0))
    result = (outputs * shares).sum(0) / (stats[..., 1:] * shares).sum(0)
    k, v = ((codes * scales).repeat_interleave(num_heads // num_kv_heads, 0) for codes, scales in (keys, values))
    seen = torch.arange(length, device=device) <= start + torch.arange(rows, device=device)[:, None]
    scores = torch.einsum("mhd,hkd->hmk", queries.float(), k) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.allclose(result, torch.einsum("hmk,hkd->mhd", weights, v), rtol=0, atol=0.02)
