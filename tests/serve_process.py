"""A ``dflash serve`` of its own home, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 120.0


@contextmanager
def served(
    model: str,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
    command: str = "serve",
    program: Sequence[str] = ("dflash_local",),
) -> Iterator[str]:
    """Start it and give its address.

    Args:
        environ: added to this process's own. log: the file that gets what the server says. command: ``web`` has a page.
        program: the module, and its arguments before the command.
    """
    with tempfile.TemporaryDirectory() as home, open(log or os.devnull, "wb") as said:
        words = [sys.executable, "-m", *program, command, model, "--port", "0"]
        own = {**os.environ, "DFLASH_HOME": home, **(environ or {})}
        process = subprocess.Popen(words, env=own, stderr=said)
        try:
            yield _address(Path(own["DFLASH_HOME"]) / "cache", process)
        finally:
            process.terminate()
            process.wait(30)


def _address(cache: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        for path in cache.glob("serve-*.json"):  # another server's, too, where they share a home
            with suppress(OSError, ValueError):  # it is not yet whole
                record = json.loads(path.read_text(encoding="utf-8"))
                if record["owner"]["pid"] == process.pid:
                    return str(record["address"])
        time.sleep(0.05)
    raise SystemExit(f"dflash did not start (exit code {process.poll()})")
