"""Records from several threads."""

from __future__ import annotations

import subprocess
import sys

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
