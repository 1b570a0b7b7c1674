"""Faults of a machine as its user meets them: each has its line, and the chat goes on where it can.

What each layer makes of a fault is tested beside it: verdicts of kernels in ``kernels/test_kernel_trial.py`` (and on a
card in ``gpu/``), memory and lost contexts in ``engine/test_device_faults.py``, loads that end the program in
``test_load_steps.py``.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.app import loading
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding
from dflash_local.cli import report_parts
from dflash_local.errors import DeviceLostError, DoesNotFitError, KernelError
from dflash_local.planner import accelerators, hardware, machine, nvrtc_files, software
from dflash_local.planner.hardware import Driver, Gpu, TorchFacts
from tests.app.test_load_steps import leave_marker
from tests.cli.conftest import Cli, Opened
from tests.cli.test_doctor import TWO_CARDS
from tests.service.scripted import HELLO, ScriptedSession

pytestmark = pytest.mark.needs_torch
SHIPPED = bundled.FOLDER
REPLY = "".join(piece.text for step in HELLO for piece in step.pieces)
TWO_MESSAGES = "one\ntwo\n"


@dataclass(slots=True)
class Planted:
    """A machine with a card, whose parts a fault replaces.

    Attributes:
        options: of the chat. sessions: what loads and replies come to; left out: all goes well.
    """

    patch: pytest.MonkeyPatch
    opened: Opened
    cli: Cli
    home: Path
    options: list[str] = field(default_factory=lambda: ["--no-fit-check"])

    def kernels_fail(self, error: KernelError) -> None:
        """The fused engine's load ends so."""

        def make(_pair: Pair) -> ScriptedSession:
            if self.opened.loads[-1].engine != "reference":
                raise error
            return ScriptedSession()

        self.opened.make = make

    def reply_fails(self, *errors: BaseException) -> None:
        """The first reply of each load ends so."""
        faults: list[list[BaseException | None]] = [[error] for error in errors]
        self.opened.make = lambda _pair: ScriptedSession(faults=faults.pop(0) if faults else [])

    def check_finds(self, finding: Callable[[], Finding]) -> None:
        """The check of a first load, on whatever device the session is."""
        from dflash_local.check import run

        self.patch.setattr(run, "check", lambda *_: (finding(),))
        self.patch.setattr(loading, "CHECKED_DEVICE", "cpu")
        self.patch.setattr(loading, "planned_peak", lambda *_: None)

    def keeps_something(self) -> None:
        """A load whose kernels are tried and whose pair is checked."""
        from dflash_local import settings
        from dflash_local.kernels.kernel_record import KernelRecord
        from dflash_local.store.paths import cubins_folder

        def make(_pair: Pair) -> ScriptedSession:
            KernelRecord(cubins_folder(settings.load()), {}).choose("a product", "a configuration", 1.0)
            return ScriptedSession()

        self.opened.make = make
        self.check_finds(lambda: Finding("target", "ok", "fine"))


def old_driver(planted: Planted) -> None:
    facts = TorchFacts("2.13.0", cuda="13.0", error="The NVIDIA driver on your system is too old")
    planted.patch.setattr(hardware, "probe_torch", lambda: facts)
    planted.patch.setattr(hardware, "nvidia_driver", lambda: Driver("550.54", ("NVIDIA T4",)))


def no_compiler(planted: Planted) -> None:
    from dflash_local.kernels import triton_trial

    planted.kernels_fail(triton_trial.explained(RuntimeError(f"{triton_trial.NO_COMPILER}. Please specify")))


def compile_failure(planted: Planted) -> None:
    from dflash_local.kernels import triton_trial

    planted.patch.setattr(software, "c_compiler", lambda chosen: software.Compiler("/usr/bin/gcc", True))
    planted.kernels_fail(triton_trial.explained(subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])))


def no_nvrtc(planted: Planted) -> None:
    from dflash_local.kernels import nvrtc

    planted.patch.setattr(nvrtc_files, "installed", list)
    planted.patch.setattr(nvrtc_files, "toolkit_library", lambda wanted: "libnvrtc-none.so")
    planted.patch.setattr(nvrtc, "nvrtc", nvrtc.nvrtc.__wrapped__)
    planted.kernels_fail(KernelError(str(nvrtc.why_not((9, 0)))))


