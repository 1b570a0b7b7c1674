"""A GGUF file of a repository as a variant: that file alone is pulled, proven, found and loaded from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app.models import ModelStore
from dflash_local.app.resolve import choose
from dflash_local.catalog.row import Repo
from dflash_local.errors import DownloadError
from dflash_local.store.names import parts_of
from dflash_local.store.selection import refuse_unread
from tests.cli.conftest import OVERLAY, Cli, Opened, write_overlay
from tests.fake_hub import FakeHub
from tests.smollm2 import GGUF

REPO = "toys/Toy-9B-GGUF"
FILES = ("Toy-Q8_0.gguf", "Toy-Q4_K_M-00001-of-00002.gguf", "Toy-Q4_K_M-00002-of-00002.gguf", "Toy-Q3_K_M.gguf")
ROWS = "".join(
    f"      - {{repo: {REPO}, file: {name}, format: {word}}}\n"
    for name, word in ((FILES[0], "Q8_0"), (FILES[1], "Q4_K_M"), (FILES[3], "Q3_K_M"), ("Toy-F16.gguf", "F16"))
)


@pytest.fixture
def hub(toy_hub: FakeHub, own_home: Path) -> FakeHub:
    write_overlay(own_home, f"{OVERLAY}    variants:\n{ROWS}")
    toy_hub.add_repo(REPO, {name: GGUF.read_bytes() + name.encode() for name in FILES} | {"README.md": b"hello"})
    return toy_hub


def here(home: Path) -> set[str]:
    folder = home / ".cache" / "huggingface" / "hub" / "models--toys--Toy-9B-GGUF" / "snapshots"
    return {path.name for path in folder.rglob("*") if not path.is_dir()}


def test_one_file_is_pulled_and_a_second_keeps_the_proof_of_the_first(
    cli: Cli, hub: FakeHub, opened: Opened, own_home: Path
) -> None:
    pulled = cli("pull", "toy-9b", "--variant", "q8_0", "--force")
    assert pulled.code == 0 and f"next: dflash chat {REPO}:Q8_0" in pulled.out, pulled.err
    assert here(own_home) == {"Toy-Q8_0.gguf"}
    ran = cli("run", f"{REPO}:q8_0", "hi", "--no-fit-check")
    assert ran.code == 0 and "not every file" not in ran.err, ran.err
    assert opened.pairs[-1].target.name == "Toy-Q8_0.gguf" and opened.pairs[-1].drafter is not None
    split = cli("pull", "toy-9b", "--variant", "Q4_K_M", "--force")
    assert split.code == 0 and here(own_home) == set(FILES[:3]), split.err
    store = ModelStore.of(settings.load())
    for name in FILES[:2]:
        found = store.find(Repo(REPO, file=name))
        assert found is not None and found.verified and found.folder.name == name
    gets = len(hub.gets())
    again = cli("pull", "toy-9b", "--variant", "q8_0", "--force", "--json").json
    assert again["to_fetch"] == 0 and len(hub.gets()) == gets
    kept = cli("rm", f"{REPO}:q8_0", "--yes")
    assert f"kept: {REPO} (also used by {REPO}:Q4_K_M)" in kept.err and here(own_home) == set(FILES[:3])
    assert cli("rm", f"{REPO}:q8_0", f"{REPO}:q4_k_m", "--yes").code == 0 and here(own_home) == set()


def test_a_part_that_is_gone_is_missing(cli: Cli, hub: FakeHub, opened: Opened, own_home: Path) -> None:
    assert cli("pull", "toy-9b", "--variant", "Q4_K_M", "--force").code == 0
    next((own_home / ".cache").rglob(FILES[2])).resolve().unlink()
    lacking = cli("run", f"{REPO}:Q4_K_M", "hi")
    assert lacking.code == 4 and f"{REPO}/{FILES[2]} missing" in lacking.err
    assert cli("pull", "toy-9b", "--variant", "Q4_K_M", "--force").code == 0
    again = ModelStore.of(settings.load()).find(Repo(REPO, file=FILES[1]))
    assert again is not None and again.verified, "its new proof counts"


def test_types_that_are_not_read_are_refused_before_anybody_is_asked(cli: Cli, hub: FakeHub) -> None:
    refused = cli("pull", "toy-9b", "--variant", "q3_k_m")
    assert refused.code == 4 and "(Q3_K_M) is in Q3_K_M, which is not read here" in refused.err
    assert "hint: the nearest form that is: IQ4_XS or Q4_K_S" in refused.err and not hub.gets()
    absent = cli("pull", "toy-9b", "--variant", "f16", "--force")
    assert absent.code == 4 and f"{REPO} has no 'Toy-F16.gguf'" in absent.err and "Toy-Q8_0.gguf" in absent.err


@pytest.mark.parametrize(
    "name",
    ["m-Q2_K.gguf", "m.q3_k_l.gguf", "m-IQ2_XXS.gguf", "m-IQ3_S.gguf", "IQ1_M.gguf", "m-NVFP4.gguf", "Q3_K.gguf"],
)
def test_names_of_unread_types(name: str) -> None:
    with pytest.raises(DownloadError, match="which is not read here"):
        refuse_unread(name)


@pytest.mark.parametrize("name", ["m-Q4_K_M.gguf", "m-IQ4_XS.gguf", "m-Q6_K.gguf", "m-MXFP4.gguf", "UniQ2_K9.gguf"])
def test_names_of_types_that_are_read(name: str) -> None:
    refuse_unread(name)
    assert parts_of(name) == (name,)


def test_the_registry_lists_files_by_their_formats() -> None:
    choice = choose("Qwen/Qwen3-8B-GGUF:q4_k_m", None, settings.load())
    assert choice.target == Repo("Qwen/Qwen3-8B-GGUF", None, "Qwen3-8B-Q4_K_M.gguf") and choice.own_drafter
