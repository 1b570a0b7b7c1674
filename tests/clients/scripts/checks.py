"""What the scripts of all clients share: the conversation, and the report. Standard library only.

Each script runs in its client's own environment as ``python SCRIPT URL`` and prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL, OTHER_MODEL = "demo", "gpt-4"
KEY = "none"
FIRST, SECOND, LONG = "Count from 3 to 7.", "Spell the word tree.", "Count from 1 to 99."
LEAVE_AFTER = 2  # pieces of a stream
DESCRIPTION = "Add two whole numbers."


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def url() -> str:
    """The endpoint's base address."""
    return f"{sys.argv[1]}/v1"


def report(**checks: Callable[[], Any]) -> None:
    """Run every check and print what it returned, or how it failed."""
    found: dict[str, Any] = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
    print(json.dumps(found))
