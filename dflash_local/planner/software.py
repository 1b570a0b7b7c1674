"""The software probe: installed versions, the C compiler, who owns a command.

Reads package metadata only and imports none of the packages; judges nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The ranges of pyproject.toml, needed where the package runs without its metadata.
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
OLDEST_TRANSFORMERS = (5, 17)
TRANSFORMERS_BELOW = (6,)
OURS, PACKAGE = "dflash-local", "dflash_local"
# What the GPU figures of docs and benchmarks/results come from: those of constraints-cuda.txt.
MEASURED: Mapping[str, tuple[int, ...]] = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 17)}
INSTALL_COMPILER = "install gcc (Debian, Ubuntu: apt-get install gcc python3-dev) or set CC"
INSTALL_HEADERS = "install Python's headers (Debian, Ubuntu: apt-get install python3-dev)"


@dataclass(frozen=True, slots=True)
class Compiler:
    """Describes the C compiler Triton would call, and whether Python's headers are there for it."""

    path: str | None
    headers: bool


@dataclass(frozen=True, slots=True)
class VersionCommand:
    """Describes a command name: what the shell runs, where this environment keeps it, which packages provide it.

    ``is_ours``: the file this environment keeps under the name starts dflash-local.
    """

    name: str
    found: Path | None
    here: Path
    providers: tuple[str, ...]
    is_ours: bool

    @property
    def found_here(self) -> bool:
        """Say whether the shell runs the file of this environment."""
        return self.found is not None and self.here.exists() and self.found.samefile(self.here)


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution; None when it is not installed."""
    from importlib import metadata  # slow to import, and `dflash --help` loads this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Read the numbers a version starts with: ``2.13.0+cpu`` is (2, 13, 0). One of ten digits ends them."""
    match = re.match(r"\d{1,9}(\.\d{1,9})*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def not_measured(versions: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """List libraries of another version than ``MEASURED``'s, each with its version and the measured one.

    Args:
        versions: by library; what is no text is not there.
    """
    there = {name: version for name in MEASURED if isinstance(version := versions.get(name), str)}
    return {
        name: (version, MEASURED[name])
        for name, version in there.items()
        if release(version)[: len(MEASURED[name])] != MEASURED[name]
    }


def missing_requirements(package: str = OURS) -> tuple[str, ...]:
    """Names of required distributions that are not installed.

    Extras are left out, and requirements that hold on some platforms only.
    """
    from importlib import metadata

    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return ()
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in lines if ";" not in line]
    return tuple(name for name in names if version_of(name) is None)


def c_compiler(chosen: str | None) -> Compiler:
    """Find the compiler named by the variable CC, else gcc, else clang: what Triton would call."""
    found = shutil.which(chosen) if chosen else None
    if not chosen:
        found = next((path for path in map(shutil.which, ("gcc", "clang")) if path), None)
    return Compiler(found, headers=(Path(sysconfig.get_path("include")) / "Python.h").is_file())


def command(name: str) -> VersionCommand:
    """Find who answers to a command name in this shell and in this environment."""
    from importlib import metadata

    suffix = ".exe" if sys.platform == "win32" else ""
    providers = sorted(
        {
            distribution.metadata["Name"]
            for distribution in metadata.distributions()
            for entry in distribution.entry_points
            if entry.group == "console_scripts" and entry.name == name
        }
    )
    here = Path(sysconfig.get_path("scripts")) / f"{name}{suffix}"
    found = shutil.which(name)
    return VersionCommand(name, Path(found) if found else None, here, tuple(providers), starts_us(here))


def starts_us(script: Path) -> bool:
    """Say whether a console script calls this package."""
    return started_module(script).partition(".")[0] == PACKAGE


def started_module(script: Path) -> str:
    """Name the module that a console script calls, as pip and uv write them; empty for another program."""
    import zipfile  # `dflash --help` loads this module and must stay quick

    try:
        content = script.read_bytes()
        if zipfile.is_zipfile(script):  # Windows: a launcher with the script packed behind it
            with zipfile.ZipFile(script) as packed:
                content = packed.read("__main__.py")
    except (OSError, KeyError, zipfile.BadZipFile):
        return ""
    found = re.search(rb"^\s*from ([\w.]+) import ", content, re.MULTILINE)
    return found[1].decode() if found else ""
