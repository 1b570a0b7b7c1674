"""What ends a launched server when the program that launched it is gone, however that ended.

Run by path with ``python -I -S``: imports the standard library only, nothing of the package. Its argument is the id of
the server's process group. Standard input ends when the launching program does; a word on it before says that there is
nothing to do.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

END_S = 10.0  # what a server may take to end when asked, before it is killed
POLL_S = 0.1


def end_group(group: int) -> None:
    """Ask the process that began a group to end itself and the others, then end what is left."""
    until = time.monotonic() + END_S
    with suppress(ProcessLookupError, PermissionError):
        os.kill(group, signal.SIGTERM)
    while _runs(group) and time.monotonic() < until:
        time.sleep(POLL_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _runs(process: int) -> bool:
    """False for one that is gone, or has ended and nobody asked how."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    except (OSError, IndexError):  # no /proc on this system
        return True


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        end_group(int(sys.argv[1]))
