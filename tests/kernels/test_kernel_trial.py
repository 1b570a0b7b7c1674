"""The first use of a kernel happens in a child process: what is wrong, faults or hangs there is found, and the next one
is tried all the same."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import cuda_driver, fragment_gemm, kernel_trial, nvrtc, product_check, trial_worker
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import FragmentFormat, FragmentWeight
from dflash_local.kernels.kernel_record import KernelRecord, record_of
from dflash_local.kernels.kernel_trial import TrialRequest, TrialsImpossibleError, try_kernels
from dflash_local.kernels.product_check import ProductCheck, many_rows
from dflash_local.kernels.product_trials import FragmentGemmTrial
from dflash_local.kernels.random_weight import random_weight
from dflash_local.worker.process import WorkerError
from tests.kernels.few_rows import FORMATS

CPU = torch.device("cpu")
KINDS = (*FORMATS.values(), replace(FORMATS["int4"], tail=24))
INT4, INT8 = FORMATS["int4"], FORMATS["int8, rows"]
# What each planted kernel does, by warps_k of its configuration.
PLANTED = """
import os
from dflash_local.kernels import fragment_gemm
from dflash_local.kernels.trial_worker import answer

right = fragment_gemm.linear

def planted(x, weight, out, config, residual=None):
    found = right(x, weight, out, None, residual)
    if config.warps_k == 2:
        os.abort()
    return found

fragment_gemm.linear = planted
"""


def trial(kind: FragmentFormat, warps_k: int, rows: int = 8) -> FragmentGemmTrial:
    return FragmentGemmTrial(kind, (48, 256), False, FragmentGemmConfig(warps_k, 1, 1, 2), rows)


def nobody(text: str, part: float) -> None:
    """Hears nothing."""


@pytest.fixture
def record(tmp_path: Path) -> KernelRecord:
    return KernelRecord(tmp_path / "cubins", {"card": "none"})


def test_each_planted_fault_is_found_and_the_next_kernel_is_tried(tmp_path: Path, record: KernelRecord) -> None:
    """One that hangs: ``test_ctrl_c_ends_a_child_that_hangs``, and what becomes of it with the answers below."""
    handler, faults = tmp_path / "planted_worker.py", {2: "fault", 4: "right"}
    handler.write_text(PLANTED)
    trials = [trial(INT4, warps_k) for warps_k in faults]
    heard: list[str] = []
    try_kernels(trials, CPU, record, lambda text, part: heard.append(text), handler)
    assert [record.verdicts[each.kernel] for each in trials] == [*faults.values()]
    last = len(trials)
    assert heard[0] == f"compiling {last} kernels on this card, once"
    assert heard[-1].startswith(f"trying kernel {last} of {last}")
    again = KernelRecord(tmp_path / "cubins", {"card": "none"})
    assert again.verdicts == record.verdicts
    try_kernels(trials, CPU, again, lambda text, part: pytest.fail("tried again"), tmp_path / "no_such_worker.py")


def ask(*trials: FragmentGemmTrial, compile_only: bool = False) -> object:
    """What the child answers, without one."""
    request = TrialRequest.of(CPU, trials, compile_only)
    return json.loads(trial_worker.answer(pickle.dumps(request)))


def test_kernels_of_every_format_pass_with_the_reference_in_their_place() -> None:
    assert ask(compile_only=True) == {}
    for kind in KINDS:
        for paired in (False, True)[: 1 if kind.tail else 2]:
            assert ask(FragmentGemmTrial(kind, (64, 512), paired, FragmentGemmConfig(), 8)) == {"verdict": "right"}


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), {"verdict": "fault"}),
        (torch.OutOfMemoryError("no room"), {"unable": "the device has no memory left"}),
    ],
)
def test_an_error_of_the_device_is_a_fault_and_a_full_one_no_verdict(
    error: Exception, answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*args: object) -> None:
        raise error

    monkeypatch.setattr(fragment_gemm, "linear", faulty)
    assert ask(trial(INT4, 1)) == answer


def test_a_compiler_that_only_the_child_lacks_gives_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the user's site, which a child does not look into: it was taken for a fault of every kernel."""

    def missing(*args: object) -> None:
        raise MissingDependencyError("the compiler NVRTC is not installed", "pip install it")

    monkeypatch.setattr(fragment_gemm, "compiled", missing)
    answer = {"unable": "the child process that tries kernels says: the compiler NVRTC is not installed"}
    assert ask(trial(INT4, 1), compile_only=True) == answer


