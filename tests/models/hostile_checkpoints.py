"""Runs ``dflash run`` on hostile checkpoints: none may hang, abort, or end as an unexpected failure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.models.hostile_fields import Case, field_cases  # noqa: E402
from tests.models.hostile_files import file_cases, header_cases  # noqa: E402
from tests.models.hostile_tokenizers import tokenizer_cases  # noqa: E402

DEMO = HERE.parents[1] / "dflash_local" / "demo"
PROMPT = "a" * 40 + "!"
LIMIT_S = 120.0  # a run takes a second; this is a hang
MEMORY = 12 * 2**30  # bytes of data a process may have before it fails: what takes more is an abort
FINE = (0, 2, 3, 5, 6)
HANG, ABORT = "hang", "abort"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one: an exit code, ``hang`` or ``abort``; ``said`` is the last line on stderr."""

    group: str
    name: str
    outcome: int | str
    said: str

    @property
    def fine(self) -> bool:
        """True for a reply, and for an error that names its cause."""
        return self.outcome in FINE


def cases() -> Iterator[Case]:
    """All of them; names are unique within a group."""
    yield from field_cases()
    yield from file_cases()
    yield from header_cases()
    yield from tokenizer_cases()


def make(case: Case, folder: Path) -> Path:
    """Copy the pair and change it; weights are links until they are changed."""
    for part in ("target", "drafter"):
        (folder / part).mkdir(parents=True)
        for file in (DEMO / case.base / part).iterdir():
            place = folder / part / file.name
            place.symlink_to(file) if file.suffix == ".safetensors" else shutil.copyfile(file, place)
    case.change(folder)
    return folder


def run(case: Case, folder: Path, command: str = "run") -> Verdict:
    """``dflash run`` on it, or another command, in this process."""
    from dflash_local.cli.main import main

    pair = make(case, folder)
    argv = [command, str(pair / "target"), "--drafter", str(pair / "drafter"), "--device", "cpu"]
    argv += ["--max-new-tokens", "4", PROMPT] if command == "run" else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch("sys.stdin", io.StringIO()):
        code = main(argv)
    lines = [line for line in err.getvalue().splitlines() if line.startswith("error")] or [""]
    return Verdict(case.group, case.name, code, lines[-1])


def outcomes(chosen: Sequence[Case], limit: float = LIMIT_S) -> Iterator[Verdict]:
    """Each in a process of its own kind: one runs until it hangs or dies, then another goes on."""
    names = [(case.group, case.name) for case in cases()]
    at = 0
    while at < len(chosen):
        with _worker() as (process, answers):
            while at < len(chosen):
                case = chosen[at]
                at += 1
                process.stdin.write(f"{names.index((case.group, case.name))}\n")
                process.stdin.flush()
                try:
                    line = answers.get(timeout=limit)
                except queue.Empty:
                    yield Verdict(case.group, case.name, HANG, "")
                    break
                if line is None:
                    yield Verdict(case.group, case.name, ABORT, f"exit {process.wait()}")
                    break
                yield Verdict(case.group, case.name, *json.loads(line))


@contextlib.contextmanager
def _worker() -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str | None]]]:
    home = tempfile.mkdtemp(prefix="hostile-home-")
    env = {**os.environ, "HOME": home, "HF_HOME": home, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    answers: queue.Queue[str | None] = queue.Queue()
    lines = process.stdout
    assert lines is not None
    reader = threading.Thread(target=lambda: [*map(answers.put, lines), answers.put(None)], daemon=True)
    reader.start()
    try:
        yield process, answers
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _work() -> None:
    """Answer each number on stdin with the verdict on that case, as a line on what was stdout."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    wanted, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    listed = list(cases())
    for line in wanted:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            verdict = run(listed[int(line)], Path(folder))
        answers.write(json.dumps([verdict.outcome, verdict.said[:300]]) + "\n")
        answers.flush()


if __name__ == "__main__":
    _work()
