"""The software probe: versions, the compiler, who owns a command name."""

from __future__ import annotations

import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from dflash_local.planner import software


def install(folder: Path, name: str, script: str) -> None:
    """A distribution with one console script, as far as its metadata goes."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{script} = x:main\n")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13, 0)), ("5.17.0", (5, 17, 0)), ("6.0rc1", (6, 0)), ("2.11.0a0+git1", (2, 11, 0)), ("x", ())],
)
def test_release_is_the_leading_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert software.release(version) == numbers


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert software.version_of("no-such-package-here") is None
    assert software.version_of("pytest") == pytest.__version__


def test_missing_requirements_leave_out_extras_and_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["pytest>=9", "no-such-package>=1,<2", "never[x]; extra == 'dev'", "elsewhere; sys_platform == 'plan9'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert software.missing_requirements() == ("no-such-package",)


def test_every_installed_package_that_provides_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "dflash-mlx", "dflash")
    install(tmp_path, "unrelated", "other")
    monkeypatch.syspath_prepend(str(tmp_path))
    providers = software.command("dflash").providers
    assert "dflash-mlx" in providers and "unrelated" not in providers


def test_a_script_is_ours_when_it_calls_this_package(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    ours.write_text("#!python\nfrom dflash_local.cli.main import main\n")
    other.write_text("#!python\nfrom dflash.cli import main\n")
    assert software.starts_us(ours)
    assert not software.starts_us(other) and not software.starts_us(tmp_path / "absent")


def test_the_program_behind_a_script_is_named_and_windows_packs_it(tmp_path: Path) -> None:
    script, launcher, other = tmp_path / "dflash", tmp_path / "dflash.exe", tmp_path / "other.exe"
    script.write_text("#!python\nimport sys\nfrom dflash_console.cli import main\n")
    assert software.started_module(script) == "dflash_console.cli"
    for path, module in ((launcher, "dflash_local.cli.main"), (other, "dflash_console.cli")):
        path.write_bytes(b"MZ a launcher\n")
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("__main__.py", f"import sys\nfrom {module} import main\nsys.exit(main())\n")
    assert software.starts_us(launcher) and not software.starts_us(other)
    script.write_bytes(b"\x7fELF")
    assert not software.started_module(script)


@pytest.mark.skipif(sys.platform == "win32", reason="executables are marked by suffix there")
def test_the_compiler_is_cc_then_gcc_then_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcc", "clang", "mycc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert software.c_compiler(None).path == str(tmp_path / "gcc")
    assert software.c_compiler("mycc").path == str(tmp_path / "mycc")
    assert software.c_compiler("absent").path is None
    (tmp_path / "gcc").unlink()
    assert software.c_compiler(None).path == str(tmp_path / "clang")
    (tmp_path / "clang").unlink()
    assert software.c_compiler(None).path is None
