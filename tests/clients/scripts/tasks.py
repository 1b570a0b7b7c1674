"""The task of the scripts that have one: ``python SCRIPT URL FILE TASK``, where FILE is to be changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FILE, TASK = Path(sys.argv[2]), sys.argv[3]
BEFORE = FILE.read_text(encoding="utf-8")
NAME = "bash"
PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "description": {"type": "string"}},
    "required": ["command"],
}


def run(command: str) -> str:
    """What a command of the model's prints."""
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=FILE.parent).stdout


def outcome(calls: int, said: str) -> tuple[int, str, str]:
    """How many calls there were, what was said behind them, and what the file holds; it is put back for the next."""
    found = FILE.read_text(encoding="utf-8")
    FILE.write_text(BEFORE, encoding="utf-8")
    return calls, said, found
