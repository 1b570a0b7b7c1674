"""What the installation says of pip's work, by a program that prints as pip does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import pip_install

PIP = """
import os, pathlib, sys, time
libraries = pathlib.Path(sys.argv[1])
print("Collecting torch==2.13.0 (from -c constraints.txt (line 3))", flush=True)
print("  Downloading https://where.it/is/torch-2.13.0-cp311-cp311-linux_x86_64.whl (190.1 MB)", flush=True)
pathlib.Path(os.environ["TMPDIR"], "torch.whl").write_bytes(bytes(3 * 2**20))
time.sleep(0.5)
print("Collecting numpy>=2.0 (from torch)", flush=True)
print("Installing collected packages: numpy, torch", flush=True)
time.sleep(0.5)
(libraries / "numpy-2.4.6.dist-info").mkdir()
time.sleep(0.5)
print("ERROR: No space left on device", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_each_part_of_the_work_is_told_and_a_failure_with_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    (tmp_path / "here_before-1.0.dist-info").mkdir()
    monkeypatch.setattr(pip_install, "SIGN_S", 0.05)
    assert pip_install.install([sys.executable, "-c", PIP, str(tmp_path), str(code)], tmp_path) == code
    out, err = capfd.readouterr()
    said = dict.fromkeys(line.split(" s  ")[1] for line in out.splitlines())
    told = [
        "downloading torch 2.13.0, 190.1 MB (1 packages, 3 MiB downloaded so far)",
        "unpacking numpy (0 of 2 packages are there, 0 MiB on disk)",
        "unpacking torch (1 of 2 packages are there, 0 MiB on disk)",
    ]
    assert [line for line in said if line in told] == told
    assert ("No space left on device" in err) == bool(code) and "installed" not in out.lower()


def test_a_folder_that_pip_removes_meanwhile_stops_no_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "kept").write_bytes(bytes(2**20))
    scandir = pip_install.os.scandir

    def racing(path: str | Path) -> object:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr("os.scandir", racing)
    assert pip_install._mib_below(tmp_path) == "1 MiB"
