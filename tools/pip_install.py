"""Run ``pip install`` and say every few seconds what it is doing and how far it is.

python -m tools.pip_install ARGUMENTS

It needs the standard library alone, since nothing else is installed yet. pip's own lines are shown where it fails.
Modules are compiled when they are first imported: most never are, and compiling all takes as long as the rest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SIGN_S = 3.0
DOWNLOADING = re.compile(r"\s+Downloading (?:\S*/)?([^\s/]+?)-(\d[^-\s]*)\S*(?: \(([\d.]+ \w?B)\))?")
FOUND = re.compile(r"(?:Collecting|Processing|Requirement already satisfied:|Obtaining) ")
INSTALLING = "Installing collected packages: "


class Progress:
    """What pip said so far.

    Attributes:
        packages: those it looked at. waiting: names that it is installing now. lines: all that it printed.
    """

    def __init__(self, libraries: Path, downloads: Path) -> None:
        self.lines: list[str] = []
        self.packages = 0
        self.waiting: list[str] = []
        self._file = ""
        self._libraries, self._downloads = libraries, downloads
        self._here: set[str] = set()

    def take(self, line: str) -> None:
        """Read one line of pip's."""
        self.lines.append(line)
        if FOUND.match(line):
            self.packages += 1
            self._file = ""
        elif named := DOWNLOADING.match(line):
            name, version, size = named.groups()
            self._file = f"downloading {name} {version}" + (f", {size}" if size else "")
        elif line.startswith(INSTALLING):
            self._here = self._installed()
            self.waiting = line[len(INSTALLING) :].strip().split(", ")

    @property
    def line(self) -> str:
        """Say what goes on now."""
        if self.waiting:
            # They are unpacked in the order that pip named them.
            done = len(self._installed() - self._here)
            name = self.waiting[min(done, len(self.waiting) - 1)]
            on_disk = f"{_mib_below(self._libraries)} on disk"
            return f"unpacking {name} ({done} of {len(self.waiting)} packages are there, {on_disk})"
        so_far = f"{self.packages} packages, {_mib_below(self._downloads)} downloaded"
        return f"{self._file or 'looking up versions'} ({so_far} so far)"

    def _installed(self) -> set[str]:
        return {place.name for place in self._libraries.glob("*.dist-info")}


def install(pip: Sequence[str], libraries: Path) -> int:
    """Run a command of pip's, saying what it does; returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="dflash-pip-") as downloads:
        child = subprocess.Popen(
            pip,
            env={**os.environ, "TMPDIR": downloads},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        progress = Progress(libraries, Path(downloads))
        ended = threading.Event()
        signs = threading.Thread(target=_tell, args=(progress, ended))
        signs.start()
        try:
            for line in child.stdout or ():
                progress.take(line)
            code = child.wait()
        finally:
            ended.set()
            signs.join()
    if code:
        sys.stderr.write("".join(progress.lines))
    return code


def _tell(progress: Progress, ended: threading.Event) -> None:
    begun = time.monotonic()
    while not ended.wait(SIGN_S):
        print(f"  {time.monotonic() - begun:4.0f} s  {progress.line}", flush=True)


def _mib_below(folder: Path) -> str:
    """How much its files hold, which may vanish meanwhile, as its folders may."""
    total = 0
    for below, _, names in os.walk(folder):  # rglob raises where a folder that it is about to enter is gone
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(below, name)).st_size
    return f"{total / 2**20:,.0f} MiB"


if __name__ == "__main__":
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile", *sys.argv[1:]]
    sys.exit(install(command, Path(sysconfig.get_paths()["purelib"])))
