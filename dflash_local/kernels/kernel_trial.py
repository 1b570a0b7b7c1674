"""The first use of skinny GEMM kernels, experts' too, on a card, in a child process, where faults and hangs do no harm.

A fault of CUDA cannot be caught, nor a kernel ended, but with its process. A child compiles the kernels and tries one
after the other (``trial_worker``); when it dies or is late, the kernel has its verdict and a new child goes on.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch

from dflash_local import settings
from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import expert_gemm, fragment_gemm
from dflash_local.kernels.kernel_record import KernelRecord, Verdict
from dflash_local.worker.process import ChildLimits, WorkerError, WorkerProcess

HANDLER = Path(__file__).with_name("trial_worker.py")
LIBRARIES = ("dflash_local", "torch", "triton")
TRIAL_S = 30.0  # of one kernel; with a new child's first use of CUDA
COMPILE_S = 3.0  # of one kernel, of many that are compiled side by side
MAX_FAILURES = 6  # after which the rest of a group is left out
BAD = ("wrong", "fault", "hang")
ONCE = "on this card, once"
OnProgress = Callable[[str, float], None]  # what is being done, and how much of all is done (0..1)


class KernelTrial(Protocol):
    """One kernel, and what it is tried with; equal for equal ones, and picklable."""

    @property
    def kernel(self) -> str:
        """Return its name in a ``KernelRecord``: what it is compiled with, and what else it is tried for."""

    @property
    def configuration(self) -> object:
        """Return what is equal for kernels of one configuration, which is of no use once one of them has failed."""

    @property
    def group(self) -> object:
        """Return what is equal for kernels of a product and format: ``MAX_FAILURES`` of them leave out the rest."""

    def compile(self, device: torch.device) -> None:
        """Compile it. Raises RuntimeError: the compiler refuses it. MissingDependencyError: there is no compiler."""

    def passes(self, device: torch.device) -> bool:
        """Return True where it gives PyTorch's numbers, twice the same, and writes to no more memory than its results.

        Raises:
            RuntimeError: a fault of the device. MissingDependencyError: there is no compiler.
        """

    def prepare(self, device: torch.device) -> None:
        """Make all that ``passes`` needs but the kernel; whatever fails here is not its fault."""


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Tell the child what to do. ``skinny``, ``experts``: sources. ``compile_only``: compile all, else try the one."""

    skinny: Path
    experts: Mapping[str, Path]
    device: str
    trials: tuple[KernelTrial, ...]
    compile_only: bool

    @classmethod
    def of(cls, device: torch.device, trials: tuple[KernelTrial, ...], compile_only: bool) -> TrialRequest:
        return cls(fragment_gemm.SOURCE, dict(expert_gemm.SOURCES), str(device), trials, compile_only)


class TrialsImpossibleError(Exception):
    """No child can use the device; in words for a user."""


def try_kernels(
    trials: Iterable[KernelTrial],
    device: torch.device,
    record: KernelRecord,
    progress: OnProgress,
    handler: Path = HANDLER,
) -> None:
    """Enter verdicts for kernels without. ``progress``: what is done, its share. Raises TrialsImpossibleError."""
    new = tuple({trial.kernel: trial for trial in trials if trial.kernel not in record.verdicts}.values())
    if not new:
        return
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the child needs some of the device's memory
    process = WorkerProcess(handler, LIBRARIES, environ=settings.load().environ, writes=True)
    failures: Counter[object] = Counter()
    failed: set[object] = set()
    try:
        progress(f"compiling {len(new)} kernels {ONCE}", 0.0)
        _begin(process, device)
        with suppress(WorkerError):  # each is compiled again by its own trial
            _request(process, TrialRequest.of(device, new, True), TRIAL_S + COMPILE_S * len(new))
        for number, trial in enumerate(new):
            progress(f"trying kernel {number + 1} of {len(new)} {ONCE}", number / len(new))
            verdict: Verdict = "untried"
            if failures[trial.group] < MAX_FAILURES and trial.configuration not in failed:
                _begin(process, device)  # where a new child is due: that it does not start is no kernel's fault
                verdict = _verdict(process, trial, device)
            if verdict in BAD:
                failures[trial.group] += 1
                failed.add(trial.configuration)
                process.close()  # whatever such a kernel has done to its process, the next one must not suffer
            record.verdicts[trial.kernel] = verdict
            record.tried += verdict != "untried"
    finally:
        process.close()
        record.save()


def _begin(process: WorkerProcess, device: torch.device) -> None:
    """Start a child that uses the device: a later failure is a kernel's."""
    try:
        _request(process, TrialRequest.of(device, (), True), TRIAL_S)
    except (WorkerError, MissingDependencyError) as error:
        raise TrialsImpossibleError("the child process that tries kernels does not start") from error


def _verdict(process: WorkerProcess, trial: KernelTrial, device: torch.device) -> Verdict:
    try:
        return cast(Verdict, _request(process, TrialRequest.of(device, (trial,), False), TRIAL_S))
    except WorkerError as error:
        return "hang" if error.late else "fault"


def _request(process: WorkerProcess, request: TrialRequest, seconds: float) -> object:
    answer = json.loads(process.request(pickle.dumps(request), ChildLimits(seconds)))
    if "unable" in answer:
        raise TrialsImpossibleError(answer["unable"])
    return answer.get("verdict")
