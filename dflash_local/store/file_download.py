"""Plain values of a file on its way from the Hub: how much trouble on the way is borne, and how it can end early."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_local.store.hub import RemoteFile

WEB_PAGE = "looks like a web page (is there a sign-in page between you and the network?)"
CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


@dataclass(frozen=True, slots=True)
class Patience:
    """Says how much of a bad line is borne.

    Attributes:
        connect_s, answer_s, stall_s: seconds without a connection, without an answer, without a byte of a file.
        whole_s: seconds for a whole answer that is no file, such as a listing, with all tries.
        floor: bytes per second, over ``stall_s`` of waiting, below which a stream counts as stalled.
        first_tries: tries for a request that gets no usable answer.
        tries: failures of a file in a row with less than ``progress`` bytes between them.
        pause_s: wait before the second try, doubled up to ``longest_pause_s`` for each further one.
        longest_wait_s: a server that asks for a longer wait (Retry-After) is given up at once.
    """

    connect_s: float = 5.0
    answer_s: float = 10.0
    stall_s: float = 30.0
    whole_s: float = 60.0
    floor: int = 1024
    first_tries: int = 4
    tries: int = 6
    progress: int = 1 << 20
    pause_s: float = 0.5
    longest_pause_s: float = 8.0
    longest_wait_s: float = 60.0

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row."""
        return min(self.pause_s * 2.0 ** (failures - 1), self.longest_pause_s)


@dataclass
class FileDownload:
    """Follows a file of one commit that is requested.

    Attributes:
        url: its lasting address at the endpoint (a redirect's target expires).
        part: the file that holds the first of its bytes, when one was left.
        notify: takes a line about trouble on the way. done: bytes received or found here. found: those of a part.
        verified: bytes proven: none before the whole file is. connections: how many were opened for it.
    """

    repo: str
    commit: str
    file: RemoteFile
    url: str
    part: Path | None = None
    notify: Callable[[str], None] = lambda _text: None
    done: int = 0
    found: int = 0
    verified: int = 0
    connections: int = 0

    @property
    def name(self) -> str:
        return f"{self.file.path} of {self.repo}"

    @property
    def size(self) -> int:
        return self.file.size


class Stopped(Exception):
    """Ends the threads that work for a pull that was stopped; it is never shown."""


class NotTheFile(Exception):
    """Says why what came cannot be the file. The file may be requested again."""


class TooLong(NotTheFile):
    """Says that more came than the file has, so that nothing of it can be trusted."""
