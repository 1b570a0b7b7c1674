"""Switches of torch and of Python that both engines set when they load."""

from __future__ import annotations

import sys

import torch

SMALL_MODEL = 50_000_000  # parameters; below, one CPU thread is fastest
# Each call that waits for the device or launches a graph gives Python's lock away, a few times a cycle. Beside a thread
# that computes in Python, getting it back takes this long: 5 ms if nothing is said, as much as a whole cycle.
SWITCH_S = 0.0005
THREADS = torch.get_num_threads()  # what torch took before any toy was loaded


def settle_torch(parameters: int, device: torch.device) -> None:
    """Switches of torch that suit one sequence that grows by a few tokens at a time."""
    if device.type == "cpu":
        # Handing a 10 MB model to a second core costs more than it computes.
        torch.set_num_threads(1 if parameters < SMALL_MODEL else THREADS)
    elif device.type == "cuda":
        # cuDNN's attention builds a plan for each new length: 100 ms a call, measured on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
