"""What is found out of a server before the first request, and what is refused or warned of."""

from __future__ import annotations

from http.client import BadStatusLine, IncompleteRead
from typing import Any

import pytest

from dflash_local.errors import BusyError, DFlashError, ServerError, SettingsError, UnknownModelError, UsageError
from dflash_local.remote.endpoint import ServerEndpoint, endpoint, error_message, reason_of
from dflash_local.remote.server_checks import FAULTS, ServedModel, ServerFacts, WantedModel, probe
from tests.remote.openai_fake import Fake, running

PAIR = WantedModel("Qwen/Qwen3.5-9B", ("Qwen/Qwen3.5-9B",), ("z-lab/Qwen3.5-9B-DFlash",), 8)


def facts_of(fake: Fake, wanted: WantedModel = WantedModel(), program: Any = None) -> ServerFacts:  # noqa: B008
    with running(fake):
        return probe(endpoint(fake.url, fake.token), wanted, program)


def served(**more: Any) -> Fake:
    return Fake(model="Qwen/Qwen3.5-9B", root="Qwen/Qwen3.5-9B", **more)


def test_vllm_by_its_version_and_its_counters() -> None:
    facts = facts_of(served(), PAIR)
    assert (facts.program, facts.version, facts.served, facts.context) == ("vllm", "0.32.0", "Qwen/Qwen3.5-9B", 1024)
    assert (facts.drafts, facts.block_size, facts.drafter) == (True, 8, None)  # vLLM does not report which drafter
    assert facts.notices == () and facts.has_tokenizer and facts.engine == "vllm"
    assert facts.loaded_as == f"vLLM 0.32.0 at {facts.url}, 7 drafts a cycle"
    assert facts.as_dict()["served"] == "Qwen/Qwen3.5-9B"


def test_sglang_by_its_server_info() -> None:
    facts = facts_of(served(program="sglang", version="0.5.19"), PAIR)
    assert (facts.program, facts.version, facts.method, facts.block_size) == ("sglang", "0.5.19", "DFLASH", 8)
    assert facts.drafter == "z-lab/Qwen3.5-9B-DFlash" and facts.notices == ()
    assert "server-secret" not in repr(facts)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (served(speculative=False), "was started without speculative decoding"),
        (served(program="sglang", speculative=False), "was started without speculative decoding"),
        (served(metrics=lambda: ""), "does not report whether it drafts: no counters on its /metrics"),
        (served(drafts=15, kept=[0] * 15), "drafts 15 tokens a cycle; the drafter was trained for 7"),
        (served(program="sglang", info={"speculative_algorithm": "EAGLE3"}), "drafts with EAGLE3, not with a DFlash"),
        (
            served(program="sglang", info={"speculative_draft_model_path": "other/Drafter\x1b[2J"}),
            "drafts with other/Drafter␛[2J, not with z-lab/Qwen3.5-9B-DFlash",
        ),
    ],
)
def test_what_is_not_as_it_might_be_is_a_warning(fake: Fake, words: str) -> None:
    (notice,) = facts_of(fake, PAIR).notices
    assert words in notice and "\n" not in notice


@pytest.mark.parametrize("version", ["0.28.0", "0.28.1.dev3+g1234", "0.11.2rc1"])
def test_a_version_known_to_be_wrong_is_named_with_its_source(version: str) -> None:
    notices = facts_of(served(version=version), PAIR).notices
    assert len(notices) == len(FAULTS) and all(f"vLLM {version} is known to be wrong" in line for line in notices)
    assert "vllm-project/vllm PR 54282" in notices[0]


def test_a_drafter_in_a_folder_called_as_its_repository_is_the_drafter() -> None:
    info = {"speculative_draft_model_path": "/models/Qwen3.5-9B-DFlash/"}
    assert facts_of(served(program="sglang", info=info), PAIR).notices == ()


@pytest.mark.parametrize("version", ["0.29.0", "0.32.0+cpu", "1.0", "dev"])
def test_a_version_that_is_not_known_to_be_wrong_is_not_warned_of(version: str) -> None:
    assert facts_of(served(version=version), PAIR).notices == ()
    assert all(fault.source for fault in FAULTS)


@pytest.mark.parametrize(
    ("model", "root", "names", "right"),
    [
        ("demo", "/x/target", ("demo",), True),
        ("DEMO", "", ("demo",), True),
        ("mine", "Qwen/Qwen3.5-9B", ("Qwen/Qwen3.5-9B",), True),
        ("mine", "/models/Qwen3.5-9B/", ("Qwen/Qwen3.5-9B",), True),
        ("mine", "C:\\models\\Qwen3.5-9B", ("Qwen/Qwen3.5-9B",), True),
        ("Qwen3.5-9B", "/models/x", ("Qwen/Qwen3.5-9B",), True),
        ("mine", "/models/Qwen3.5-9B-FP8", ("Qwen/Qwen3.5-9B",), False),
        ("Qwen/Qwen3.5-4B", "", ("Qwen/Qwen3.5-9B",), False),
        ("", "", ("demo",), False),
        ("demo-hybrid", "/pairs/demo-hybrid/target", ("demo", "/pairs/demo/target"), False),
        ("mine", "/pairs/demo/target/", ("demo", "/pairs/demo/target"), True),
        ("", "", ("", "a/"), False),
    ],
)
def test_a_model_goes_by_its_names_or_its_folder(model: str, root: str, names: tuple[str, ...], right: bool) -> None:
    assert ServedModel(model, root).is_one_of(names) is right


