"""A server in a process of its own with few file descriptors; run by a test: LIMIT, then how many may be left free."""

from __future__ import annotations

import os
import resource
import sys

from dflash_local.api import server
from tests.api.conftest import _start


def main() -> None:
    """Print the port, then serve until standard input ends."""
    limit, left = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    running = _start(read_s=0.2)
    running.get("/health")  # what is imported late is imported now
    hoard = []
    try:
        while left:
            hoard.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for _ in range(left):
            os.close(hoard.pop())
    print(running.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    server.RETRY_S = 0.05
    main()
