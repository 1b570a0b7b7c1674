"""The first use of few-row kernels on a card, in a child process: what is wrong, faults or hangs there does no harm.

A fault of CUDA cannot be caught in the process that holds the model, and a kernel that does not end cannot be ended
but with its process. A child compiles the kernels and tries them one after the other (``trial_worker``); when it dies
or is late, the kernel at hand has its verdict and a new child goes on with the next.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from dflash_local import settings
from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.few_row_gemm import ROW_TILE, FewRowConfig, row_tiles
from dflash_local.kernels.fragment_packing import TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.kernel_record import KernelRecord, Verdict
from dflash_local.worker.process import Limits, WorkerError, WorkerProcess

HANDLER = Path(__file__).with_name("trial_worker.py")
LIBRARIES = ("dflash_local", "torch", "triton")
TRIAL_S = 30.0  # of one kernel; with a new child's first use of CUDA
COMPILE_S = 3.0  # of one kernel, of many that are compiled side by side
MAX_CODES = 2**27  # of a weight that is tried: rows beyond are left out
MAX_FAILURES = 6  # after which the rest of a format is left out
BAD = ("wrong", "fault", "hang")
ONCE = "on this card, once"
Say = Callable[[str, float], None]  # what is being done, and how much of all is done (0..1)


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel, and the product that it is tried with.

    Attributes:
        format, shape: of the weight, [N, K]. paired: gate and up. rows: that a launch takes at most.
    """

    format: FragmentFormat
    shape: tuple[int, int]
    paired: bool
    config: FewRowConfig
    rows: int

    @property
    def kernel(self) -> str:
        """Its name in a ``KernelRecord``: what it is compiled with, and how many rows it multiplies."""
        options = few_row_gemm.compile_options(self.format, self.shape[1], self.config, self.rows, self.paired)
        return " ".join([*options, f"N={self.shape[0]}", f"TAIL={self.format.tail}"])


@dataclass(frozen=True, slots=True)
class Request:
    """What the child is asked.

    Attributes:
        source: of the kernels. compile_only: to compile all trials' kernels; else the one trial is to be tried.
    """

    source: Path
    device: str
    trials: tuple[Trial, ...]
    compile_only: bool


class TrialsImpossibleError(Exception):
    """No child can use the device; in words for a user."""


def trials_of(weight: FragmentWeight, paired: bool, config: FewRowConfig, rows: int) -> tuple[Trial, ...]:
    """The kernels that a configuration's products of up to ``rows`` rows launch."""
    n, k = weight.shape
    unit = TILE_N * (2 if paired else 1)
    most = max(MAX_CODES // k // unit, 1) * unit
    tiles = range(1, row_tiles(rows) + 1)
    return tuple(Trial(weight.format, (min(n, most), k), paired, config, each * ROW_TILE) for each in tiles)


def try_kernels(
    trials: Iterable[Trial], device: torch.device, record: KernelRecord, say: Say, handler: Path = HANDLER
) -> None:
    """Enter a verdict for every kernel that has none.

    Args:
        say: hears what is done, and the share that is done. handler: what the child runs.

    Raises:
        TrialsImpossibleError: the child cannot use the device.
    """
    new = tuple({trial.kernel: trial for trial in trials if trial.kernel not in record.verdicts}.values())
    if not new:
        return
    process = WorkerProcess(handler, LIBRARIES, environ=settings.load().environ, writes=True)
    failures: Counter[FragmentFormat] = Counter()
    failed: set[Trial] = set()
    try:
        say(f"compiling {len(new)} kernels {ONCE}", 0.0)
        _begin(process, device)
        with suppress(WorkerError):  # each is compiled again by its own trial
            _ask(process, Request(few_row_gemm.SOURCE, str(device), new, True), TRIAL_S + COMPILE_S * len(new))
        for number, trial in enumerate(new):
            say(f"trying kernel {number + 1} of {len(new)} {ONCE}", number / len(new))
            config = replace(trial, rows=0)  # of no use once one of its kernels has failed
            verdict: Verdict = "untried"
            if failures[trial.format] < MAX_FAILURES and config not in failed:
                _begin(process, device)  # where a new child is due: that it does not start is no kernel's fault
                verdict = _verdict(process, trial, device)
            if verdict in BAD:
                failures[trial.format] += 1
                failed.add(config)
                process.close()  # whatever such a kernel has done to its process, the next one must not suffer
            record.verdicts[trial.kernel] = verdict
            record.tried += verdict != "untried"
    finally:
        process.close()
        record.save()


def _begin(process: WorkerProcess, device: torch.device) -> None:
    """Start a child that uses the device: a later failure is a kernel's."""
    try:
        _ask(process, Request(few_row_gemm.SOURCE, str(device), (), True), TRIAL_S)
    except (WorkerError, MissingDependencyError) as error:
        raise TrialsImpossibleError("the child process that tries kernels does not start") from error


def _verdict(process: WorkerProcess, trial: Trial, device: torch.device) -> Verdict:
    try:
        return cast(Verdict, _ask(process, Request(few_row_gemm.SOURCE, str(device), (trial,), False), TRIAL_S))
    except WorkerError as error:
        return "hang" if error.late else "fault"


def _ask(process: WorkerProcess, request: Request, seconds: float) -> object:
    answer = json.loads(process.request(pickle.dumps(request), Limits(seconds)))
    if "unable" in answer:
        raise TrialsImpossibleError(answer["unable"])
    return answer.get("verdict")