@pytest.mark.parametrize(
    ("fake", "program", "kind", "words"),
    [
        (Fake(), None, UnknownModelError, "serves demo, not Qwen/Qwen3.5-9B"),
        (served(fault="loading"), None, BusyError, "is busy (status 503)"),
        (served(token="secret"), None, ServerError, "wants a token (status 401)"),
        (served(), "sglang", ServerError, "vLLM answers at"),
        (served(program="sglang"), "vllm", ServerError, "SGLang answers at"),
        (served(program="llama.cpp"), None, ServerError, "is no server that is known here"),
        (served(version=""), None, ServerError, "is no server that is known here"),
    ],
)
def test_what_cannot_serve_is_refused_in_a_line(fake: Fake, program: Any, kind: type[DFlashError], words: str) -> None:
    with running(fake), pytest.raises(kind) as caught:
        probe(endpoint(fake.url), PAIR, program)
    assert words in caught.value.message and "\n" not in str(caught.value) and caught.value.hint


def test_a_wrong_token_is_refused_and_not_shown() -> None:
    with running(served(token="secret")) as fake:
        with pytest.raises(ServerError, match="refuses the token") as caught:
            probe(endpoint(fake.url, "a-wrong-one"), PAIR)
        assert "DFLASH_ENGINE_TOKEN" in caught.value.hint and "a-wrong-one" not in str(caught.value)
        assert probe(endpoint(fake.url, "secret"), PAIR).program == "vllm"


def test_several_models_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Fake()) as fake:
        models = [{"id": "one"}, {"id": "two"}, {"id": "adapter", "parent": "one"}, {"id": 3}, None]
        content = {"data": models}
        monkeypatch.setattr(
            ServerEndpoint, "get_object", lambda _self, path, *_: content if path == "/v1/models" else {"version": "1"}
        )
        with pytest.raises(UnknownModelError, match="serves one, two"):
            probe(endpoint(fake.url), WantedModel())


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        (" http://gpu-box:30000/v1/ ", "http://gpu-box:30000"),
        ("https://example.org/engine/v1", "https://example.org/engine"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_an_address_may_end_in_v1(url: str, found: str) -> None:
    assert endpoint(url).url == found


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h/?a=1", "http://h/#a", "http://[x",
     "http://h\n/a", "http://a b"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        endpoint(url)


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError, match="DFLASH_ENGINE_TOKEN") as caught:
        endpoint("http://me:secret@host:8000")
    assert "secret" not in str(caught.value)


def test_a_token_is_checked_and_never_shown() -> None:
    assert endpoint("http://h", "  ").token is None
    assert "t0k" not in repr(endpoint("http://h", "t0k"))
    for bad in ("a\nb: c", "naïve\u2028"):
        with pytest.raises(SettingsError, match="DFLASH_ENGINE_TOKEN"):
            endpoint("http://h", bad)


@pytest.mark.parametrize(
    ("url", "token", "clear"),
    [
        ("http://gpu-box:8000", "t", True),
        ("http://gpu-box:8000", None, False),
        ("https://gpu-box", "t", False),
        ("http://127.0.0.1:1", "t", False),
        ("http://localhost:1", "t", False),
        ("http://[::1]:1", "t", False),
    ],
)
def test_a_token_over_plain_http_to_another_machine_is_seen(url: str, token: str | None, clear: bool) -> None:
    assert endpoint(url, token).in_the_clear is clear


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (TimeoutError("timed out"), "no answer in time"),
        (IncompleteRead(b"half"), "the connection was closed"),
        (ValueError(), "ValueError"),
        (BadStatusLine("\x1b]0;x\n"), "␛]0;x␊"),
    ],
)
def test_why_a_connection_failed_is_a_few_safe_words(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no\\nway", "code": 400}}', "no␊way"),
        (b'{"object": "error", "message": "no"}', "no"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b"<html>", ""),
        (b'{"error": {"message": 3}}', ""),
        (b"[" * 100_000, ""),
        (b'{"message": "' + b"x" * 999 + b'"}', "x" * 300),
    ],
)
def test_a_servers_own_words_are_one_safe_short_line(body: bytes, message: str) -> None:
    assert error_message(body) == message
