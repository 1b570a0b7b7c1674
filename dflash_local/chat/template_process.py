"""The child process that renders templates: started when first needed, killed when late, started again.

Knows frames and time limits; refuses to know what a template or a message is.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dflash_local.errors import MissingDependencyError, TemplateError

RENDER_S = 2.0
START_S = 30.0
MAX_CHARS = 4 * 2**20
MAX_FRAME_BYTES = 16 * MAX_CHARS  # JSON writes one character in at most 12 bytes
_FRAME = struct.Struct(">I")
_WORKER = Path(__file__).with_name("template_worker.py")


class TemplateProcess:
    """One renderer, shared by all threads; a lock lets one request in at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer of the worker. TemplateError when it takes over two seconds or dies."""
        data = json.dumps({**request, "max_chars": MAX_CHARS}).encode()
        with self._lock:
            used = self._process if self._process and self._process.poll() is None else None
            started = time.monotonic()
            answer = self._exchange(used or self._start(), data, RENDER_S)
            if answer is None and used and time.monotonic() - started < RENDER_S:
                # Something else ended the waiting child (the system, short of memory): once more.
                answer = self._exchange(self._start(), data, RENDER_S)
            if answer is None:
                self._end()
                raise TemplateError(
                    f"the chat template needs more than {RENDER_S:g} s, too much memory, or breaks its process",
                    "the template of this checkpoint is faulty or hostile; use a checkpoint you trust",
                )
        return answer

    def close(self) -> None:
        """End the child; the next request starts a new one."""
        with self._lock:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        # -I keeps PYTHON* variables, the user's site and the current folder out; the environment stays
        # empty because a template that breaks out must find no token in it (Windows cannot start so).
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), *_library_folders()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=None if sys.platform == "win32" else {},
            start_new_session=True,  # Ctrl-C is for the parent
        )
        if self._exchange(self._process, b"", START_S) is None:
            self._end()
            raise TemplateError("the process that renders chat templates does not start", "run `dflash doctor`")
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)

    def _exchange(self, process: subprocess.Popen[bytes], data: bytes, seconds: float) -> dict[str, Any] | None:
        """Send a frame (none when empty) and read one; None when the process is killed, dead or babbling."""
        if process.stdin is None or process.stdout is None:
            return None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            if data:
                process.stdin.write(_FRAME.pack(len(data)) + data)
                process.stdin.flush()
            head = process.stdout.read(_FRAME.size)
            size = _FRAME.unpack(head)[0] if len(head) == _FRAME.size else MAX_FRAME_BYTES + 1
            answer = json.loads(process.stdout.read(size)) if size <= MAX_FRAME_BYTES else None
        except (OSError, ValueError, RecursionError):
            return None
        finally:
            timer.cancel()
        return answer if isinstance(answer, dict) else None


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:  # unsent bytes of a request that killed the child
        return


def _library_folders() -> list[str]:
    """Where jinja2 and markupsafe lie, for a child that ignores PYTHONPATH and the user's site."""
    folders = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise MissingDependencyError(f"{name} is not installed", f"pip install {name}")
        folders.append(str(Path(spec.origin).parents[1]))
    return list(dict.fromkeys(folders))
