"""What runs in a child of ``worker.process``: limits, frames, and one handler's ``answer(bytes) -> bytes``.

Run by path with ``python -I``: imports the standard library only, nothing of the package. Arguments: the
handler's file, whether it writes files, then folders to find its libraries in. A request is a frame of four
big-endian numbers (bytes that follow, seconds, milliseconds of processor time or 0, MiB of memory or 0) and the bytes;
an answer one number and the bytes.
"""

from __future__ import annotations

import importlib.util
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REQUEST = struct.Struct(">IIII")
ANSWER = struct.Struct(">I")
ALARM_S = 10  # on top of the parent's limit: only reached when it died and cannot kill this process


def limit(name: str, value: int, for_good: bool = False) -> None:
    """Limit this process where the system can; not ``for_good`` it may be raised again."""
    try:
        import resource
    except ImportError:  # Windows: the parent's time cap is what remains
        return
    kind = getattr(resource, name, None)
    if kind is not None:
        with suppress(OSError, ValueError):  # macOS refuses some of them
            resource.setrlimit(kind, (value, value if for_good else resource.getrlimit(kind)[1]))


def alarm(seconds: int) -> None:
    """Have the system end this process after so long; 0 calls it off."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def limit_processor_time(milliseconds: int) -> None:
    """Have the system end this process with SIGPROF after so much of it; 0 calls it off."""
    if hasattr(signal, "setitimer"):  # Windows: the parent's time cap is what remains
        signal.setitimer(signal.ITIMER_PROF, milliseconds / 1000)


def load(handler: str, folders: list[str]) -> Callable[[bytes], bytes]:
    """Load the handler's function; the folders are searched after Python's own."""
    sys.path += folders
    spec = importlib.util.spec_from_file_location(Path(handler).stem, handler)
    if spec is None or spec.loader is None:
        raise ImportError(handler)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[[bytes], bytes] = module.answer
    return found


def serve(handle: Callable[[bytes], bytes]) -> None:
    """Announce readiness, then answer requests until standard input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer

    def send(data: bytes) -> None:
        answers.write(ANSWER.pack(len(data)))
        answers.write(data)
        answers.flush()

    send(b"")
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        size, seconds, milliseconds, mebibytes = REQUEST.unpack(head)
        alarm(seconds + ALARM_S)
        if mebibytes:
            limit("RLIMIT_AS", mebibytes * 2**20)
        data = requests.read(size)
        if len(data) < size:
            return
        limit_processor_time(milliseconds)
        send(handle(data))
        del data
        limit_processor_time(0)
        alarm(0)


if __name__ == "__main__":
    for name in ("RLIMIT_CORE",) if sys.argv[2] == "writes" else ("RLIMIT_CORE", "RLIMIT_FSIZE"):
        limit(name, 0, for_good=True)
    serve(load(sys.argv[1], sys.argv[3:]))
