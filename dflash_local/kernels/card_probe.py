"""Measures on a CUDA device what ``planner.card_probe.CardProbe`` keeps of it. Takes a second beside compiling.

    python -m dflash_local.kernels.card_probe cuda:0 [cuda:1]

With a second device the way there and back is measured, too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

import torch

from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentFormat
from dflash_local.kernels.link import Link
from dflash_local.kernels.random_weight import random_weight
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import replay_ms
from dflash_local.planner.card_probe import CardProbe, LinkProbe

READ_BYTES = 2**31  # many times any cache
# 17 MB, which the caches of most cards hold: what is measured is the decoding of int4, not the memory.
SHAPE, ROWS = (8192, 4096), 16
INT4 = FragmentFormat("int4", (1, 128), False, torch.bfloat16)
LAUNCHES, REPLAYS = 200, 15
HIDDEN, CROSSINGS = 5120, 50  # the width of a 27B's hidden states


@torch.inference_mode()
def measure(device: torch.device, second: torch.device | None = None) -> CardProbe:
    """Return the probe of an idle device, from a graph's replays; kernels are compiled first.

    Args:
        second: the device to which the way is measured; None for a device by itself.

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
            link=None if second is None else measure_link(device, second),
        )


@torch.inference_mode()
def measure_link(home: torch.device, away: torch.device) -> LinkProbe:
    """Return how long rows take to another device and back, with a small launch at either end."""
    rows = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device=home)
    landed = torch.empty_like(rows, device=away)

    def us(staged: bool) -> float:
        link = Link(home, away, staged)

        def cross() -> None:
            for _ in range(CROSSINGS):
                rows.add_(1)
                with link.away_from_home():
                    link.carry(rows, landed)
                    landed.add_(1)
                    link.carry(landed, rows)

        return 1e3 * replay_ms(cross, REPLAYS) / CROSSINGS

    with torch.cuda.device(home):
        peers = torch.cuda.can_device_access_peer(home, away)
        return LinkProbe(torch.cuda.get_device_name(away), us(staged=False) if peers else None, us(staged=True))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(*map(torch.device, sys.argv[1:])))))
