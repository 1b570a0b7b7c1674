"""A real vLLM on the CPU serves the demo pair with method dflash: what comes through it beside our own engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_local.app.engine_server import EngineServer
from dflash_local.app.examples import HELD_OUT
from dflash_local.bench.prompts import held_out
from dflash_local.catalog import bundled
from dflash_local.engine.load import load
from dflash_local.errors import ServerError
from dflash_local.events import Finished, Started, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.service import Service
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Cli
from tests.engines.environment import program_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-vllm"
START_S = 600.0
PROMPTS, TOKENS, CONTEXT = 10, 200, 1024
# vLLM's CPU build normalises the context keys of every drafter layer with the first layer's weight: its texts are the
# target's all the same, its acceptance differs.
ACCEPTANCE_NEAR = 0.1


@dataclass(slots=True)
class Vllm:
    """A server that runs."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def end(self) -> None:
        """Kill it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def start(log: Path) -> Vllm:
    pair = bundled.find("demo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    drafts = {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 7}
    command = [str(program_of(FOLDER, "vllm")), "serve", str(pair.target), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", str(CONTEXT)]
    command += ["--dtype", "float32", "--speculative-config", json.dumps(drafts)]
    environ = {"PATH": os.environ["PATH"], "HOME": str(log.parent), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, start_new_session=True)
    server = Vllm(f"http://127.0.0.1:{port}", process, log)
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5):
            return server
        time.sleep(1.0)
    server.end()
    raise AssertionError(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    if not program_of(FOLDER, "vllm").is_file():
        pytest.skip("vLLM is not installed: make test-engines installs it")
    server = start(tmp_path_factory.mktemp("vllm") / "vllm.log")
    yield server
    server.end()


def service(vllm: Vllm) -> Service:
    begin = EngineServer(vllm.url).starter(None)
    return begin(bundled.find("demo"), LoadConfig(), load_settings(), lambda _event: None)


def answer(session: Any, request: Request) -> tuple[tuple[int, ...], str, Finished]:
    ids: tuple[int, ...] = ()
    text = ""
    for event in session.generate(request):
        if isinstance(event, Step):
            ids += event.token_ids
            text += "".join(piece.text for piece in event.pieces)
        if isinstance(event, Finished):
            return ids, text, event
    raise AssertionError("the reply has no end")


def test_texts_and_acceptance_are_ours(vllm: Vllm, capsys: pytest.CaptureFixture[str]) -> None:
    pair = bundled.find("demo")
    own = load(pair, LoadConfig(device="cpu", engine="reference", dtype="float32", context=CONTEXT))
    theirs = service(vllm)
    rows: list[dict[str, Any]] = []
    try:
        for prompt in held_out(HELD_OUT)[:PROMPTS]:
            request = user_request(prompt.text, limits=Limits(TOKENS), sampling=SamplingParams(temperature=0.0))
            found = list(theirs.submit(request).events())
            mine = answer(own, request)
            text = "".join(p.text for e in found if isinstance(e, Step) for p in e.pieces)
            ids = tuple(i for e in found if isinstance(e, Step) for i in e.token_ids)
            end = next(e for e in found if isinstance(e, Finished))
            assert text == mine[1], prompt.text
            assert not ids or ids[: len(mine[0])] == mine[0], prompt.text
            assert any(isinstance(e, Started) for e in found) and end.stats.mean_acceptance_length is not None
            rows.append(
                {
                    "prompt": prompt.text,
                    "tokens": end.usage.completion_tokens,
                    "vllm": end.stats.mean_acceptance_length,
                    "ours": mine[2].stats.mean_acceptance_length,
                }
            )
    finally:
        theirs.close()
        own.close()
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("vllm", "ours")}
    with capsys.disabled():
        print(f"\n{len(rows)} texts equal; mean acceptance length: vLLM {means['vllm']:.3f}, ours {means['ours']:.3f}")
    assert abs(means["vllm"] / means["ours"] - 1) < ACCEPTANCE_NEAR


def test_a_chat_over_it_answers_and_names_what_is_wrong(vllm: Vllm, cli: Cli) -> None:
    found = cli("chat", "--plain", "--url", vllm.url, stdin="Count from 3 to 7.\n")
    assert found.code == 0 and found.out.strip() == "3, 4, 5, 6, 7" and "acceptance length" in found.err
    other = cli("run", "qwen3-8b", "hi", "--url", vllm.url)
    assert other.code == 3 and "serves demo, not Qwen/Qwen3-8B" in other.err
    wrong = cli("run", "demo", "hi", "--url", vllm.url, "--engine", "sglang")
    assert wrong.code == 7 and "vLLM answers at" in wrong.err


def test_a_server_that_dies_is_named_and_one_that_comes_back_answers(tmp_path: Path) -> None:
    if not program_of(FOLDER, "vllm").is_file():
        pytest.skip("vLLM is not installed: make test-engines installs it")
    server = start(tmp_path / "vllm.log")
    session = service(server)
    try:
        request = user_request("Count from 3 to 7.", sampling=SamplingParams(temperature=0.0))
        assert any(isinstance(event, Finished) for event in session.submit(request).events())
        server.end()
        with pytest.raises(ServerError, match="no server answers"):
            list(session.submit(request).events())
    finally:
        session.close()
        server.end()
