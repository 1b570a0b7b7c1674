"""Targets that no row names find the drafter of the one whose architecture they have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.models import registry
from dflash_local.app.resolve import choose, resolve
from dflash_local.catalog import bundled
from dflash_local.catalog.row import Repo
from dflash_local.catalog.shapes import shape
from dflash_local.checkpoint_files.source import open_source
from dflash_local.events import LoadProgress, Notice
from tests.cli.conftest import Cli, Opened, write_overlay
from tests.fake_hub import FakeHub


@pytest.fixture
def tuned(tmp_path: Path) -> Callable[..., Path]:
    """``tuned("acme-9b", "Qwen/Qwen3.5-9B", key=value)``: a folder with that configuration and nothing else."""

    def make(name: str, known: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**(shape(known) or {}), **changes}), encoding="utf-8")
        return folder

    return make


def snapshot(home: Path, repo: str, files: dict[str, str]) -> Path:
    """A repository in the shared cache."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "a" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    (folder / "snapshots" / commit).mkdir(parents=True)
    for name, text in files.items():
        (folder / "snapshots" / commit / name).write_text(text, encoding="utf-8")
    return folder / "snapshots" / commit


def chosen(folder: Path) -> tuple[str, tuple[str, ...]]:
    choice = choose(str(folder), None, settings.load())
    assert choice.base is not None and isinstance(choice.drafter, Repo)
    return choice.drafter.id, choice.base.others


def test_every_known_target_is_alike_to_itself(tmp_path: Path, tuned: Callable[..., Path]) -> None:
    user = settings.load()
    rows = [row for row in registry(user).rows if row.runs_here and row.drafter]
    assert len(rows) > 10
    for number, row in enumerate(rows):
        assert row.target is not None and row.drafter is not None
        folder = tuned(f"{number}-{row.name.partition('/')[2]}-mine", row.target.id)
        assert chosen(folder)[0] == row.drafter.id


def test_of_several_the_one_that_is_named_or_here_is_taken(own_home: Path, tuned: Callable[..., Path]) -> None:
    assert chosen(tuned("mine", "Qwen/Qwen3.6-27B")) == (
        "z-lab/Qwen3.5-27B-DFlash",
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
    )
    assert chosen(tuned("Qwen3.6-27B-mine", "Qwen/Qwen3.6-27B"))[0] == "z-lab/Qwen3.6-27B-DFlash"
    origin = {"_name_or_path": "/models/Qwen3.6-27B"}
    assert chosen(tuned("other", "Qwen/Qwen3.6-27B", **origin))[0] == "z-lab/Qwen3.6-27B-DFlash"
    snapshot(own_home, "z-lab/Qwen3.6-27B-DFlash", {"config.json": "{}"})
    found, others = chosen(tuned("third", "Qwen/Qwen3.6-27B"))
    assert found == "z-lab/Qwen3.6-27B-DFlash" and others == ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.8-27B")


def test_another_architecture_finds_none(cli: Cli, opened: Opened, tuned: Callable[..., Path]) -> None:
    folder = tuned("mine", "Qwen/Qwen3-8B", intermediate_size=12000)
    assert choose(str(folder), None, settings.load()).base is None
    assert "no drafter is known" in cli("run", str(folder), "hi", "--no-fit-check").err
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert choose(str(folder), None, settings.load()).base is None


def test_it_says_so_and_asks_for_the_drafter_alone(
    cli: Cli, opened: Opened, toy_hub: FakeHub, tuned: Callable[..., Path]
) -> None:
    folder = tuned("mine", "Qwen/Qwen3.5-9B")
    result = cli("run", str(folder), "hi")
    assert result.code == 4 and result.err.splitlines() == [
        f"{folder} has the architecture of Qwen/Qwen3.5-9B: the drafter of Qwen/Qwen3.5-9B is taken; "
        f"dflash check {folder} --only drafter tells whether it serves this fine-tune",
        "error: the drafter of Qwen/Qwen3.5-9B is not on this machine (2.41 GiB)",
        f"hint: dflash pull {folder} --drafter z-lab/Qwen3.5-9B-DFlash",
    ]
    alone = cli("run", str(folder), "hi", "--mode", "ar", "--no-fit-check")
    assert alone.code == 0 and alone.err.count("architecture") == 0 and opened.pairs[-1].drafter is None


