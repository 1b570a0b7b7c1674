"""Kernels that cannot be compiled: ``auto`` takes the reference engine and says so in a line, ``fused`` is an error."""

from __future__ import annotations

import errno
import subprocess
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.catalog.bundled import find
from dflash_local.engine import LoadConfig, Session, engines, load, load_fused
from dflash_local.errors import DoesNotFitError, EngineError, KernelError, MissingDependencyError, NumericsError
from dflash_local.kernels import jit, nvrtc, triton_trial
from dflash_local.models.fused.moe import MoEWeights
from dflash_local.planner import software
from dflash_local.planner.software import Compiler
from tests.engine_sessions import ask, random_prompt
from tests.families import save_model

PROMPT = random_prompt(8)
CPU = LoadConfig(device="cpu")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is found of Triton is kept for the process."""
    found = triton_trial.why_not
    found.cache_clear()
    yield
    found.cache_clear()


class _Failing:
    """A kernel whose launch fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*_: object) -> None:
            raise self.error

        return launch


CALLED = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])


@pytest.mark.parametrize(
    "error, headers, line, install",
    [
        (RuntimeError(f"{triton_trial.NO_COMPILER}. Please specify"), True, "no C compiler was found", "gcc"),
        (CALLED, False, "Python.h is missing", "apt-get install python3-dev"),
        (CALLED, True, "the C compiler failed", "gcc"),
        (AssertionError("libcuda.so cannot found!\nsecond line"), True, "AssertionError: second line", "doctor"),
        (ImportError("undefined symbol: x"), True, "ImportError: undefined symbol", "reinstall"),
        (OSError(errno.EROFS, "Read-only file system"), True, "keep what it compiles: Read-only", "TRITON_CACHE_DIR"),
        (PermissionError(errno.EACCES, "Permission denied"), True, "compiles: Permission denied", "TRITON_CACHE_DIR"),
    ],
)
def test_why_triton_cannot_compile_is_one_line_with_what_to_install(
    error: Exception, headers: bool, line: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_trial, "_add_one", _Failing(error))
    monkeypatch.setattr(software, "c_compiler", lambda chosen: Compiler("/usr/bin/gcc", headers))
    found = triton_trial.why_not("cpu")
    assert found is not None and line in found.message and install in found.hint
    assert "\n" not in str(found) and found.exit_code == 7


def test_a_kernel_that_computes_nothing_is_not_taken_for_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trial, "_add_one", {(1,): lambda numbers: None})
    found = triton_trial.why_not("cpu")
    assert found is not None and "wrong numbers" in found.message


def plant(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused engine is the choice, and fails with the error while it loads."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "")
    monkeypatch.setattr(load_fused, "_load", fail)


FAULTS = [CALLED, OSError(errno.ENOSPC, "No space left on device")]
if jit.HAVE_TRITON:
    FAULTS.append(triton_trial.COMPILE_ERRORS[-1]("out of shared memory"))


def test_kernels_that_fail_at_load_leave_the_reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    want = ask(load(find("demo"), CPU), PROMPT, 12).ids
    for fault in FAULTS:
        plant(fault, monkeypatch)
        session = load(find("demo"), CPU)
        (line,) = [notice for notice in session.facts.notices if "reference engine" in notice]
        assert "Triton cannot " in line and "\n" not in line
        assert session.facts.engine == "reference"
    assert ask(session, PROMPT, 12).ids == want


@pytest.mark.parametrize("options", [{"engine": "fused"}, {"exact": True}])
def test_an_engine_that_was_asked_for_is_an_error_not_another_one(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(CALLED, monkeypatch)
    with pytest.raises(KernelError, match="Triton cannot compile kernels") as caught:
        load(find("demo"), LoadConfig(device="cpu", **options))  # type: ignore[arg-type]
    assert caught.value.hint


def test_other_faults_of_a_load_are_not_hidden_by_the_reference_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(NumericsError("not a fault of the compiler"), monkeypatch)
    with pytest.raises(EngineError, match="not a fault of the compiler"):
        load(find("demo"), CPU)
    plant(PermissionError(errno.EACCES, "of a file that is read"), monkeypatch)
    with pytest.raises(Exception, match="of a file that is read") as caught:
        load(find("demo"), CPU)
    assert not isinstance(caught.value, KernelError)


def test_why_a_card_is_passed_over_names_the_first_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(load_fused, "why_no_kernels", lambda device: "triton is not installed")
    assert load_fused.why_not_on("cuda:0", True) == "triton is not installed"
    monkeypatch.setattr(load_fused, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(triton_trial, "why_not", lambda device: KernelError("no C compiler", "install gcc"))
    assert load_fused.why_not_on("cuda:0", True) == "no C compiler (install gcc)"
    monkeypatch.setattr(triton_trial, "why_not", lambda device: None)
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: MissingDependencyError("no NVRTC", "pip install it"))
    assert load_fused.why_not_on("cuda:0", True) == ""
    assert load_fused.why_not_on("cuda:0", False) == "no NVRTC (pip install it)"


# An engine that finds only while it loads that it cannot run a pair here

WHY = "no kernel for these experts is known to be right: of 17 kernels 17 faulted on this card"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("mixture") / "target")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """A tensor of the weights that the fused engine reads, as on a card whose kernels for experts fail."""
    found: list[weakref.ref[Any]] = []

    def choose_experts(parts: Iterable[object], *args: object) -> None:
        mixture = next(part for part in parts if isinstance(part, MoEWeights))
        found.append(weakref.ref(mixture.experts.gate_up.weight))
        raise KernelError(WHY, "load it with --engine reference")

    monkeypatch.setattr(load_fused, "why_not_on", lambda device, dense: "")
    monkeypatch.setattr(load_fused, "choose_experts", choose_experts)
    return found


def opened(target: Path, **options: Any) -> Session:
    return load(find(str(target), None), LoadConfig(dtype="float32", device="cpu", **options))


def test_auto_takes_the_reference_engine_and_a_notice_says_why(
    target: Path, read: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[object] = []
    right = engines.load_reference.load_target

    def load_target(*args: Any) -> Any:
        held.append(read[0]())
        return right(*args)

    monkeypatch.setattr(engines.load_reference, "load_target", load_target)
    session = opened(target)
    assert session.facts.load.engine == "reference" and len(read) == 1
    assert sum(WHY in notice for notice in session.facts.notices) == 1
    assert held == [None], "the fused engine's weights are free before the reference engine reads them"
    want = opened(target, engine="reference")
    assert not any(engines.SLOWER in notice for notice in want.facts.notices)
    assert ask(session, PROMPT, 8, mode="ar").ids == ask(want, PROMPT, 8, mode="ar").ids


def test_a_reference_engine_that_does_not_fit_says_why_it_was_taken(
    target: Path, read: list[weakref.ref[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engines.load_reference, "load_target", full)
    with pytest.raises(DoesNotFitError, match=f"{WHY}.*; and the device has no memory"):
        opened(target)


@pytest.mark.parametrize("engine", ["fused", "reference"])
def test_the_chunk_of_a_load_is_what_runs(engine: str, tmp_path: Path) -> None:
    folder = save_model("qwen3", tmp_path / "target")
    for chunk, runs in ((256, 256), (None, 1024)):
        session = opened(folder, engine=engine, context=2000, prefill_chunk=chunk)
        assert (session.runner.target.prefill_chunk, session.facts.load.prefill_chunk) == (runs, chunk)  # type: ignore[union-attr]
