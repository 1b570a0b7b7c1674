"""Generations of cards that kernels are compiled for."""

from __future__ import annotations

# KiB of shared memory for one block, by compute capability: A100, GeForce 30 and 40, H100, B200, GeForce 50.
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
TRITON_CARDS = (80, 86, 89, 90, 120)  # of these, those that Triton's kernels are compiled for ahead of time