def test_a_repository_that_is_here_finds_it_too(cli: Cli, opened: Opened, own_home: Path) -> None:
    wanted = cli("run", "acme/Mine-9B", "hi")
    assert wanted.code == 3 and "--drafter" in wanted.err
    like = cli("run", "acme/Qwen3.5-9B-Mine", "hi")
    assert "for a fine-tune of it: --drafter z-lab/Qwen3.5-9B-DFlash" in like.err
    snapshot(own_home, "acme/Mine-9B", {"config.json": json.dumps(shape("Qwen/Qwen3.5-9B"))})
    found = cli("run", "acme/Mine-9B", "hi")
    assert found.code == 4 and "acme/Mine-9B has the architecture of Qwen/Qwen3.5-9B" in found.err
    snapshot(own_home, "acme/Odd-9B", {"config.json": json.dumps({**(shape("Qwen/Qwen3-8B") or {}), "head_dim": 64})})
    odd = cli("run", "acme/Odd-9B", "hi")
    assert odd.code == 2 and "has the architecture of no target of the registry" in odd.err and "--mode ar" in odd.err


def test_a_tuned_toy_is_a_pair_with_the_bundled_drafter(tmp_path: Path) -> None:
    folder = tmp_path / "tuned"
    shutil.copytree(bundled.FOLDER / "demo-hybrid" / "target", folder)
    notices: list[Notice | LoadProgress] = []
    pair = resolve(str(folder), None, settings.load(), notices.append)
    assert pair.target == folder and pair.drafter == bundled.FOLDER / "demo-hybrid" / "drafter"
    assert pair.tuned_from == "demo-hybrid" and pair.toy and pair.generations and pair.thinking == "off"
    assert pair.acceptance_band == bundled.TOY_BAND and len(notices) == 1
    own = resolve(str(folder), str(pair.drafter), settings.load(), notices.append)
    assert own.tuned_from is None and len(notices) == 1, "the user's own word"


def test_plan_and_pull_take_it(cli: Cli, toy_hub: FakeHub, tuned: Callable[..., Path]) -> None:
    folder = tuned("mine", "Qwen/Qwen3-8B")
    planned = cli("plan", str(folder), "--gpu-memory", "80", "--details")
    assert planned.code == 0 and "drafter weights" in planned.out
    assert "has the architecture of Qwen/Qwen3-8B" in planned.err
    pulled = cli("pull", str(folder), "--dry-run")
    assert "has the architecture of Qwen/Qwen3-8B" in pulled.err and "z-lab/Qwen3-8B-DFlash-b16" in pulled.err


GGUF = Path(__file__).parents[1] / "golden" / "gguf"


@pytest.fixture
def known_llama(own_home: Path) -> None:
    """A row whose target is alike to the golden GGUF file in architecture."""
    write_overlay(own_home, "schema: 1\npairs:\n  - {target: tiny/Llama-7, drafter: tiny/Llama-7-DFlash}\n")
    snapshot(own_home, "tiny/Llama-7", {"config.json": (GGUF / "llama" / "config.json").read_text(encoding="utf-8")})


def test_a_gguf_file_finds_the_drafter_of_its_base(
    cli: Cli, opened: Opened, known_llama: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(shutil.copy(GGUF / "llama.gguf", tmp_path / "blob-of-no-name"))
    assert chosen(file) == ("tiny/Llama-7-DFlash", ())
    planned = cli("plan", str(file))
    assert planned.code == 0 and f"{file} has the architecture of tiny/Llama-7: the drafter of" in planned.err
    talked = cli("chat", str(file), stdin="hi\n")
    assert talked.code == 4 and "the drafter of tiny/Llama-7 is not on this machine" in talked.err


def test_of_several_rows_a_gguf_file_names_its_base_in_its_metadata(known_llama: None, own_home: Path) -> None:
    file = GGUF / "llama.gguf"
    bare = open_source(file).origins()[0].replace(" ", "-")
    rows = "".join(f"  - {{target: tiny/{name}, drafter: tiny/{name}-DFlash}}\n" for name in ("Llama-7", bare))
    write_overlay(own_home, f"schema: 1\npairs:\n{rows}")
    snapshot(own_home, f"tiny/{bare}", {"config.json": (GGUF / "llama" / "config.json").read_text(encoding="utf-8")})
    assert chosen(file) == (f"tiny/{bare}-DFlash", ("tiny/Llama-7",))


def test_a_gguf_file_that_is_nobody_s_says_which_facts_are_others(cli: Cli, opened: Opened) -> None:
    file = GGUF / "qwen3.gguf"
    refused = cli("chat", str(file), stdin="hi\n")
    assert refused.code == 2 and f"error: no drafter is known for {file}" in refused.err
    assert (
        "it has the architecture of no target of the registry; the nearest is Qwen/Qwen3-4B, but it has hidden_size "
        "32 instead of 2560, vocab_size 96 instead of 151936, num_hidden_layers 2 instead of 36"
    ) in refused.err
    alone = cli("chat", str(file), "--mode", "ar", stdin="hi\n")
    assert alone.code == 0 and "no drafter" not in alone.err