def kernels_that(verdict: Any) -> Callable[[Planted], None]:
    """Of experts, in a child process; those of other products give way to Triton's."""

    def plant(planted: Planted) -> None:
        from dflash_local.kernels.kernel_record import KernelRecord
        from dflash_local.models.fused.fragment_kernels import why_failed

        record = KernelRecord(None, {})
        record.verdicts = {"one": verdict, "two": verdict}
        planted.kernels_fail(KernelError(why_failed(record, record.verdicts.keys())))

    plant.__name__ = f"kernels_{verdict}"
    return plant


def nan(planted: Planted) -> None:
    from dflash_local.engine.runner import not_finite

    planted.reply_fails(not_finite())


def read_only(planted: Planted) -> None:
    def refusing(opened: Callable[..., Any], writes: Callable[[Any], bool]) -> Callable[..., Any]:
        def checked(path: Any, mode: Any = "r", *rest: Any, **named: Any) -> Any:
            if writes(mode) and not isinstance(path, int):
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            return opened(path, mode, *rest, **named)

        return checked

    planted.keeps_something()
    for module in (builtins, io):
        planted.patch.setattr(module, "open", refusing(open, lambda mode: bool(set(mode) & set("wax+"))))
    planted.patch.setattr(os, "open", refusing(os.open, lambda flags: bool(flags & (os.O_WRONLY | os.O_RDWR))))
    planted.patch.setattr(os, "mkdir", refusing(os.mkdir, lambda mode: True))


def full_disk(planted: Planted) -> None:
    def full(*_: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    planted.keeps_something()
    for name in ("write", "fsync"):
        planted.patch.setattr(os, name, full)


def paging(planted: Planted) -> None:
    """Under WSL2 a card that reads at a tenth of its rate."""
    import torch

    from dflash_local.check import card

    planted.patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    planted.patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**30)
    planted.patch.setattr(card, "_rate", lambda device: 100e9)
    planted.patch.setattr(hardware, "is_wsl", lambda: True)
    session: Any = SimpleNamespace(facts=SimpleNamespace(device="cuda:0"), runner=None)
    planted.check_finds(lambda: card.check_card(session, None))


def out_of_memory(planted: Planted) -> None:
    planted.reply_fails(DoesNotFitError("at once: the device ran out of memory with 600 tokens", "a shorter --context"))


def lost_context(planted: Planted) -> None:
    planted.reply_fails(DeviceLostError("at once: the device's context is lost: CUDA error: unknown error"))


def two_kinds_of_card(planted: Planted) -> None:
    here = machine.this_machine
    planted.patch.setattr(bundled, "FOLDER", SHIPPED)
    planted.patch.setattr(accelerators, "version_of", {"torch": "2.13.0+cu130"}.get)
    planted.patch.setattr(machine, "this_machine", partial(here, probe=lambda command: TWO_CARDS))
    planted.options = []


def crash_during_load(planted: Planted) -> None:
    leave_marker(planted.opened, planted.patch, planted.cli, planted.home / ".local/share/dflash-local/loads")


@dataclass(frozen=True, slots=True)
class Expected:
    """What is seen: words of the one line, and of other lines; replies to two messages; the engine that was loaded."""

    line: str
    others: tuple[str, ...] = ()
    replies: int = 2
    engine: str = "auto"
    code: int = 0


