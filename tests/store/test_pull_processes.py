"""Two processes at one pull, one that is killed, one that is stopped with Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_local.catalog.row import Fingerprint
from dflash_local.store.pull import Wanted
from tests.fake_hub import FakeHub, wait_until

TARGET, DRAFTER = "owner/target", "owner/drafter"
KNOWN = Fingerprint("first", 2, (1, 3), 9, 8, None)
PAIR = (Wanted("target", TARGET), Wanted("drafter", DRAFTER, None, (KNOWN,)))


# Other processes

PROCESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in whatever nohup or a shell's background starts
from pathlib import Path
from dflash_local.errors import DFlashError
from dflash_local.store.cache import Cache
from dflash_local.store.hub import Hub
from dflash_local.store.pull import Wanted, prepare, pull
url, home, repo = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
hub, cache = Hub(url, None, False, home / "hub"), Cache(home / "hub")
def say(event):
    print(event, flush=True)
try:
    plan = prepare([Wanted("target", repo)], hub, cache, home / "manifests")
    print("ready" if plan.ready else "begin", flush=True)
    done = pull(plan, hub, cache, home / "manifests", home / "locks", on_event=say)
    print("verified", done[0].verified, flush=True)
except DFlashError as error:
    print(error, file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
"""


@contextlib.contextmanager
def process(puller: Any, repo: str = TARGET) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS, puller.fake.url, str(puller.home), repo]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_of_two_processes_one_downloads_and_one_waits(puller: Any, fake: FakeHub, small: dict[str, bytes]) -> None:
    fake.fault("model.safetensors", "trickle", rate=200_000)
    with process(puller) as first:
        assert wait_until(lambda: fake.sent("model.safetensors") > 0, 60)
        plan = puller.prepare(TARGET)
        assert not plan.ready and puller.run(plan)[0].verified
        out, _ = first.communicate(timeout=60)
    assert first.returncode == 0 and "verified True" in out
    assert [r.server for r in fake.gets("model.safetensors")] == ["hub", "cdn"]
    assert puller.notices == [f"owner/target is being pulled by process {first.pid}: waiting for it"]
