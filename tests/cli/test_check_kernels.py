"""``dflash check --only kernels``: loads a pair once, says what is known of its kernels, and forgets it on demand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dflash_local.app import resolve
from dflash_local.catalog import bundled
from dflash_local.catalog.bundled import Pair
from tests.cli.conftest import Cli

if TYPE_CHECKING:
    from dflash_local.kernels.kernel_record import KernelRecord

pytestmark = pytest.mark.needs_torch
KERNELS = ("--only", "kernels")
FACTS = {"card": "A card", "capability": [9, 0], "driver": 13000, "nvrtc": [13, 0], "source": "s"}


@pytest.fixture
def record(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> KernelRecord:
    """What the load of a quantised pair leaves behind where there is a card."""
    from dflash_local.kernels import kernel_record

    found = kernel_record.KernelRecord(own_home / ".cache" / "dflash-local" / "cubins", FACTS)
    found.verdicts = {"one": "right", "two": "right", "three": "hang"}
    found.tried = 3
    found.choose("int4 24576 x 4096 at 16 rows", "FragmentGemmConfig(warps_k=16)", 31.4)
    assert found.chosen("int4 24576 x 4096 at 16 rows") and found.chosen("fp8 64 x 64 at 16 rows") is None
    monkeypatch.setattr(kernel_record, "_records", {(None, "A card"): found})
    return found


def test_without_a_card_there_is_nothing_to_try(cli: Cli) -> None:
    done = cli("check", "demo", *KERNELS, "--json")
    assert done.code == 0 and done.json["cards"] == [] and done.json["seconds"] > 0
    assert done.json["versions"]["dflash-local"] and done.json["loaded_as"] == "reference float32 cpu"
    assert "no products that kernels are tried" in cli("check", "demo", *KERNELS, "--mode", "ar").out


def test_without_drafts_no_drafter_is_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def resolved(*_: object, draft: bool = True, **_named: object) -> Pair:
        asked.append(draft)
        return bundled.find("demo")

    monkeypatch.setattr(resolve, "resolve", resolved)
    assert cli("check", "demo", *KERNELS, "--mode", "ar").code == cli("check", "demo", *KERNELS).code == 0
    assert asked == [False, True]


def test_what_is_known_is_told(cli: Cli, record: KernelRecord) -> None:
    (card,) = cli("check", "demo", *KERNELS, "--json").json["cards"]
    assert card["card"] == "A card" and card["tried"] == 3 and card["verdicts"] == {"right": 2, "hang": 1}
    assert card["failed"] == {"three": "hang"} and card["products"]["fp8 64 x 64 at 16 rows"] is None
    text = cli("check", "demo", *KERNELS).out
    assert "A card: 3 kernels tried now; known in all: 2 right, 1 hang" in text
    assert (
        "int4 24576 x 4096 at 16 rows: FragmentGemmConfig" in text and "fp8 64 x 64 at 16 rows: another product" in text
    )


def test_again_forgets_verdicts_and_keeps_what_is_compiled(cli: Cli, record: KernelRecord) -> None:
    assert record.path is not None
    cubin = record.path.with_name("0123.cubin")
    cubin.write_bytes(b"compiled")
    assert record.path.is_file()
    assert cli("check", "demo", *KERNELS, "--again", "--json").json["cards"] == []
    assert not record.path.exists() and cubin.is_file()