REFERENCE = "the reference engine is taken, which is slower"
FAULTS: dict[Callable[[Planted], None], Expected] = {
    old_driver: Expected("driver 550.54 is too old for CUDA 13", ("whl/cu126", "--device cpu"), 0, "", 7),
    no_compiler: Expected(f"{REFERENCE}: Triton cannot compile kernels: no C compiler", ("gcc",), engine="reference"),
    no_nvrtc: Expected(f"{REFERENCE}: the compiler NVRTC", ("pip install nvidia-cuda-nvrtc",), engine="reference"),
    compile_failure: Expected(f"{REFERENCE}: Triton cannot compile kernels: the C compiler failed", engine="reference"),
    kernels_that("wrong"): Expected(f"{REFERENCE}: of 2 kernels 2 gave wrong numbers", engine="reference"),
    kernels_that("fault"): Expected(f"{REFERENCE}: of 2 kernels 2 faulted on this card", engine="reference"),
    kernels_that("hang"): Expected(f"{REFERENCE}: of 2 kernels 2 did not end", engine="reference"),
    nan: Expected("produced logits that are not finite", ("--dtype float32",)),
    read_only: Expected("nothing can be kept in", ("Read-only file system",)),
    full_disk: Expected("nothing can be kept in", ("No space left on device",)),
    paging: Expected(
        "check of the card: NVIDIA GeForce RTX 4090; reads 100 of 1008 GB/s", ("paged to the host (WSL2",)
    ),
    out_of_memory: Expected("ran out of memory with 600 tokens", ("a shorter --context",), 1),
    lost_context: Expected("CUDA error: unknown error; the pair is loaded again"),
    two_kinds_of_card: Expected("on cuda:1, NVIDIA RTX A6000: most free memory of 2 GPUs"),
    crash_during_load: Expected("an earlier load of demo ended the program, so the reference", engine="reference"),
}


@pytest.fixture
def planted(cli: Cli, opened: Opened, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    facts = TorchFacts("2.13.0", cuda="13.0", gpus=(Gpu("NVIDIA T4", 2**34, "7.5"),))
    monkeypatch.setattr(hardware, "nvidia_driver", lambda: Driver("580.95", ("NVIDIA T4",)))
    monkeypatch.setattr(hardware, "probe_torch", lambda: facts)
    return Planted(monkeypatch, opened, cli, own_home)


@pytest.mark.parametrize("fault", [*FAULTS], ids=lambda fault: str(fault.__name__))
def test_each_fault_has_its_line_and_the_chat_goes_on(fault: Callable[[Planted], None], planted: Planted) -> None:
    expected = FAULTS[fault]
    with planted.patch.context() as patch:
        planted.patch = patch
        fault(planted)
        found = planted.cli("chat", "demo", *planted.options, stdin=TWO_MESSAGES)
    assert found.code == expected.code and found.out.count(REPLY) == expected.replies
    (line,) = [each for each in found.err.splitlines() if expected.line in each]
    assert all(words in found.err for words in expected.others)
    assert "Traceback" not in found.err and "unexpected failure" not in found.err
    loads = planted.opened.loads
    assert (loads[-1].engine if loads else "") == expected.engine


@pytest.mark.parametrize("disk", [read_only, full_disk])
def test_what_cannot_be_kept_is_named_by_its_folders_once(disk: Callable[[Planted], None], planted: Planted) -> None:
    with planted.patch.context() as patch:
        planted.patch = patch
        disk(planted)
        found = planted.cli("run", "demo", "hello", "--no-fit-check")
        assert found.code == 0 and found.out.strip() == REPLY.strip()
        (line,) = [each for each in found.err.splitlines() if "nothing can be kept" in each]
        assert all(f"{folder} (" in line for folder in ("loads", "checks", "cubins"))
        failed = planted.cli("run", "no-such-pair", "hello")
        assert failed.code == 3 and failed.err.count("nothing can be kept in") == 1 and "state" in failed.err
        in_json = planted.cli("show", "no-such-pair", "--json")
        assert json.loads(in_json.err)["error"] and "nothing can be kept" not in in_json.err
        patch.setattr(report_parts, "collect", lambda user: {"report": {"schema": 1}})
        report = planted.cli("doctor", "--yes", "--report", str(planted.home / "report.zip"))
        assert report.code == 2 and "report.zip cannot be written" in report.err and "Traceback" not in report.err
    assert not (planted.home / "report.zip").exists()
    kept = planted.cli("run", "demo", "hello", "--no-fit-check")
    assert kept.code == 0 and "nothing can be kept" not in kept.err
