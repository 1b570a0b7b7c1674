"""Describe how a long KV cache is split among programs: evenly, as measured for its kind, or by position alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from dflash_local.kernels.jit import power_of_two
from dflash_local.layout.attention import MIN_SPLIT_SIZE


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The kernel configuration of one cache's decode attention.

    Attributes:
        block_m: queries of a program, of those that share a KV head. block_kv: keys of its step.
        num_warps, num_stages: of a program. programs_per_sm: of even splits, for one multiprocessor.
    """

    block_m: int
    block_kv: int
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 1


# The one place where configurations are entered, as measured on an H100 (codes of one byte: on an H200): by the cache's
# bytes for a number and by head_dim, the next of these that is not smaller; there for the most queries that a program
# attends for.
CONFIGS = {
    (2, 64): (DecodeConfig(64, 128, programs_per_sm=2),),
    (2, 128): (DecodeConfig(64, 64), DecodeConfig(128, 64, num_warps=8)),
    (2, 256): (DecodeConfig(64, 32), DecodeConfig(128, 32, num_warps=8)),
    (1, 64): (DecodeConfig(64, 128, programs_per_sm=2),),
    (1, 128): (
        DecodeConfig(16, 128, programs_per_sm=2),
        DecodeConfig(64, 128, num_stages=2, programs_per_sm=2),
        DecodeConfig(128, 64, num_warps=8),
    ),
    (1, 256): (
        DecodeConfig(16, 64, programs_per_sm=2),
        DecodeConfig(64, 32, programs_per_sm=2),
        DecodeConfig(128, 64, num_warps=8),
    ),
}
# The same of a prompt's rows, which are many.
PREFILL_CONFIGS = {
    (2, 64): (DecodeConfig(128, 64, num_warps=8),),
    (2, 128): (DecodeConfig(128, 64, num_warps=8),),
    (2, 256): (DecodeConfig(128, 64, num_warps=8, num_stages=2),),
    (1, 64): (DecodeConfig(64, 64),),
    (1, 128): (DecodeConfig(64, 64),),
    (1, 256): (DecodeConfig(64, 32),),
}
MIN_DOT_DIM = 16  # rows, and dimensions of a head, that a tensor core takes at least
WARP_OUTPUTS = 16 * 256  # numbers of a program's output for each of its warps: twice as many do not fit its registers


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Hold what launches depend on. ``shared_memory``: bytes of a program. ``l2_cache_size``: bytes."""

    shared_memory: int
    num_sms: int
    compute_capability: tuple[int, int]
    l2_cache_size: int = 0


@cache
def device_properties(device: torch.device) -> DeviceProperties:
    found = torch.cuda.get_device_properties(device)
    shared = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return DeviceProperties(shared, found.multi_processor_count, (found.major, found.minor), found.L2_cache_size)


def decode_config(
    queries: int,
    head_dim: int,
    itemsize: int,
    shared_memory: int,
    configs: Mapping[tuple[int, int], tuple[DecodeConfig, ...]] = CONFIGS,
) -> DecodeConfig:
    """Return the configuration for so many queries to a KV head and caches of ``itemsize`` bytes a number, smaller
    where it exceeds the shared memory: a program holds its queries and, for each stage, a step's keys and values. Fewer
    stages (at least two) come before fewer queries, these before fewer keys.
    """
    widths = sorted({width for _, width in configs})
    entered = configs[(min(itemsize, 2), next((width for width in widths if head_dim <= width), widths[-1]))]
    config = next((each for each in entered if queries <= each.block_m), entered[-1])
    block_kv, num_warps, num_stages = config.block_kv, config.num_warps, config.num_stages
    wanted = max(power_of_two(queries), MIN_DOT_DIM)
    block_m = min(config.block_m, wanted, num_warps * WARP_OUTPUTS // head_dim)
    while block_m * head_dim * max(itemsize, 2) + 2 * num_stages * block_kv * head_dim * itemsize > shared_memory:
        if num_stages > 2:
            num_stages -= 1
        elif num_warps > 4:
            block_m, num_warps = block_m // 2, num_warps // 2
        elif block_kv > MIN_SPLIT_SIZE:
            block_kv //= 2
        else:
            break
    return replace(config, block_m=block_m, block_kv=block_kv, num_warps=num_warps, num_stages=num_stages)
