"""A real vLLM on the CPU serves the demo pair with method dflash: what comes through it beside our own engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_local.app.resolve import choose
from dflash_local.app.server_launch import launch
from dflash_local.app.server_pairs import wanted_model
from dflash_local.bench.prompts import held_out
from dflash_local.catalog import bundled
from dflash_local.engine.load_pair import load
from dflash_local.errors import ServerError
from dflash_local.events import Finished, Started, Step
from dflash_local.load_config import LoadConfig
from dflash_local.remote.openai_server import attach
from dflash_local.remote.server_checks import ServerFacts
from dflash_local.remote.server_process import ServerProcess
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.service.service import Service
from dflash_local.settings import load as load_settings
from tests.cli.conftest import Cli
from tests.engines.environment import program_of

FOLDER = Path(__file__).resolve().parents[2] / ".venv-vllm"
NEEDS_VLLM = pytest.mark.skipif(
    not program_of(FOLDER, "vllm").is_file(), reason="vLLM is not installed: make test-engines installs it"
)
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900), NEEDS_VLLM]
PROMPTS, TOKENS, CONTEXT = 10, 200, 1024
# vLLM's CPU build normalises the context keys of every drafter layer with the first layer's weight: its texts are the
# target's all the same, its acceptance differs.
ACCEPTANCE_NEAR = 0.1
ON_A_CPU = ("--enforce-eager", "--max-model-len", str(CONTEXT), "--dtype", "float32")
VARIABLES = {
    "DFLASH_VLLM": str(program_of(FOLDER, "vllm")),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def started(home: Path, drafts: bool = True, token: str | None = None) -> ServerProcess:
    """A server of the demo pair, to be used in a ``with``."""
    user = load_settings({"PATH": "/usr/bin:/bin", "HOME": str(home), **VARIABLES})
    return launch("vllm", choose("demo", None, user), user, drafts, ON_A_CPU, token=token)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(tmp_path_factory.mktemp("vllm")) as server:
        yield server


def service(vllm: ServerProcess) -> Service:
    wanted = wanted_model(bundled.find("demo"), None, load_settings())
    return Service.over(attach(vllm.endpoint, wanted, "vllm"))


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


def test_texts_and_acceptance_are_ours(vllm: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    pair = bundled.find("demo")
    own = load(pair, LoadConfig(device="cpu", engine="reference", dtype="float32", context=CONTEXT))
    theirs = service(vllm)
    rows: list[dict[str, Any]] = []
    try:
        for prompt in held_out(bundled.HELD_OUT)[:PROMPTS]:
            request = user_request(prompt.text, limits=Limits(TOKENS), sampling=SamplingParams(temperature=0.0))
            found = list(theirs.submit(request))
            mine = answer(own, request)
            steps, end = [e for e in found if isinstance(e, Step)], next(e for e in found if isinstance(e, Finished))
            text, ids = "".join(p.text for e in steps for p in e.pieces), tuple(i for e in steps for i in e.token_ids)
            assert text == mine[1], prompt.text
            assert not ids or ids[: len(mine[0])] == mine[0], prompt.text
            assert any(isinstance(e, Started) for e in found) and end.stats.mean_acceptance_length is not None
            rows.append({"vllm": end.stats.mean_acceptance_length, "ours": mine[2].stats.mean_acceptance_length})
    finally:
        theirs.close()
        own.close()
    means = {name: sum(row[name] for row in rows) / len(rows) for name in ("vllm", "ours")}
    with capsys.disabled():
        print(f"\n{len(rows)} texts equal; mean acceptance length: vLLM {means['vllm']:.3f}, ours {means['ours']:.3f}")
    assert abs(means["vllm"] / means["ours"] - 1) < ACCEPTANCE_NEAR


def test_a_chat_over_it_answers_and_names_what_is_wrong(
    vllm: ServerProcess, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = cli("run", "demo", "hi", "--url", vllm.endpoint.url)
    assert refused.code == 7 and "wants a token" in refused.err
    monkeypatch.setenv("DFLASH_ENGINE_TOKEN", vllm.endpoint.token or "")
    found = cli("chat", "--plain", "--url", vllm.endpoint.url, stdin="Count from 3 to 7.\n")
    assert found.code == 0 and found.out.strip() == "3, 4, 5, 6, 7" and " a step" in found.err
    other = cli("run", "qwen3-8b", "hi", "--url", vllm.endpoint.url)
    assert other.code == 3 and "serves demo, not Qwen/Qwen3-8B" in other.err
    wrong = cli("run", "demo", "hi", "--url", vllm.endpoint.url, "--engine", "sglang")
    assert wrong.code == 7 and "vLLM answers at" in wrong.err


def test_a_plain_server_answers_and_one_that_dies_is_named(tmp_path: Path) -> None:
    with started(tmp_path, drafts=False) as server:
        session = service(server)
        facts = session.facts
        assert isinstance(facts, ServerFacts) and facts.drafts is False and facts.block_size == 0
        greedy = SamplingParams(temperature=0.0)
        request = user_request("Count from 3 to 7.", sampling=greedy)
        events = list(session.submit(request))
        assert "".join(p.text for e in events if isinstance(e, Step) for p in e.pieces).strip() == "3, 4, 5, 6, 7"
        server.stop()
        with pytest.raises(ServerError, match="no server answers"):
            list(session.submit(request))
        session.close()


def test_one_command_launches_it(cli: Cli, launching: tuple[str, ...]) -> None:
    *asked, words = ("Count from 3 to 7.", *launching)
    found = cli("run", "demo", *asked, words)
    assert found.code == 0 and found.out.strip() == "3, 4, 5, 6, 7", found.err
    failed = cli("run", "demo", *asked, f"{words} --max-num-seqs none")
    assert failed.code == 7 and "argument --max-num-seqs: invalid" in failed.err, failed.err
