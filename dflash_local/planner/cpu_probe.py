"""How fast this machine's CPU works through weights: probed once, by numpy, and kept in the cache folder."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_local.planner import hardware
from dflash_local.store.kept import keep, read_kept

FILE = "cpu.json"
ROWS = (1, 8, 16)  # of the products that are probed: a plain step, and blocks
BYTES = 512 * 2**20  # of the matrix: more than the caches hold, so that it is read from memory
COLUMNS = 4096
SECONDS = 2.5  # for the rounds of one product; all of them and the matrix stay below ten
ROUNDS = 12  # at most
QUIET_S, BUSY = 0.3, 30.0  # seconds of watching, and percent of all cores


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Holds bytes of float32 weights a second, by the rows that they are multiplied with, of one CPU."""

    cpu: str
    rates: Mapping[int, float]

    def rate(self, rows: int) -> float:
        """Interpolate in seconds a byte between the probed rows; beyond the most of them these grow with the rows."""
        low = max(each for each in ROWS if each <= rows)
        high = min((each for each in ROWS if each >= rows), default=low)
        share = 0.0 if high == low else (rows - low) / (high - low)
        seconds = (1 - share) / self.rates[low] + share / self.rates[high]
        return 1 / (seconds * max(1.0, rows / ROWS[-1]))


def this_cpu(environ: Mapping[str, str]) -> str:
    """Name what a probe holds for: the processor, its cores, the memory, and the threads that a user allows."""
    threads = environ.get("OMP_NUM_THREADS", "all")
    memory = round(hardware.memory().total / 2**30)
    return f"{hardware.processor()}, {os.cpu_count()} cores, {memory} GiB, {threads} threads, {platform.machine()}"


def read(folder: Path | None, cpu: str) -> CpuRates | None:
    """Read the kept probe of this CPU; None where there is none, or the file is not as it should be."""

    def checked(entry: Any) -> CpuRates | None:
        rates = {int(rows): float(rate) for rows, rate in entry["rates"].items()}
        right = entry["cpu"] == cpu and set(rates) == set(ROWS) and all(0 < rate < 1e15 for rate in rates.values())
        return CpuRates(cpu, rates) if right else None

    return read_kept(None if folder is None else folder / FILE, checked)


def add(folder: Path | None, found: CpuRates) -> None:
    """Keep a probe in the place of the one before."""
    if folder is not None:
        keep(folder / FILE, json.dumps(asdict(found), indent=1) + "\n")


def is_quiet() -> bool:
    """Return False where other programs keep a good part of the CPU busy now: a probe beside them tells too little."""
    import psutil

    return float(psutil.cpu_percent(interval=QUIET_S)) < BUSY


def probe(cpu: str, size: int = BYTES) -> CpuRates:
    """Measure this CPU, with as many threads as numpy takes, which are those that torch takes: ten seconds at most.

    Args:
        size: bytes of the matrix.
    """
    import numpy as np

    weights = np.full((size // 4 // COLUMNS, COLUMNS), 1e-3, dtype=np.float32)
    return CpuRates(cpu, {rows: _rate(weights, np.ones((rows, COLUMNS), dtype=np.float32)) for rows in ROWS})


def _rate(weights: Any, inputs: Any) -> float:
    """Measure the fastest round: what else runs at the same time only makes rounds slower."""
    fastest, until = float("inf"), time.perf_counter() + SECONDS
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        inputs @ weights.T  # as a linear layer computes it
        fastest = min(fastest, time.perf_counter() - begun)
        if time.perf_counter() > until:
            break
    return float(weights.nbytes) / fastest
