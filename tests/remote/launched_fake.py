"""A program that takes the place of ``vllm``, or of the Python that has SGLang, when a server is launched.

Variables: FAKE_RECORD names a file that gets what it was started with, and which ones that were started before run
still; FAKE_FAULT is ``dies``, ``dies without drafts``, ``hangs`` or empty; FAKE_DELAY is in seconds; FAKE_DRAFTS is
``no`` for one that does not draft whatever it is told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the program starts often, and without it in a third of the time
    import pytest

ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = (
    "(EngineCore pid=7) ERROR 11-23 12:00:00 [core.py:700] ValueError: No room for one request, 9 GiB are needed\n"
    "RuntimeError: Engine core initialization failed. See root cause above.\n"
)


def fake_program(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str = "DFLASH_VLLM") -> Path:
    """Make the program and name it by the variable; returns where it records how it was started.

    Who launches it asks often whether it answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "program"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.remote.launched_fake "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    record = folder / "record.json"
    monkeypatch.setenv(variable, str(program))
    monkeypatch.setenv("FAKE_RECORD", str(record))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("dflash_local.remote.server_process.POLL_S", 0.05)
    return record


def started(record: Path) -> dict[str, Any]:
    """What the program that was started last recorded."""
    content = json.loads(record.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def is_alive(pid: int) -> bool:
    """True for a process that runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in (b"Z", b"X")


def wait_until_gone(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    until = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_alive(pid)


def main() -> None:
    """Serve until somebody ends it."""
    from tests.remote.openai_fake import Fake, running

    words = sys.argv[1:]
    child = subprocess.Popen(["sleep", "600"])
    file, drafts = Path(os.environ["FAKE_RECORD"]), any(word.startswith("--speculative-") for word in words)
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"pids": []}
    record = {
        "argv": words,
        "pid": os.getpid(),
        "child": child.pid,
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "pids": [*before["pids"], os.getpid()],
        "alive_before": [pid for pid in before["pids"] if is_alive(pid)],
    }
    file.write_text(json.dumps(record), encoding="utf-8")
    print("(APIServer pid=7) INFO 11-23 12:00:00 [utils.py:1] Starting to load model /a/model...", flush=True)
    fault = os.environ.get("FAKE_FAULT")
    if fault == "dies" or (fault == "dies without drafts" and not drafts):
        print(LAST_WORDS, end="", flush=True)
        child.kill()
        sys.exit(1)
    while fault == "hangs":
        time.sleep(1)
    time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
    value = {word: words[at + 1] for at, word in enumerate(words[:-1])}
    if "--alias" in words:
        from tests.remote.scripted_server import ScriptedServer, scripted

        drafts = any(word.startswith("--spec-type") for word in words)
        with scripted(ScriptedServer(model=value["--alias"], drafts=drafts), int(value["--port"])):
            time.sleep(600)
    sglang = "sglang.launch_server" in words
    token = value.get("--api-key") if sglang else os.environ.get("VLLM_API_KEY")
    fake = Fake(
        program="sglang" if sglang else "vllm",
        version="0.5.23" if sglang else "0.32.0",
        model=value["--served-model-name"],
        token=token,
        speculative=drafts and os.environ.get("FAKE_DRAFTS") != "no",
        info={"speculative_draft_model_path": value.get("--speculative-draft-model-path")},
    )
    with running(fake, int(value["--port"])):
        time.sleep(600)


if __name__ == "__main__":
    main()
