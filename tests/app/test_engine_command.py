"""The command that a launched server gets: the registry's, with folders of this machine, with and without a drafter."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_local.app.models import registry
from dflash_local.app.resolve import choose
from dflash_local.app.server_command import HEAD, node_commands, server_command, undrafted, wants_remote_code
from dflash_local.catalog import bundled
from dflash_local.errors import DownloadError, SettingsError, UsageError
from dflash_local.remote.server_checks import Program
from dflash_local.settings import Settings, load
from tests.cli.conftest import DRAFTER as TOY_DRAFTER
from tests.cli.conftest import OVERLAY, TARGET, write_overlay

NAME, DRAFTER = "Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"
SERVER = """    server:
      vllm:
        command: >-
          vllm serve TARGET --speculative-config '{"model": "DRAFTER"}' --max-num-seqs 4
        environment: {VLLM_OF_ROW: "1"}
      sglang:
        command: docker run sglang --model-path TARGET --speculative-draft-model-path DRAFTER
"""


@pytest.fixture
def user(own_home: Path) -> Settings:
    settings = load()
    return replace(settings, hub=replace(settings.hub, offline=False))


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_a_row_s_command_is_taken_word_by_word(user: Settings, program: Program) -> None:
    row = registry(user).find(NAME)
    assert row is not None and row.server is not None and row.target is not None and row.drafter is not None
    launch = {"vllm": row.server.vllm, "sglang": row.server.sglang}[program]
    assert launch is not None
    found = server_command(program, choose("qwen3.5-9b", None, user), user)
    written = [word.replace("TARGET", NAME).replace("DRAFTER", DRAFTER) for word in shlex.split(launch.command)]
    assert list(found.words) == [*written, "--revision", row.target.revision]
    assert found.environment == launch.environment and row.drafter.revision is None
    assert found.fetched == (NAME, DRAFTER)


def test_without_drafts_only_those_options_go(user: Settings) -> None:
    choice = choose(NAME, None, user)
    for program in ("vllm", "sglang"):
        drafted = list(server_command(program, choice, user).words)  # type: ignore[arg-type]
        plain = server_command(program, choice, user, drafts=False)  # type: ignore[arg-type]
        assert not [word for word in plain.words if "specul" in word or DRAFTER in word or "DFLASH" in word]
        assert plain.fetched == (NAME,) and len(plain.words) < len(drafted)
        assert [word for word in drafted if word in plain.words] == list(plain.words)
    words = ["vllm", "serve", "T", "--speculative-config={}", "--a", "1", "--speculative-x", "y", "-z"]
    assert undrafted(words) == ["vllm", "serve", "T", "--a", "1", "-z"]


def test_folders_of_this_machine_take_the_place_of_repositories(user: Settings, own_home: Path) -> None:
    write_overlay(own_home, OVERLAY + SERVER)
    choice = choose(TARGET, None, user)
    assert server_command("vllm", choice, user).fetched == (TARGET, TOY_DRAFTER)
    pair = bundled.find("demo")
    local = replace(choice, target=pair.target)
    found = server_command("vllm", local, user)
    assert found.words[2] == str(pair.target) and found.fetched == (TOY_DRAFTER,)
    assert json.loads(found.words[4]) == {"model": TOY_DRAFTER} and found.environment == {"VLLM_OF_ROW": "1"}
    with pytest.raises(SettingsError, match="starts 'docker'"):
        server_command("sglang", choice, user)
    offline = replace(user, hub=replace(user.hub, offline=True))
    with pytest.raises(DownloadError, match=f"{TARGET} and {TOY_DRAFTER} is not on this machine, and this is offline"):
        server_command("vllm", choice, offline)


def test_another_drafter_gets_the_plain_command_of_its_block(user: Settings, tmp_path: Path) -> None:
    pair = bundled.find("demo")
    choice = choose(NAME, str(pair.drafter), user)
    found = server_command("vllm", choice, user)
    drafts = {"method": "dflash", "model": str(pair.drafter), "num_speculative_tokens": 7}
    assert found.words[:4] == ("vllm", "serve", NAME, "--speculative-config") and json.loads(found.words[4]) == drafts
    with pytest.raises(UsageError, match="the block size of the drafter of Qwen/Qwen3.5-9B is not known"):
        server_command("vllm", choose(NAME, str(tmp_path), user), user)


def test_a_pair_that_is_announced_only_is_not_launched(user: Settings) -> None:
    announced = next(row for row in registry(user).rows if row.status == "announced")
    choice = choose(announced.name, None, user)
    with pytest.raises(DownloadError, match="is announced: no drafter is published yet"):
        server_command("vllm", choice, user)
    assert server_command("vllm", choice, user, drafts=False).words[:2] == ("vllm", "serve")


def test_a_drafter_of_another_kind_is_launched_by_its_row_s_command_alone(user: Settings) -> None:
    found = server_command("vllm", choose("Qwen/Qwen3-14B", None, user), user)
    drafts = {"method": "dspark", "model": "deepseek-ai/dspark_qwen3_14b_block7", "num_speculative_tokens": 7}
    assert json.loads(found.words[4]) == drafts
    other = choose("deepseek-ai/dspark_qwen3_4b_block7", None, user)
    drafts["model"] = "deepseek-ai/dspark_qwen3_4b_block7"
    assert json.loads(server_command("vllm", other, user).words[4]) == drafts
    words = server_command("sglang", other, user).words
    assert words[words.index("--speculative-dspark-block-size") + 1] == "7"
    assert server_command("vllm", other, user, drafts=False).words[:3] == ("vllm", "serve", "Qwen/Qwen3-4B")


@pytest.mark.parametrize("program", ["vllm", "sglang"])
def test_code_of_a_repository_runs_where_the_user_agrees(user: Settings, program: Program) -> None:
    choice = choose("moonshotai/Kimi-K2.5", None, user)
    with pytest.raises(UsageError, match="needs Python code of the repository of moonshotai/Kimi-K2.5") as refused:
        server_command(program, choice, user)
    assert "--trust-remote-code" in refused.value.hint and wants_remote_code(program, choice)
    found = server_command(program, choice, user, trusts=True)
    assert "--trust-remote-code" not in found.words, "the user's own argument brings it"
    wanting = {
        row.name
        for row in registry(user).rows
        if row.server is not None and "--trust-remote-code" in f"{row.server.vllm} {row.server.sglang}"
    }
    assert wanting == {"moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6", "moonshotai/Kimi-K3"}, "tokenizers in Python"


def test_what_a_server_downloads_is_of_the_revision_that_is_known(user: Settings, tmp_path: Path) -> None:
    row = registry(user).find("Qwen/Qwen3-4B")
    assert row is not None and row.target is not None and row.drafter is not None
    target, drafter = row.target.revision, row.drafter.revision
    assert target is not None and drafter is not None
    words = server_command("vllm", choose(row.name, None, user), user).words
    assert words[words.index("--revision") + 1] == target
    assert json.loads(words[words.index("--speculative-config") + 1])["revision"] == drafter
    words = server_command("sglang", choose(row.name, None, user), user).words
    assert words[words.index("--revision") + 1] == target
    assert words[words.index("--speculative-draft-model-revision") + 1] == drafter
    plain = server_command("sglang", choose(row.name, None, user), user, drafts=False).words
    assert target in plain and drafter not in plain
    here = server_command("vllm", replace(choose(row.name, None, user), target=tmp_path), user).words
    assert "--revision" not in here and drafter in str(here)


def test_several_machines_share_the_row_s_command(user: Settings) -> None:
    row = registry(user).find("moonshotai/Kimi-K2.5")
    assert row is not None
    lines = node_commands(row, 2)
    first, second = map(shlex.split, lines["vLLM"])
    assert first[first.index("--tensor-parallel-size") + 1] == "16"  # eight GPUs each
    assert first[-8:] == ["--nnodes", "2", "--node-rank", "0", "--master-addr", HEAD, "--host", HEAD]
    assert second[-7:] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", HEAD, "--headless"]
    assert first[:-8] == second[:-7] and "--trust-remote-code" not in first
    first, second, third = map(shlex.split, node_commands(row, 3)["SGLang"])
    assert first[0] == "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1" and first[first.index("--tp-size") + 1] == "24"
    assert first[-8:] == ["--nnodes", "3", "--node-rank", "0", "--dist-init-addr", f"{HEAD}:20000", "--host", HEAD]
    assert second[-6:] == ["--nnodes", "3", "--node-rank", "1", "--dist-init-addr", f"{HEAD}:20000"]
    assert third[:-3] == second[:-3] and third[-3] == "2"
    bare = registry(user).find("demo")
    assert bare is not None and node_commands(bare, 2) == {}