class _Answers:
    """In place of the process: verdicts by configuration; counts what it is asked."""

    def __init__(self, verdicts: dict[int, str], unable: str = "") -> None:
        self.verdicts, self.unable, self.tried, self.closed = verdicts, unable, 0, 0
        self.starts = True  # again, once it has been closed

    def request(self, data: bytes, limits: object) -> bytes:
        asked = pickle.loads(data)
        if self.closed and not self.starts:
            raise WorkerError(late=False)
        if self.unable:
            return json.dumps({"unable": self.unable}).encode()
        if asked.compile_only:
            return b"{}"
        self.tried += 1
        if self.verdicts.get(asked.trials[0].config.warps_k) == "hang":
            raise WorkerError(late=True)
        return json.dumps({"verdict": self.verdicts.get(asked.trials[0].config.warps_k, "right")}).encode()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> _Answers:
    found = _Answers({})
    monkeypatch.setattr(kernel_trial, "WorkerProcess", lambda *args, **named: found)
    return found


def test_a_failed_configuration_is_not_tried_with_more_rows_and_a_format_that_keeps_failing_is_left(
    record: KernelRecord, answers: _Answers
) -> None:
    answers.verdicts = {1: "hang"} | dict.fromkeys(range(2, 20), "fault")
    trials = [trial(INT8, warps_k, rows) for warps_k in range(1, 10) for rows in (8, 16)]
    other = trial(INT4, 30)
    try_kernels([*trials, other], CPU, record, nobody)
    verdicts = [record.verdicts[each.kernel] for each in trials]
    assert verdicts[:4] == ["hang", "untried", "fault", "untried"]
    assert verdicts.count("fault") == kernel_trial.MAX_FAILURES - 1 and "right" not in verdicts
    assert record.is_right(other.kernel) and answers.tried == kernel_trial.MAX_FAILURES + 1
    assert answers.closed == kernel_trial.MAX_FAILURES + 1, "a new child after each failure"


def test_a_device_that_no_child_can_use_gives_no_verdicts(record: KernelRecord, answers: _Answers) -> None:
    answers.unable = "the device has no memory left"
    with pytest.raises(TrialsImpossibleError, match="no memory left"):
        try_kernels([trial(INT8, 5)], CPU, record, nobody)
    assert record.verdicts == {} and answers.closed == 1


def test_a_child_that_does_not_start_gives_no_verdicts(tmp_path: Path, record: KernelRecord) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(1)")
    with pytest.raises(TrialsImpossibleError, match="does not start"):
        try_kernels([trial(INT8, 5)], CPU, record, nobody, broken)
    assert record.verdicts == {}


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such signal")
def test_ctrl_c_ends_a_child_that_hangs(tmp_path: Path, record: KernelRecord) -> None:
    handler, pid = tmp_path / "sleeping.py", tmp_path / "pid"
    handler.write_text(
        "import os, threading\n"
        "asked = []\n"
        "def answer(data):\n"
        "    asked.append(data)\n"
        "    if len(asked) == 4:\n"  # it has started and compiled
        f"        open({str(pid)!r}, 'w').write(str(os.getpid()))\n"
        "        threading.Event().wait()\n"
        "    return b'{}'\n"
    )

    def interrupt() -> None:
        while not (pid.exists() and pid.read_text()):
            done.wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    done = threading.Event()
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, or a shell's background, ignores it
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        try_kernels([trial(INT8, 5)], CPU, record, nobody, handler)
    signal.signal(signal.SIGINT, before)
    thread.join()
    assert record.verdicts == {}
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


FAULTS = {
    "one feature of one row": lambda out: out[1, 9:10].add_(out.float().std()),
    "zeros": lambda out: out[3].fill_(1e-3),
    "beside the result": lambda out: out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_(),
    "not written": lambda out: out[-1, -1:].fill_(float("nan")),
}


