"""Describe how a long KV cache is split among programs: evenly, as measured for its kind, or by position alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from dflash_local.layout.attention import MIN_SPLIT_SIZE


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The kernel configuration of one cache's decode attention.

    Attributes:
        block_kv: keys of a program's step. num_warps, num_stages: of a program.
        programs_per_sm: of an even split, for one multiprocessor. min_split_size: keys of an even split, at least.
    """

    block_kv: int = 32
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 4
    min_split_size: int = 128


# The one place where configurations are entered, as measured on an H200: by the cache's bytes for a number and by
# head_dim, the next of these that is not smaller.
CONFIGS = {
    (2, 128): DecodeConfig(block_kv=32, num_stages=4, programs_per_sm=2),
    (2, 256): DecodeConfig(block_kv=32, num_stages=3, programs_per_sm=1),
    (1, 128): DecodeConfig(block_kv=64, num_stages=3, programs_per_sm=2),
    (1, 256): DecodeConfig(block_kv=32, num_stages=3, programs_per_sm=2),
}


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


def decode_config(block_m: int, head_dim: int, itemsize: int, shared_memory: int) -> DecodeConfig:
    """Return the configuration for caches of ``itemsize`` bytes a number, smaller where it exceeds the shared memory: a
    program holds its queries and, for each stage, a step's keys and values. Fewer stages (at least two) come before
    fewer keys.
    """
    config = CONFIGS[(min(itemsize, 2), 128 if head_dim <= 128 else 256)]
    block_kv, num_stages = config.block_kv, config.num_stages
    while block_m * head_dim * max(itemsize, 2) + 2 * num_stages * block_kv * head_dim * itemsize > shared_memory:
        if num_stages > 2:
            num_stages -= 1
        elif block_kv > MIN_SPLIT_SIZE:
            block_kv //= 2
        else:
            break
    return DecodeConfig(block_kv, config.num_warps, num_stages, config.programs_per_sm, config.min_split_size)
