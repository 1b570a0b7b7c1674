"""A ``dflash serve`` of its own home, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

START_S = 120.0


@contextmanager
def served(model: str, environ: Mapping[str, str] | None = None, log: Path | None = None) -> Iterator[str]:
    """Start it and give its address.

    Args:
        environ: added to this process's own. log: the file that gets what the server says.
    """
    with tempfile.TemporaryDirectory() as home, open(log or os.devnull, "wb") as said:
        command = [sys.executable, "-m", "dflash_local", "serve", model, "--port", "0"]
        own = {**os.environ, **(environ or {}), "DFLASH_HOME": home}
        process = subprocess.Popen(command, env=own, stderr=said)
        try:
            yield _address(Path(home) / "cache", process)
        finally:
            process.terminate()
            process.wait(30)


def _address(cache: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            (record,) = cache.glob("serve-*.json")
            return str(json.loads(record.read_text(encoding="utf-8"))["address"])
        except (OSError, ValueError):  # it is not there yet, or not yet whole
            time.sleep(0.05)
    raise SystemExit(f"dflash serve did not start (exit code {process.poll()})")
