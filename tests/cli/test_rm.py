"""``dflash rm``: what goes, what stays unless named, who is asked, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_local.store import lock
from tests.cli.conftest import DRAFTER, OVERLAY, TARGET, Cli, contents, write_overlay
from tests.fake_hub import FakeHub

SECOND = OVERLAY + OVERLAY.split("pairs:\n")[1].replace(f"target: {TARGET}", "target: toys/Toy-12B").replace(
    "toy-9b", "toy-12b"
)


@pytest.fixture
def pulled(cli: Cli, toy_hub: FakeHub, own_home: Path) -> Path:
    """The pair, in the cache that this returns."""
    assert cli("pull", TARGET).code == 0
    return own_home / ".cache" / "huggingface" / "hub"


def here(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("models--*")}


def test_a_pair_goes_and_the_room_comes_back(cli: Cli, pulled: Path) -> None:
    shown = cli("rm", TARGET, "--dry-run")
    assert shown.code == 0 and "5.8 MiB" in shown.err and len(here(pulled)) == 2
    removed = cli("rm", "toy-9b", "--yes")
    assert removed.code == 0 and f"removed {TARGET}, {DRAFTER}: 7.4 MiB freed" in removed.out
    assert here(pulled) == set() and cli("models", "--here", "--json").json["pairs"] == []
    again = cli("rm", TARGET, "--yes")
    assert again.code == 0 and f"nothing of {TARGET} is on this machine" in again.err


def test_the_answer_decides(cli: Cli, pulled: Path, answers: Callable[..., list[str]]) -> None:
    asked = answers(False)
    declined = cli("rm", TARGET)
    assert declined.code == 0 and declined.out == "nothing was removed\n" and len(here(pulled)) == 2
    assert asked == [f"Remove {TARGET}, {DRAFTER} (7.4 MiB)?"]
    answers(True)
    assert cli("rm", TARGET).code == 0 and here(pulled) == set()


def test_a_drafters_own_name_removes_the_drafter_alone(cli: Cli, pulled: Path) -> None:
    assert cli("rm", DRAFTER, "--yes").code == 0
    assert here(pulled) == {"models--toys--Toy-9B"}


@pytest.mark.parametrize("name", ["others/toy-9b-other", "Toy-9B-Other", "toy-9b-dflash"])
def test_every_name_of_a_drafter_removes_that_drafter_alone(
    cli: Cli, toy_hub: FakeHub, own_home: Path, name: str
) -> None:
    write_overlay(own_home, f"{OVERLAY}    other_drafters:\n      - {{repo: others/Toy-9B-Other, kind: dflash}}\n")
    toy_hub.add_repo("others/Toy-9B-Other", contents(toy_hub, DRAFTER))
    assert cli("pull", TARGET).code == cli("pull", TARGET, "--drafter", "others/Toy-9B-Other").code == 0
    asked = cli("rm", name, "--yes", "--json").json["repos"]
    assert [item["repo"].lower().partition("/")[2] for item in asked] == [name.lower().rpartition("/")[2]]
    assert asked[0]["removed"]


def test_a_pair_goes_with_its_variants_and_a_variant_alone_by_its_name(
    cli: Cli, toy_hub: FakeHub, pulled: Path, own_home: Path
) -> None:
    variants = "".join(f"      - {{repo: toys/Toy-9B-{word}, format: {word}}}\n" for word in ("int8", "fp8"))
    write_overlay(own_home, f"{OVERLAY}    variants:\n{variants}")
    for word in ("int8", "fp8"):
        toy_hub.add_repo(f"toys/Toy-9B-{word}", contents(toy_hub, TARGET))
        assert cli("pull", TARGET, "--variant", word, "--force").code == 0
    assert cli("rm", "toys/Toy-9B-fp8", "--yes").code == 0
    assert here(pulled) == {"models--toys--Toy-9B", "models--toys--Toy-9B-int8", "models--z-toys--Toy-9B-DFlash"}
    assert cli("rm", TARGET, "--yes").code == 0 and here(pulled) == set()


def test_what_another_pair_uses_stays_unless_it_is_agreed_to(
    cli: Cli, toy_hub: FakeHub, pulled: Path, own_home: Path, answers: Callable[..., list[str]]
) -> None:
    write_overlay(own_home, SECOND)
    toy_hub.add_repo("toys/Toy-12B", contents(toy_hub, TARGET))
    assert cli("pull", "toy-12b").code == 0
    removed = cli("rm", TARGET, "--yes", "--json").json
    assert {item["repo"]: item["removed"] for item in removed["repos"]} == {TARGET: True, DRAFTER: False}
    assert removed["repos"][1]["shared_with"] == ["toys/Toy-12B"]
    assert here(pulled) == {"models--toys--Toy-12B", "models--z-toys--Toy-9B-DFlash"}
    asked = answers(False)
    kept = cli("rm", DRAFTER)
    assert kept.code == 0 and "nothing was removed" in kept.out and f"kept: {DRAFTER}" in kept.err
    assert asked == [f"{DRAFTER} is also used by toys/Toy-12B. Remove it too (1.6 MiB)?"]
    assert cli("rm", DRAFTER, "--yes", "--all").code == 0 and here(pulled) == {"models--toys--Toy-12B"}


def test_what_another_program_put_there_stays_unless_all_is_said(cli: Cli, pulled: Path, own_home: Path) -> None:
    for record in (own_home / ".local" / "share" / "dflash-local" / "manifests").glob("models--toys--*/*"):
        record.unlink()
    removed = cli("rm", TARGET, "--yes")
    assert removed.code == 0 and f"kept: {TARGET} (put there by another program)" in removed.err
    assert here(pulled) == {"models--toys--Toy-9B"}
    assert cli("rm", TARGET, "--yes", "--all").code == 0 and here(pulled) == set()


def test_a_repository_in_use_is_refused_with_the_process(cli: Cli, pulled: Path, own_home: Path) -> None:
    with lock.using(own_home / ".cache" / "dflash-local" / "locks", TARGET):
        refused = cli("rm", TARGET, "--yes", "--all")
        assert refused.code == 1 and f"{TARGET} is in use by process" in refused.err and len(here(pulled)) == 2
        assert "in use by process" in cli("rm", TARGET, "--dry-run").err
    assert cli("rm", TARGET, "--yes").code == 0
