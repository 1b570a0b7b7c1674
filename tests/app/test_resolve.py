"""From a name to a pair that is here: offers, what is missing, what runs elsewhere, what fits, how it thinks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local.catalog import bundled
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.planner import hardware, machine
from dflash_local.store import lock
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, Cli, Opened, contents, write_overlay
from tests.fake_hub import FakeHub

GIB = 2**30


def test_a_pair_that_is_not_here_is_offered(
    cli: Cli, toy_hub: FakeHub, opened: Opened, answers: Callable[..., list[str]]
) -> None:
    alone = cli("run", "toy-9b", "hi")
    assert alone.code == 4 and alone.out == ""
    assert alone.err.splitlines() == [
        f"error: {TARGET} is not on this machine (11.3 MiB)",
        f"hint: dflash pull {TARGET}",
    ]
    asked = answers(False)
    assert cli("run", "toy-9b", "hi").code == 130 and not toy_hub.requests
    assert asked[0].startswith(f"{TARGET} is not on this machine (11.3 MiB). Download to ")
    answers(True)
    went_on = cli("run", "toy-9b", "hi")
    assert went_on.code == 0 and opened.pairs[-1].name == TARGET and went_on.out == "Hello, world!\n"
    assert [path.name for path in opened.pairs[-1].target.parents][1].startswith("models--toys")


def test_half_a_pair_is_said_to_be_half(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    toy_hub.fault("model.safetensors", "404", times=99)
    assert cli("pull", TARGET).code == 4
    partial = cli("run", TARGET, "hi")
    assert partial.code == 4 and f"{TARGET} is only partly on this machine" in partial.err
    assert f"{TARGET}/model.safetensors" in partial.err


def test_without_drafting_the_target_alone_will_do(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    assert cli("pull", TARGET).code == 0
    assert cli("rm", DRAFTER, "--yes").code == 0
    assert cli("run", TARGET, "hi").code == 4
    assert cli("run", TARGET, "hi", "--mode", "ar").code == 0
    assert opened.pairs[-1].drafter is None


def test_folders_are_found_from_any_other(
    cli: Cli, opened: Opened, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process has another current folder than the command."""
    monkeypatch.chdir(local.parent)
    assert cli("run", local.name, "hi", "--drafter", local.name, "--no-fit-check").code == 0
    assert (opened.pairs[-1].target, opened.pairs[-1].drafter) == (local, local)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (
            ("moonshotai/Kimi-K2.5",),
            5,
            ("runs on a server only", "dflash chat moonshotai/Kimi-K2.5 --url", "vllm serve moonshotai/Kimi-K2.5"),
        ),
        (("Qwen/Qwen3.8-27B",), 4, ("Qwen/Qwen3.8-27B", "dflash pull")),
        (("zai-org/GLM-5.1",), 4, ("announced", "no drafter is published yet")),
        (("Qwen/Qwen3.5-9",), 3, ("unknown model", "Qwen/Qwen3.5-9B")),
        (("kimi2.5",), 3, ("moonshotai/Kimi-K2.5",)),
        (("dmo",), 3, ("did you mean 'demo'",)),
        (("some/model",), 3, ("unknown model", "--drafter")),
        (("demo", "--drafter", "a/b/c"), 2, ("neither on this machine nor a repository",)),
        (("\x1b]0;x\x07/../y",), 3, ("unknown model",)),
    ],
)
def test_what_cannot_run_is_told_in_a_line(
    cli: Cli, opened: Opened, argv: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = cli("run", argv[0], "hi", *argv[1:])
    assert result.code == code and not opened.sessions and "\x1b" not in result.err
    assert all(word in result.err for word in words), result.err
    assert len(result.err.splitlines()) == 2


def test_a_mirror_named_by_the_user_is_pulled_from_there(
    cli: Cli, toy_hub: FakeHub, own_home: Path, opened: Opened
) -> None:
    write_overlay(own_home, OVERLAY.replace("aliases: [toy-9b]", "mirrors: [m-toys/Toy-9B-DFlash]"))
    toy_hub.add_repo("m-toys/Toy-9B-DFlash", contents(toy_hub, DRAFTER))
    planned = cli("pull", "m-toys/Toy-9B-DFlash", "--dry-run", "--json").json
    assert [repo["repo"] for repo in planned["repos"]] == [TARGET, "m-toys/Toy-9B-DFlash"]
    assert cli("pull", "m-toys/Toy-9B-DFlash").code == 0
    assert cli("run", TARGET, "hi").code == 0 and opened.pairs[-1].generations
    assert "models--m-toys--Toy-9B-DFlash" in str(opened.pairs[-1].drafter)


def test_a_targets_own_layer_is_its_drafter_and_no_other_is_fetched(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    planned = cli("pull", TARGET, "--drafter", "mtp", "--dry-run", "--json").json
    assert [repo["repo"] for repo in planned["repos"]] == [TARGET]
    pulled = cli("pull", TARGET, "--drafter", "mtp")
    assert pulled.code == 0 and f"next: dflash chat {TARGET} --drafter mtp" in pulled.out
    assert cli("run", TARGET, "hi", "--drafter", "mtp").code == 0
    pair = opened.pairs[-1]
    assert pair.drafter == pair.target and pair.generations == () and pair.acceptance_band is None and not pair.counted
    assert cli("run", "demo-hybrid", "hi", "--drafter", "mtp").code == 0
    assert opened.pairs[-1].drafter == opened.pairs[-1].target == bundled.FOLDER / "demo-hybrid/target"


def test_a_drafter_that_copies_the_text_is_a_word_and_nothing_is_fetched(
    cli: Cli, toy_hub: FakeHub, opened: Opened
) -> None:
    planned = cli("pull", TARGET, "--drafter", LOOKUP, "--dry-run", "--json").json
    assert [repo["repo"] for repo in planned["repos"]] == [TARGET]
    assert f"next: dflash chat {TARGET} --drafter {LOOKUP}" in cli("pull", TARGET, "--drafter", LOOKUP).out
    assert cli("run", TARGET, "hi", "--drafter", LOOKUP).code == 0
    assert opened.pairs[-1].drafter == folder_of(LOOKUP) and opened.pairs[-1].acceptance_band is None


def test_a_target_that_the_registry_lacks_has_its_own_layer_too(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    toy_hub.add_repo("own/Tuned", contents(toy_hub, TARGET))
    assert "own/Tuned is not on this machine" in cli("run", "own/Tuned", "hi", "--drafter", "mtp").err
    assert cli("pull", "own/Tuned", "--drafter", "mtp").code == 0
    assert cli("run", "own/Tuned", "hi", "--drafter", "mtp").code == 0
    assert opened.pairs[-1].drafter == opened.pairs[-1].target


def test_replies_think_as_the_drafter_was_trained(cli: Cli, toy_hub: FakeHub, own_home: Path, opened: Opened) -> None:
    assert cli("pull", TARGET).code == 0
    cases: tuple[tuple[str, tuple[str, ...], bool, bool], ...] = (
        ("required", (), True, False),
        ("required", ("--no-think",), False, True),
        ("off", (), False, False),
        ("off", ("--think",), True, True),
        ("either", ("--think",), True, False),
    )
    for trained, option, thinks, warned in cases:
        write_overlay(own_home, OVERLAY.replace("thinking: either", f'thinking: "{trained}"'))
        result = cli("run", TARGET, "hi", *option)
        assert result.code == 0 and opened.session.requests[-1].thinking is thinks, (trained, option)
        assert ("this drafter was trained" in result.err) is warned, (trained, option)


def test_files_of_a_session_are_noted_while_it_lasts(
    cli: Cli, toy_hub: FakeHub, opened: Opened, own_home: Path
) -> None:
    assert cli("pull", TARGET).code == 0
    locks = own_home / ".cache" / "dflash-local" / "locks"
    seen: list[tuple[int, ...]] = []
    make = opened.make

    def watched(pair: bundled.Pair) -> object:
        seen.extend(lock.users(locks, repo) for repo in (TARGET, DRAFTER))
        return make(pair)

    opened.make = watched  # type: ignore[assignment]
    assert cli("run", TARGET, "hi").code == 0
    assert len(seen) == 2 and all(len(pids) == 1 for pids in seen)
    assert lock.users(locks, TARGET) == () == lock.users(locks, DRAFTER)


@pytest.fixture
def eight_b(local: Path) -> Path:
    """A folder with the configuration of Qwen3-8B and nothing else."""
    from dflash_local.catalog.shapes import shape

    (local / "config.json").write_text(json.dumps(shape("Qwen/Qwen3-8B")), encoding="utf-8")
    return local


def memory_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable", lambda _total: round(gib * GIB))
    monkeypatch.setattr(hardware, "memory", lambda: hardware.Memory(64 * GIB, 64 * GIB, limited=False))
    monkeypatch.setattr(hardware, "computes_bfloat16", lambda: False)


def test_what_does_not_fit_is_refused_before_loading(
    cli: Cli, opened: Opened, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(20, monkeypatch)
    argv = ("run", str(eight_b), "hi", "--mode", "ar", "--device", "cpu")
    result = cli(*argv)
    assert result.code == 5 and not opened.sessions
    assert "float32 needs" in result.err and "20.0 GiB usable" in result.err
    assert "this fits: " in result.err and "--quantize" in result.err and "--no-fit-check" in result.err
    assert cli(*argv, "--no-fit-check").code == 0 and opened.loads[-1].context is None


def test_the_context_is_what_fits_or_what_was_asked(
    cli: Cli, opened: Opened, eight_b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("run", str(eight_b), "hi", "--mode", "ar", "--device", "cpu")
    memory_of(64, monkeypatch)
    assert cli(*argv).code == 0 and opened.loads[-1].context == 40960
    plan = ("plan", str(eight_b), "--mode", "ar", "--device", "cpu", "--context", "40960", "--json")
    memory_of(cli(*plan).json["plan"]["ledger"]["total"] / GIB - 1 / 1024, monkeypatch)
    smaller = cli(*argv)
    context = opened.loads[-1].context
    assert context is not None and 2048 <= context < 40960
    assert f"context {context:,} of 40,960: what fits" in smaller.err
    assert cli(*argv, "--context", "3000").code == 0 and opened.loads[-1].context == 3000
    assert cli(*argv, "--context", "40960").code == 5
    assert cli(*argv, "--context", "50000").code == 2


def test_a_model_is_changed_by_name_inside_a_chat(cli: Cli, toy_hub: FakeHub, opened: Opened) -> None:
    assert cli("pull", TARGET).code == 0
    talked = cli("chat", stdin="/model toy-9b\n/model kimi-k2.5\n/model\n")
    assert talked.code == 0 and f"now talking to {TARGET}" in talked.err
    assert "error: moonshotai/Kimi-K2.5 runs on a server only" in talked.err
    assert [pair.name for pair in opened.pairs] == ["demo", TARGET]


def test_a_variant_is_offered_with_its_own_size_and_the_drafter_of_its_row(cli: Cli, toy_hub: FakeHub) -> None:
    """The drafter's 3.22 GiB and the variant's own 16.8, not the 51.75 of the target it is a form of."""
    by_name = cli("run", "qwen3.6-27b", "--variant", "autoround-int4", "--no-fit-check", "hi")
    repo = "Lorbus/Qwen3.6-27B-int4-AutoRound"
    assert by_name.code == 4 and f"{repo} is not on this machine (20.0" in by_name.err
    assert f"dflash pull {repo}" in by_name.err
    assert cli("run", repo, "--no-fit-check", "hi").err == by_name.err and not toy_hub.requests
