"""Two real vLLM servers of the demo pair on the CPU, one that drafts and one that does not: race and certificate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_local.remote import openai_server
from dflash_local.remote.endpoint import TOKEN_VARIABLE
from dflash_local.remote.server_process import ServerProcess
from tests.cli.conftest import Cli
from tests.engines.test_vllm import NEEDS_VLLM, started

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500), NEEDS_VLLM]
Both = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """The drafting one and the plain one."""
    home = tmp_path_factory.mktemp("vllm")
    with started(home) as drafting, started(home, drafts=False, token=drafting.endpoint.token) as plain:
        yield drafting, plain


@pytest.fixture(autouse=True)
def token(servers: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, servers[0].endpoint.token or "")


def urls(servers: Both) -> tuple[str, ...]:
    return "--url", servers[0].endpoint.url, "--plain-url", servers[1].endpoint.url


def test_the_certificate_of_a_right_server(servers: Both, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    found = cli("certify", "demo", *urls(servers), "--json")
    assert found.code == 0, found.err
    report = found.json
    assert report["verdict"] == "identical" and report["servers"]["plain"]["drafts"] is False
    assert report["servers"]["drafting"]["block_size"] == 8 and len(report["runs"]) == 6
    assert all(run["compared"] == "token ids" and run["mean_acceptance_length"] > 2 for run in report["runs"])
    with capsys.disabled():
        print(f"\n{report['statement']}")


def test_a_race_over_both(servers: Both, cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    found = cli("race", "demo", "Count from 3 to 7.", *urls(servers), "--json").json
    assert found["identical"] is True and found["compared"] == "token ids" and found["text"] == "3, 4, 5, 6, 7"
    assert found["dflash"]["mean_acceptance_length"] > 2 and found["ar"]["mean_acceptance_length"] is None
    with capsys.disabled():
        print(f"\nwall clock {found['wall_clock_ratio']:.2f}x, decode {found['decode_ratio']:.2f}x")


def test_swapped_servers_are_refused(servers: Both, cli: Cli) -> None:
    drafting, plain = servers
    swapped = cli("race", "demo", "hi", "--url", plain.endpoint.url, "--plain-url", drafting.endpoint.url)
    assert swapped.code == 2 and "does not draft: there is nothing to compare" in swapped.err


def test_a_server_that_writes_another_text_is_found_out_with_its_margin(
    servers: Both, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafting server gets another prompt than the plain one."""
    real = openai_server.body_of
    ids = {"dflash": [7, 8, 9], "ar": [7, 8, 10]}

    def other(request, *rest):  # type: ignore[no-untyped-def]
        path, body = real(request, *rest)
        asked = body.get("prompt")  # also a prefix that is asked again
        return path, body if asked is None else body | {"prompt": [*ids[request.mode], *asked[3:]]}

    monkeypatch.setattr(openai_server, "body_of", other)
    found = cli("certify", "demo", *urls(servers), "--prompt-ids", "7,8,9", "--json")
    assert found.code == 7, found.err
    run = found.json["runs"][0]["divergence"]
    assert found.json["verdict"] == "wide" and (run["margin"] or run["over"]) > 0.5, found.out
    with capsys.disabled():
        print(f"\n{found.json['statement']}")
