"""Why a process ended, as its log says."""

from __future__ import annotations

from pathlib import Path

from dflash_local.remote import server_log

ABORTED = """loading
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: device-side assert triggered
For debugging consider passing CUDA_LAUNCH_BLOCKING=1

Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)
frame #1: <unknown function> + 0x129ecc (0x7f in libc.so.6)
"""


def test_an_abort_is_told_by_what_was_thrown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(ABORTED, encoding="utf-8")
    assert server_log.reason(log) == "CUDA error: device-side assert triggered"
