"""Compiles and tries few-row kernels in a child process, for ``kernel_trial``: a handler of ``worker.child``."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

import torch

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import few_row_gemm
from dflash_local.kernels.fragment_packing import FragmentFormat, FragmentWeight
from dflash_local.kernels.kernel_record import Verdict
from dflash_local.kernels.kernel_trial import Request, Trial
from dflash_local.kernels.product_check import ProductCheck, many_rows
from dflash_local.kernels.random_weight import random_weight


def answer(data: bytes) -> bytes:
    """JSON: ``verdict`` on the one kernel that is to be tried, or ``unable``, why nothing can be tried here."""
    request: Request = pickle.loads(data)
    few_row_gemm.SOURCE = request.source
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


def _compile(trials: tuple[Trial, ...], device: torch.device) -> None:
    def one(trial: Trial) -> None:
        with suppress(RuntimeError):  # its own trial will say it
            few_row_gemm.compiled(device, trial.format, trial.shape[1], trial.config, trial.rows, trial.paired)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, trials))


def _verdict(trial: Trial, device: torch.device) -> Verdict:
    check = _check(trial.format, trial.shape, trial.paired, trial.rows, device)
    try:
        if device.type == "cuda":
            few_row_gemm.compiled(device, trial.format, trial.shape[1], trial.config, trial.rows, trial.paired)
    except RuntimeError:
        return "uncompiled"
    try:
        return "right" if check.passes(trial.config, trial.rows) else "wrong"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return "fault"


@lru_cache(maxsize=1)
def _check(kind: FragmentFormat, shape: tuple[int, int], paired: bool, rows: int, device: torch.device) -> ProductCheck:
    return ProductCheck(_weight(kind, shape, device), paired, many_rows(rows, shape[1], device))


@lru_cache(maxsize=1)
def _weight(kind: FragmentFormat, shape: tuple[int, int], device: torch.device) -> FragmentWeight:
    return random_weight(kind, shape, device)
