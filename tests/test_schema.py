"""Records: from several threads, and of hostile keys."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dflash_local.schema import InvalidValue, Record, convert

NEW_TYPES = """
import sys, threading
from dflash_local.schema import Record, convert
sys.setswitchinterval(1e-6)
for _ in range(100):
    class Inner(Record):
        number: "int | None" = None
    class Outer(Record):
        inner: "Inner | None" = None
    threads = [threading.Thread(target=convert, args=({"inner": {"number": 1}}, Outer)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_meet_a_type_for_the_first_time_do_not_crash() -> None:
    """As the first two requests to a server do."""
    assert subprocess.run([sys.executable, "-c", NEW_TYPES]).returncode == 0


class Turn(Record, frozen=True):
    """A record within another."""

    role: str = ""


class Talk(Record, frozen=True):
    """A record with others within."""

    model: str = ""
    turns: list[Turn] = []


@pytest.mark.parametrize(("key", "path"), [("k` - at `$.turns[9].role", "k"), ("k` - at `$.model", "model.k")])
def test_a_key_that_is_spelled_like_the_end_of_an_error_is_unknown(key: str, path: str) -> None:
    sent: dict[str, Any] = {key: 1, "model": "x", "turns": []}
    with pytest.raises(InvalidValue) as caught:
        convert(sent, Talk)
    assert caught.value.path == path and caught.value.unknown
