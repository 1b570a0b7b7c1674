"""The line of ``make demo`` on what a first run takes: measured folders and the wheel that is to come."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.smollm2 import with_drafter
from tools import first_run


def test_what_is_installed_is_measured_and_the_model_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libraries = tmp_path / "site-packages"
    for name, size in (("torch/lib", 3 * 2**20), ("other", 2**20)):
        (libraries / name).mkdir(parents=True)
        (libraries / name / "file").write_bytes(b"\0" * size)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(libraries)})
    with_drafter(tmp_path / "own", monkeypatch)
    first_run.main()
    installed = f"installed in {libraries}: 4.0 MiB on disk (torch 3.0 MiB)"
    assert capsys.readouterr().out.splitlines() == [installed, "nothing to download; in all: 4.0 MiB"], "offline"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    first_run.main()
    assert capsys.readouterr().out.splitlines() == [installed, "smollm2 to download: 88.6 MiB; in all: 92.6 MiB"]