@pytest.mark.parametrize("fault", [*FAULTS, "an unstable sum", "the residual left out", "a neighbour's code"])
def test_a_wrong_product_does_not_pass(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(INT4, (64, 512), CPU)
    check = ProductCheck(weight, False, many_rows(8, 512, CPU))
    assert check.passes(FragmentGemmConfig(), 8)
    right, calls = fragment_gemm.linear, [0]
    swapped = replace(weight, codes=weight.codes.clone())
    swapped.codes[0, 0, 0] = int(swapped.codes[0, 0, 0]) ^ 1  # one code of all

    def planted(
        x: torch.Tensor, given: FragmentWeight, out: torch.Tensor, config: object, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        calls[0] += 1
        if fault == "the residual left out":
            return right(x, given, out, None)
        found = right(x, swapped if fault == "a neighbour's code" else given, out, None, residual)
        if fault in FAULTS and len(x) > 3:
            FAULTS[fault](found)
        elif fault == "an unstable sum" and calls[0] % 2:
            found.mul_(1 + 2**-7)
        return found

    monkeypatch.setattr(product_check.fragment_gemm, "linear", planted)
    assert not check.passes(FragmentGemmConfig(), 8)


def test_records_are_kept_apart_by_card_driver_compiler_and_source(tmp_path: Path) -> None:
    facts = {"card": "A", "capability": [9, 0], "driver": 13000, "nvrtc": [13, 0], "source": "s"}
    others = [
        {**facts, name: value}
        for name, value in (("card", "B"), ("driver", 13010), ("nvrtc", [13, 1]), ("source", "t"))
    ]
    first = KernelRecord(tmp_path, facts)
    first.verdicts["kernel"] = "right"
    first.choose("product", "config", 12.345)
    assert KernelRecord(tmp_path, facts).is_right("kernel") and KernelRecord(tmp_path, facts).chosen("product") == (
        "config",
        12.35,
    )
    assert len({KernelRecord(tmp_path, each).path for each in (facts, *others)}) == 5
    assert not any(KernelRecord(tmp_path, each).verdicts for each in others)


def test_without_nvrtc_there_is_a_record_of_the_card_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of plain weights, which need no NVRTC, failed when its choices were to be kept."""

    def missing() -> None:
        raise MissingDependencyError("the compiler NVRTC is not installed", "pip install it")

    monkeypatch.setattr(nvrtc, "nvrtc", missing)
    monkeypatch.setattr(nvrtc, "cubin_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: 13000)
    record = record_of("cuda:0")
    record.choose("product", "the library's product", 3.0)
    assert record.facts["nvrtc"] is None and KernelRecord(tmp_path, record.facts).choices == record.choices


def test_processes_that_write_one_record_lose_nothing(tmp_path: Path) -> None:
    one, two = KernelRecord(tmp_path, {}), KernelRecord(tmp_path, {})
    one.verdicts["a"] = "right"
    one.save()
    two.verdicts["b"] = "hang"
    two.choose("product", "config", 12.345)
    third = KernelRecord(tmp_path, {})
    assert third.verdicts == {"a": "right", "b": "hang"} and third.choices == {"product": "config"}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1",
        "[]",
        '{"verdicts": 3}',
        '{"verdicts": {"a": "good", "b": 1, "c": []}, "choices": {"c": 2}, "microseconds": {"a": "1", "b": -1}}',
    ],
)
def test_a_damaged_record_is_an_empty_one(content: str, tmp_path: Path) -> None:
    path = KernelRecord(tmp_path, {}).path
    assert path is not None
    path.write_text(content)
    record = KernelRecord(tmp_path, {})
    assert record.verdicts == {} and record.choices == {} and record.microseconds == {}
    record.choose("product", "config", 12.345)
    assert KernelRecord(tmp_path, {}).choices == {"product": "config"}


def test_a_folder_that_cannot_be_written_costs_only_the_repetition(tmp_path: Path, answers: _Answers) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    for folder in (file / "cubins", None):
        record = KernelRecord(folder, {})
        for _ in range(2):
            try_kernels([trial(INT8, 5)], CPU, record, nobody)
        record.choose("product", "config", 12.345)
        assert record.is_right(trial(INT8, 5).kernel) and record.chosen("product") == ("config", 12.35)
        assert KernelRecord(folder, {}).verdicts == {}
    assert answers.tried == 2 and os.listdir(tmp_path) == ["file"]
