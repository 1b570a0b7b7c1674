"""Compiles and tries kernels in a child process, for ``kernel_trial``: a handler of ``worker.child``."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import expert_gemm, fragment_gemm
from dflash_local.kernels.kernel_record import Verdict
from dflash_local.kernels.kernel_trial import KernelTrial, TrialRequest


def answer(data: bytes) -> bytes:
    """Answer in JSON: ``verdict`` on the one kernel that is to be tried, or ``unable``, why nothing can be."""
    request: TrialRequest = pickle.loads(data)
    fragment_gemm.SOURCE = request.skinny
    expert_gemm.SOURCES.update(request.experts)
    device = torch.device(request.device)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # whose stream kernels are launched on
        torch.zeros(1, device=device)  # another process may have the device for itself
        if request.compile_only:
            _compile(request.trials, device)
            return b"{}"
        (trial,) = request.trials
        return json.dumps({"verdict": _verdict(trial, device)}).encode()
    except torch.OutOfMemoryError:
        return json.dumps({"unable": "the device has no memory left"}).encode()
    except MissingDependencyError as error:  # NVRTC where the parent finds it and a child does not: the user's site
        return json.dumps({"unable": f"the child process that tries kernels says: {error.message}"}).encode()
    except RuntimeError as error:
        return json.dumps({"unable": str(error).partition("\n")[0]}).encode()


def _compile(trials: tuple[KernelTrial, ...], device: torch.device) -> None:
    def one(trial: KernelTrial) -> None:
        with suppress(RuntimeError):  # its own trial will say it
            trial.compile(device)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, trials))


def _verdict(trial: KernelTrial, device: torch.device) -> Verdict:
    trial.prepare(device)
    try:
        if device.type == "cuda":
            trial.compile(device)
    except RuntimeError:
        return "uncompiled"
    try:
        return "right" if trial.passes(device) else "wrong"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return "fault"
