"""The hardware probe: memory within a container's limit, the driver, folders, torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from dflash_local import child_process
from dflash_local.planner import hardware

GIB = 2**30


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="ascii")
    return folder


def test_memory_is_cut_to_the_containers_limit_and_file_cache_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimpleNamespace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    stat = f"anon 5\ninactive_file {2 * GIB}\nactive_file 7\n"
    write(tmp_path, memory__max=f"{8 * GIB}\n", memory__current=f"{5 * GIB}\n", memory__stat=stat)
    assert hardware.memory(tmp_path) == hardware.Memory(8 * GIB, 5 * GIB, limited=True)


@pytest.mark.parametrize("limit", ["max\n", f"{2**62}\n"])
def test_a_limit_above_the_machine_is_none(tmp_path: Path, limit: str) -> None:
    write(tmp_path, memory__max=limit, memory__current="1\n", memory__stat="")
    assert not hardware.memory(tmp_path).limited


def test_memory_reads_the_older_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=60 * GIB))
    old = tmp_path / "memory"
    old.mkdir()
    write(old, memory__limit_in_bytes=f"{4 * GIB}", memory__usage_in_bytes=f"{GIB}", memory__stat="")
    assert hardware.memory(tmp_path) == hardware.Memory(4 * GIB, 3 * GIB, limited=True)


def test_a_folder_to_be_made_is_judged_by_the_one_above(tmp_path: Path) -> None:
    found = hardware.folder(tmp_path / "not" / "yet")
    assert found.writable and found.free > 0 and not (tmp_path / "not").exists()


def test_the_driver_and_its_gpus_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "find_program", lambda name: "smi")
    answer = SimpleNamespace(stdout="580.95, NVIDIA H200\n580.95, NVIDIA H200\n", returncode=0)
    monkeypatch.setattr(child_process, "run", lambda *args, **kwargs: answer)
    assert hardware.nvidia_driver() == hardware.Driver("580.95", ("NVIDIA H200", "NVIDIA H200"))


@pytest.mark.parametrize("failure", [subprocess.TimeoutExpired("smi", 5), OSError("gone"), None])
def test_a_failing_nvidia_smi_means_no_driver(monkeypatch: pytest.MonkeyPatch, failure: Exception | None) -> None:
    def fail(*args: object, **kwargs: object) -> SimpleNamespace:
        if failure is None:
            return SimpleNamespace(stdout="580.95, NVIDIA H200\n", returncode=9)
        raise failure

    monkeypatch.setattr(child_process, "find_program", lambda name: "smi")
    monkeypatch.setattr(child_process, "run", fail)
    assert hardware.nvidia_driver() is None


def test_a_torch_whose_libraries_do_not_load_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = hardware.probe_torch()
    assert found is not None and found.version == "" and "libcudart.so.13" in found.error


@pytest.mark.parametrize(
    "text, wsl",
    [
        ("Linux version 6.6.87.2-microsoft-standard-WSL2 (root@x) #1 SMP\n", True),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)\n", True),
        ("Linux version 6.8.0-45-generic (buildd@lcy02)\n", False),
        (None, False),
    ],
)
def test_wsl_is_told_by_the_kernels_name(text: str | None, wsl: bool, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert hardware.is_wsl(tmp_path / "version") == wsl


def test_the_probe_of_windows_driver_is_found_off_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"{hardware.WSL_PROBES}/nvidia-smi"
    monkeypatch.setattr(child_process, "find_program", lambda name: name if name == there else None)
    assert hardware.find_probe("nvidia-smi") == there and hardware.find_probe("rocm-smi") is None
