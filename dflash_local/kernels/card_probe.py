"""Measures on a CUDA device what ``planner.card_probe.CardProbe`` keeps of it. Takes a second beside compiling."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentFormat
from dflash_local.kernels.random_weight import random_weight
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.planner.card_probe import CardProbe

READ_BYTES = 2**31  # many times any cache
# 17 MB, which the caches of most cards hold: what is measured is the decoding of int4, not the memory.
SHAPE, ROWS = (8192, 4096), 16
INT4 = FragmentFormat("int4", (1, 128), False, torch.bfloat16)
LAUNCHES, REPLAYS = 200, 15


@torch.inference_mode()
def measure(device: torch.device) -> CardProbe:
    """Return the probe of an idle device, from a graph's replays; kernels are compiled first.

    Raises:
        KernelError: NVRTC is missing or no int4 product compiles. torch.OutOfMemoryError: 2.1 GiB are not free.
    """
    with torch.cuda.device(device):
        numbers = torch.zeros(READ_BYTES // 4, device=device)
        read_ms = replay_ms(numbers.sum, REPLAYS)
        small = numbers[:32]
        launches_ms = replay_ms(lambda: [small.add_(1) for _ in range(LAUNCHES)], REPLAYS)
        weight = random_weight(INT4, SHAPE, device)
        x = torch.randn(ROWS, SHAPE[1], device=device).bfloat16()
        out = x.new_empty(ROWS, SHAPE[0])
        configs = fragment_gemm.candidates(weight, False, ROWS, device_properties(device).shared_memory)
        fragment_gemm.compile_ahead(weight, False, ROWS, configs)

        def multiply(config: FragmentGemmConfig) -> None:
            for _ in range(LAUNCHES):
                fragment_gemm.linear(x, weight, out, config)

        products_ms = min(replay_ms(partial(multiply, config), REPLAYS) for config in configs)
        return CardProbe(
            card=torch.cuda.get_device_name(device),
            read_gb_s=READ_BYTES / read_ms / 1e6,
            product_us=1e3 * products_ms / LAUNCHES,
            launch_us=1e3 * launches_ms / LAUNCHES,
        )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(torch.device(sys.argv[1])))))
