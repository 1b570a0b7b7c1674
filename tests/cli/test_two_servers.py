"""``dflash race`` and ``dflash certify`` over two servers, one that drafts and one that does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Opened, Result
from tests.remote.openai_fake import Fake, running
from tests.remote.scripted_server import ScriptedServer, scripted

pytestmark = pytest.mark.usefixtures("opened")

PARTED = (("Hel", (10,)), ("p!\n", (9, 20)))  # the drafted reply's second token is another one


@pytest.fixture
def drafting() -> Iterator[Fake]:
    with running(Fake()) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[Fake]:
    with running(Fake(speculative=False)) as server:
        yield server


def both(cli: Cli, drafting: Fake, plain: Fake, *argv: str) -> Result:
    return cli(*argv, "--url", drafting.url, "--plain-url", plain.url)


def as_sglang(*fakes: Fake) -> None:
    for fake in fakes:
        fake.program, fake.version = "sglang", "0.5.6"


def test_a_race_runs_the_plain_lane_on_the_second_server(cli: Cli, opened: Opened, drafting: Fake, plain: Fake) -> None:
    result = both(cli, drafting, plain, "race", "demo", "hi")
    assert "‹" not in result.out, "a server tells no origins of tokens"
    assert result.code == 0 and not opened.sessions, result.err
    assert result.out.count("Hello, world!") == 2 and result.out.index("plain,") < result.out.index("drafted:")
    assert "identical: yes\n" in result.out and "acceptance length              -        2.33" in result.out
    assert "x wall clock" in result.out and f"tokens{'8':>26}{'8':>12}\n" in result.out
    assert f"replies come from vLLM 0.32.0 at {drafting.url}, 7 drafts a cycle" in result.err
    assert f"plain replies come from vLLM 0.32.0 at {plain.url}, without drafts" in result.err
    assert "warning" not in result.err and [len(fake.bodies) for fake in (drafting, plain)] == [2, 2]
    seeds = {body["seed"] for fake in (drafting, plain) for _, body in fake.bodies}
    assert len(seeds) == 1 and all(body["temperature"] == 0.0 for _, body in drafting.bodies)


def test_a_race_is_one_object(cli: Cli, drafting: Fake, plain: Fake) -> None:
    found = both(cli, drafting, plain, "race", "demo", "hi", "--json", "--seed", "5").json
    assert found["pair"] == "demo" and found["engine"] == "vllm" and found["seed"] == 5 and found["block_size"] == 8
    assert found["identical"] is True and found["compared"] == "token ids" and found["margin"] is None
    assert found["ar"]["token_ids"] == found["dflash"]["token_ids"] == list(range(10, 18))
    assert found["dflash"]["acceptance_lengths"] == [] and found["ar"]["mean_acceptance_length"] is None
    assert found["dflash"]["mean_acceptance_length"] == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    "likely, words, margin, over",
    [
        ({9: -0.53}, "margin 0.03 by log probability: within 0.5, as near-ties are", 0.03, None),
        ({9: -1.7}, "margin 1.2: more than a near-tie", 1.2, None),
        ({7: -8.5}, "margin over 8: more than a near-tie", None, 8.0),
        ({9: -0.2}, "margin unknown: other scores than these log probabilities decided", None, None),
        ({7: -0.6}, "margin unknown: the drafted token is none of those whose probability is told", None, None),
    ],
)
def test_the_plain_server_is_asked_how_near_the_drafted_token_was(
    cli: Cli,
    drafting: Fake,
    plain: Fake,
    likely: dict[int, float],
    words: str,
    margin: float | None,
    over: float | None,
) -> None:
    drafting.reply, plain.likely = PARTED, likely
    result = both(cli, drafting, plain, "race", "demo", "hi")
    assert result.code == 0 and f"identical: no; first difference at token 1, {words}\n" in result.out
    asked = plain.bodies[-1][1]
    assert (asked["max_tokens"], asked["top_logprobs"], asked["return_tokens_as_token_ids"]) == (2, 20, True)
    found = both(cli, drafting, plain, "race", "demo", "hi", "--json").json
    assert found["margin"] == pytest.approx(margin) and found["margin_over"] == pytest.approx(over)
    assert len(plain.bodies) == 6 and len(drafting.bodies) == 4


def test_a_server_that_gives_no_log_probabilities_leaves_the_margin_unknown(
    cli: Cli, drafting: Fake, plain: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting.reply = PARTED
    monkeypatch.setattr(Fake, "_logprobs", lambda *_: None)
    found = both(cli, drafting, plain, "race", "demo", "hi")
    assert found.code == 0 and "at token 1, margin unknown: " in found.out


def test_sglang_names_no_tokens_so_that_texts_are_compared(cli: Cli, drafting: Fake, plain: Fake) -> None:
    as_sglang(drafting, plain)
    result = both(cli, drafting, plain, "race", "demo", "hi")
    assert result.code == 0 and "identical: yes, as texts: the server names no tokens\n" in result.out, result.err
    assert f"tokens{'8':>26}{'8':>12}\n" in result.out
    drafting.usage = plain.usage = False
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi")
    assert "1 of 1 greedy replies equal, as texts: the server names no tokens\n" in result.out
    assert "strength: text only" in result.out
    drafting.usage = plain.usage = True
    drafting.reply = PARTED
    result = both(cli, drafting, plain, "race", "demo", "hi")
    assert "identical: no; first difference at character 3, margin unknown: the server names no tokens" in result.out
    found = both(cli, drafting, plain, "race", "demo", "hi", "--json").json
    assert found["compared"] == "texts" and found["first_difference"] == 3 and found["ar"]["token_ids"] == []


def test_sampled_replies_of_servers_are_not_judged(cli: Cli, drafting: Fake, plain: Fake) -> None:
    drafting.reply = PARTED
    result = both(cli, drafting, plain, "race", "demo", "hi", "--temperature", "1")
    assert "margin unknown: two sampled requests of one seed differ on a server" in result.out
    assert len(plain.bodies) == 2


def test_servers_that_read_a_prompt_otherwise_are_refused(cli: Cli, drafting: Fake, plain: Fake) -> None:
    plain.prompt_tokens = 6
    result = both(cli, drafting, plain, "race", "demo", "hi")
    assert result.code == 2 and "reads the prompt as 6 tokens, the drafting one as 5" in result.err


def test_equal_replies_are_certified_in_words_that_claim_no_more(
    cli: Cli, opened: Opened, drafting: Fake, plain: Fake
) -> None:
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi", "--prompt-ids", "3,1")
    assert result.code == 0 and not opened.sessions, result.err
    assert "verdict: 2 of 2 greedy replies equal, token by token\n" in result.out and "toy pair" in result.out
    assert f"vLLM 0.32.0 at {drafting.url}, 7 drafts a cycle; plain: vLLM 0.32.0 at {plain.url}" in result.out
    assert "2.33  identical\n" in result.out
    for fake in (drafting, plain):  # a few tokens are asked first, to see what replies can hold
        asked = [(path, body) for path, body in fake.bodies if body["max_tokens"] > 8]
        assert [path for path, _ in asked] == ["/v1/chat/completions", "/v1/completions"]
        assert all(body["temperature"] == 0.0 and body["max_tokens"] == 128 for _, body in asked)
    assert "\nstrength: token by token with margins\n" in result.out
    assert "verdict: 6 of 6 greedy replies equal" in both(cli, drafting, plain, "certify", "demo").out


def test_the_certificate_is_a_report_without_addresses(cli: Cli, drafting: Fake, plain: Fake, tmp_path: Path) -> None:
    drafting.reply, plain.likely, drafting.version = PARTED, {9: -0.53}, "0.28.0"
    file = tmp_path / "report.json"
    argv = ("certify", "demo", "--prompt", "hi", "--report", str(file), "--json", "--no-think")
    result = both(cli, drafting, plain, *argv)
    assert result.code == 0, result.err
    found = result.json
    assert found == json.loads(file.read_text(encoding="utf-8"))
    assert found["verdict"] == "near-tie" and found["failure"] is None and found["near_tie"] == 0.5
    assert found["statement"] == (
        "0 of 1 greedy replies equal, token by token; 1 first difference: 1 near-tie by log probability "
        "(within 0.5, largest margin 0.03)"
    )
    run = found["runs"][0]
    assert (run["case"], run["block_size"], run["tokens"], run["compared"]) == ("greedy", 8, 3, "token ids")
    assert run["divergence"] == {
        "unit": "token",
        "index": 1,
        "ar_id": 11,
        "dflash_id": 9,
        "ar_text": "lo, world!\n",
        "dflash_text": "p!\n",
        "margin": pytest.approx(0.03),
        "over": None,
        "unknown": "",
        "threshold": 0.5,
        "border": False,
        "prefix": "Hel",
        "repeated": [3, 3],
    }
    assert found["strength"] == "token by token with margins" and found["sampled"] is None
    gives = {"token_ids": True, "logprobs": True, "raw_prompts": True, "seeds": True}
    assert found["servers"]["plain"]["gives"] == gives
    servers = found["servers"]
    assert (servers["drafting"]["version"], servers["plain"]["version"]) == ("0.28.0", "0.32.0")
    assert servers["drafting"]["block_size"] == 8 and servers["plain"]["drafts"] is False
    assert "known to be wrong" in str(servers["drafting"]["notices"]) and "127.0.0.1" not in json.dumps(found)
    assert found["prompts"] == [{"kind": "given", "text": "hi", "ids": []}] and found["versions"]["dflash-local"]


def test_a_difference_wider_than_a_near_tie_exits_7_and_says_how_it_was_judged(
    cli: Cli, drafting: Fake, plain: Fake
) -> None:
    drafting.reply, plain.likely = PARTED, {9: -1.7}
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi")
    assert result.code == 7 and "wide: token 1 is 11 'lo, world!\\n' without, 9 'p!\\n' with drafting" in result.out
    assert "1 first difference: 1 wider than any near-tie (over 0.5)" in result.out
    assert "margin 1.2, more than 0.5 by the plain server's log probabilities" in result.err
    found = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi", "--json")
    assert found.code == 7 and found.json["verdict"] == "wide" and "margin 1.2" in found.json["failure"]
    assert json.loads(found.err.splitlines()[-1])["error"]["type"] == "ExactnessError"


def test_a_difference_that_nobody_can_judge_does_not_pass(cli: Cli, drafting: Fake, plain: Fake) -> None:
    as_sglang(drafting, plain)
    assert "2 of 2 greedy replies equal, as texts: the server names no tokens" in (
        both(cli, drafting, plain, "certify", "demo", "--prompt", "hi", "--prompt", "you").out
    )
    drafting.reply = PARTED
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi")
    assert result.code == 1 and "1 first difference: 1 of unknown margin, so not judged" in result.out
    assert "unknown: character 3 is 'lo, world!\\n' without, 'p!\\n' with drafting; margin unknown: the" in result.out
    assert "whether by a near-tie is not known" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("reply", [(("", ()),), (("", (10, 11)),)], ids=["nothing", "what is not read"])
def test_replies_without_a_text_are_not_called_equal(
    cli: Cli, drafting: Fake, plain: Fake, reply: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    as_sglang(drafting, plain)
    drafting.reply = plain.reply = reply
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi")
    assert result.code == 1 and "0 of 1 greedy replies equal" in result.out and "1 without a text" in result.out
    assert "prompt 1: neither reply has a text, so nothing was compared" in result.err


def test_a_reply_that_only_ended_earlier_is_not_judged(cli: Cli, drafting: Fake, plain: Fake) -> None:
    drafting.reply = (("Hel", (10,)), ("lo, ", (11, 12, 13)))
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi")
    assert result.code == 1 and "token 4 is 14 'world!\\n' without, the end with drafting" in result.out
    assert "margin unknown: one of them only ended earlier" in result.out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--planted",), "drafts as it was started"),
        (("--block-size", "4"), "drafts as it was started"),
        (("--seed", "7"), "compared greedily"),
        (("--report", "/"), "is a folder"),
        (("--prompt", " "), "--prompt is empty"),
        (("--max-new-tokens", "0"), "max_new_tokens 0"),
    ],
)
def test_what_a_certificate_of_servers_does_not_take(
    cli: Cli, drafting: Fake, plain: Fake, option: tuple[str, ...], words: str
) -> None:
    result = both(cli, drafting, plain, "certify", "demo", *option)
    assert result.code == 2 and words in result.err and not drafting.bodies and not plain.bodies


@pytest.mark.parametrize("command", [("race", "demo", "hi"), ("certify", "demo", "--prompt", "hi")])
@pytest.mark.parametrize("which", ["drafting", "plain"])
def test_a_server_that_dies_in_the_middle_is_one_line(
    cli: Cli, drafting: Fake, plain: Fake, command: tuple[str, ...], which: str
) -> None:
    {"drafting": drafting, "plain": plain}[which].fault = "dies"
    result = both(cli, drafting, plain, *command)
    assert result.code == 7 and "broke off in the middle of the reply" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize("command", ["race", "certify"])
class TestRefused:
    """Each is one line, before a prompt is sent."""

    def refused(self, result: Result, *words: str, code: int = 2) -> None:
        assert result.code == code and result.out == "" and "Traceback" not in result.err
        assert all(word in result.err for word in words), result.err

    def test_one_server_alone(self, cli: Cli, opened: Opened, drafting: Fake, plain: Fake, command: str) -> None:
        one = cli(command, "demo", "--url", drafting.url)
        self.refused(one, "plain replies need a second one", "without --speculative-config", "--plain-url")
        self.refused(cli(command, "demo", "--plain-url", plain.url), "--url is missing")
        self.refused(both(cli, drafting, drafting, command, "demo"), "are the same server")
        assert not drafting.bodies and not plain.bodies and not opened.sessions

    def test_a_plain_server_that_drafts_and_a_drafting_one_that_does_not(
        self, cli: Cli, drafting: Fake, plain: Fake, command: str
    ) -> None:
        self.refused(
            both(cli, plain, drafting, command, "demo"), plain.url, "does not draft: there is nothing to compare"
        )
        plain.speculative = True
        self.refused(both(cli, drafting, plain, command, "demo"), plain.url, "drafts: it cannot be the plain server")
        plain.metrics = lambda: ""
        self.refused(both(cli, drafting, plain, command, "demo"), "does not report whether it drafts")
        assert not drafting.bodies and not plain.bodies

    def test_another_model_program_or_address(self, cli: Cli, drafting: Fake, plain: Fake, command: str) -> None:
        self.refused(both(cli, drafting, plain, command, "demo", "--engine", "sglang"), "not SGLang", code=7)
        plain.model, plain.root = "other", "/models/other"
        self.refused(both(cli, drafting, plain, command, "demo"), "serves other, not demo", code=3)
        plain.model = "demo"
        as_sglang(plain)
        self.refused(both(cli, drafting, plain, command, "demo"), "both servers must be of one program")
        bad = cli(command, "demo", "--url", drafting.url, "--plain-url", "nowhere")
        self.refused(bad, "--plain-url 'nowhere' is not the address of a server")
        self.refused(both(cli, drafting, plain, command, "demo", "--exact"), "--exact", "decides that")
        assert not drafting.bodies and not plain.bodies


def test_one_llama_cpp_server_that_switches_drafts_off_is_enough(cli: Cli, opened: Opened, tmp_path: Path) -> None:
    page = tmp_path / "verdict.html"
    with scripted(ScriptedServer(takes_off=True, rounding=0.01)) as fake:
        argv = ("certify", "--url", fake.url, "--prompt", "hi", "--max-new-tokens", "20", "--samples", "20")
        result = cli(*argv, "--html", str(page))
    assert result.code == 0 and not opened.sessions, result.err
    assert "plain: llama.cpp b11434-x" in result.out and "drafts switched off by request" in result.out
    assert "strength: token by token with margins\nsampled: " in result.out
    found = page.read_text(encoding="utf-8")
    assert "dflash certify demo --url URL --prompt hi --max-new-tokens 20 --samples 20" in found
    assert fake.url not in found
    modes = [
        body.get("speculative.n_max") for body in fake.requests if body["path"] == "/completion" and body.get("stream")
    ]
    assert None in modes and 0 in modes


def test_samples_are_for_running_servers(cli: Cli, drafting: Fake) -> None:
    result = cli("certify", "demo", "--samples", "5")
    assert result.code == 2 and "--samples is for servers that both run" in result.err


def test_servers_that_name_no_tokens_and_do_not_say_whether_they_draft_are_judged_by_text(
    cli: Cli, drafting: Fake, plain: Fake
) -> None:
    """Stand-ins for ollama, written after its published API pages."""
    for fake in (drafting, plain):
        fake.program, fake.version, fake.metrics = "ollama", "0.30.0", lambda: ""
    result = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi", "--json")
    assert result.code == 0, result.err
    found = result.json
    assert found["strength"] == "text only" and found["verdict"] == "identical"
    assert found["servers"]["plain"]["gives"]["token_ids"] is False
    assert "ollama 0.30.0" in result.err and "does not report whether it drafts" in result.err
    asked = both(cli, drafting, plain, "certify", "demo", "--prompt", "hi", "--samples", "3")
    assert asked.code == 2 and "names no tokens" in asked.err
