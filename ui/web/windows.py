"""One thing for each window, told apart by Gradio's session. Those of windows long gone are forgotten."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

import gradio as gr

MOST = 200
T = TypeVar("T")


class PerWindow(Generic[T]):
    """Its methods may be called from any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._all: OrderedDict[str, T] = OrderedDict()

    def get(self, request: gr.Request) -> T | None:
        """What the window that a request came from has; None for nothing."""
        with self._lock:
            return self._all.get(request.session_hash or "")

    def set(self, request: gr.Request, value: T) -> None:
        """Have the window keep something, in place of what it had."""
        name = request.session_hash or ""
        with self._lock:
            self._all.pop(name, None)
            self._all[name] = value
            while len(self._all) > self._most:
                self._all.popitem(last=False)
