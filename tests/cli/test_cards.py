"""``dflash models --cards``: the table of usual cards, and the page of docs that is made of it."""

from __future__ import annotations

import json
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dflash_local import settings
from dflash_local.app.cards import card_tables
from dflash_local.catalog.registry import load
from dflash_local.catalog.reports import CertificateDigest, reports
from dflash_local.planner import plan as planning
from dflash_local.planner.cards import TYPICAL
from dflash_local.tables import gib as gib_text
from dflash_local.tables import rate
from dflash_local.ui import card_text
from tests.cli.conftest import Cli

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"

PAGE = Path(__file__).parents[2] / "docs" / "cards.md"


def test_the_page_of_docs_is_what_the_command_prints(cli: Cli) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert cli("models", "--cards", "--markdown").out == page, "dflash models --cards --markdown > docs/cards.md"


def test_a_card_of_24_gib_runs_what_people_have_it_for(cli: Cli) -> None:
    (card,) = cli("models", "--cards", "--gpu-memory", "24", "--json").json["cards"]
    found = {row["pair"]: row for row in card["pairs"]}
    assert found["Qwen/Qwen3.6-27B"]["command"] == "dflash chat Qwen/Qwen3.6-27B --variant autoround-int4"
    assert found["openai/gpt-oss-20b"]["option"]["plan"]["fits"] and found["openai/gpt-oss-120b"]["option"] is None
    assert found["Qwen/Qwen3.5-9B"]["option"]["prediction"]["at"][0]["plain_tokens_per_s"] > 0
    second = found["Qwen/Qwen3.8-27B"]["option"]
    assert second["plan"]["engine"] == "fused" and second["prediction"]["at"][0]["cycle_ms"] > 0
    text = cli("models", "--cards", "--gpu-memory", "24").out
    assert "cycle" not in text and "cycle" not in PAGE.read_text(encoding="utf-8")
    assert "24 GiB: RTX 4090, 1,008 GB/s" in text and "Speeds are predicted" in " ".join(text.split())


def test_a_size_that_the_table_lacks_is_named(cli: Cli) -> None:
    found = cli("models", "--cards", "--gpu-memory", "20")
    assert found.code == 2 and "--gpu-memory 20 is none of the table's" in found.err and "dflash plan" in found.err


ROWS = [row.name for row in load().rows]
LOCAL = [row.name for row in load().rows if row.runs_here and not (row.bundled or row.bundled_drafter)]
FIVE = [card for card in TYPICAL if round(card[1]) in (8, 12, 16, 24, 80)]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan for the same question: that the commands ask the same is what makes the test below quick."""
    monkeypatch.setattr(planning._Case, "best", lru_cache(maxsize=None)(planning._Case.best))


@pytest.mark.parametrize(("gpu", "gib"), FIVE)
def test_every_command_says_the_same_of_a_pair_on_a_card(cli: Cli, shared: None, gpu: str, gib: float) -> None:
    """The download, the context and both speeds: of every row, as JSON of five commands and in words."""
    on = ("--gpu-memory", f"{gib:.0f}")
    listed = {one["summary"]["pair"]: one["summary"] for one in cli("models", *on, "--json").json["pairs"]}
    (card,) = cli("models", "--cards", *on, "--json").json["cards"]
    page = cli("models", "--cards", *on, "--markdown").out
    extra = ("option", "longest_context", "over_two")
    longest = {row["pair"]: row["longest_context"] for row in card["pairs"]}
    over_two = {row["pair"]: row["over_two"] and row["over_two"]["weights"] for row in card["pairs"]}
    tabled = {row["pair"]: {key: value for key, value in row.items() if key not in extra} for row in card["pairs"]}
    assert card["machine"]["name"] == gpu and list(listed) == ROWS and list(tabled) == LOCAL
    for name in ROWS:
        found = listed[name]
        shown = cli("show", name, *on)
        assert cli("show", name, *on, "--json").json["summary"] == found, name
        words = " ".join(shown.out.partition(f"{name}  (")[0].split())
        assert f"{gib_text(found['download_gib'], found['download_computed'])} " in words or not found["download_gib"]
        if name not in LOCAL:
            continue
        assert tabled[name] == found
        planned = cli("plan", name, *on, "--json")
        told = planned.json if planned.code == 0 else json.loads(planned.err)
        assert told["summary"] == found and told["fits"] == (found["command"] is not None), name
        if found["command"] is None:
            least = told["plan"]["ledger"]["total"] / 2**30
            assert found["fits"] == f"needs {ceil(least)} GiB" or told["nearest"]
            assert f" needs {gib_text(least)} with " in words
            assert f"| {name} |" not in page
            if (weights := over_two[name]) is not None:
                assert f"two cards like this one with --device balanced ({weights}" in words
                assert f"{name} ({weights}" in page.partition("On two: ")[2]
            else:
                assert "like this one" not in words
                assert name in page.partition("Does not fit: ")[2].rstrip(".\n").split(", ")
            continue
        speeds = [found["plain_tokens_per_s"], *(found["drafted_tokens_per_s"] or ())]
        plain, *drafted = (rate(speed) for speed in speeds)
        span = " to ".join(dict.fromkeys(drafted)) or "-"
        assert f" about {plain} tok/s plain, {span} drafted ({source_of(found)})" in words
        assert f" context {found['context']:,} tokens" in words
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {name} |"))
        size = f"{'~' * found['download_computed']}{found['download_gib']:.1f}" if found["download_gib"] else "-"
        star = "*" if "similar" in source_of(found) else ""
        cells = [found["weights"], size, f"{found['context']:,}", f"{longest[name]:,}", plain, f"{span}{star}"]
        assert f"| {' | '.join(cells)} |" in line and longest[name] >= found["context"]
        assert found["command"].partition(name)[2].strip() in line


def source_of(found: dict[str, Any]) -> str:
    typical = found["acceptance_source"].startswith("typical of other pairs")
    return "acceptance of similar pairs" if typical else "published acceptance"


def test_every_range_has_its_source(cli: Cli) -> None:
    found = cli("models", "--gpu", "H200", "--json").json["pairs"]
    sources = {one["summary"]["pair"]: one["summary"]["acceptance_source"] for one in found}
    assert all(sources[name] for name in LOCAL)
    typical = {name for name in LOCAL if sources[name].startswith("typical of other pairs")}
    assert typical == {"Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3-14B"}
    assert "8 requests at once" in sources["openai/gpt-oss-20b"] and "table 5" in sources[LLAMA]


@pytest.mark.parametrize("asked", [("--variant", "autoround-int4"), ("--quantize", "int8"), ("--quantize", "int4")])
def test_coarser_weights_keep_the_published_lengths_in_words(cli: Cli, asked: tuple[str, ...]) -> None:
    text = " ".join(cli("plan", "qwen3.5-9b", *asked, "--gpu", "RTX 4090", "--details").out.split())
    assert "acceptance length 5.1 to 7.93: model card of" in text and "measured with 16-bit targets" in text


def test_a_length_of_another_block_or_drafter_is_not_taken(cli: Cli) -> None:
    """A DSpark drafter of a row whose own drafter is published has what is typical of its block."""
    text = " ".join(cli("plan", "dspark_qwen3_8b_block7", "--gpu", "RTX 4090", "--details").out.split())
    assert "typical of other pairs" in text and "with block 8" in text and "table 3" not in text


def test_reports_stand_beside_the_predictions_of_their_weights() -> None:
    """Eleven: of the table's weights, of others, of another card; in brackets without a certificate that holds."""
    user = settings.load()
    shown = next(each for each in reports() if each.certificate is not None)
    broken = CertificateDigest(sha256="0" * 64, strength=None)
    here = partial(replace, shown, card="NVIDIA GeForce RTX 4090", pair="Qwen/Qwen3-8B", format="bfloat16", exact=False)
    made = [
        *(here(plain=speed, drafted=3 * speed) for speed in (50.0, 54.0, 61.0)),
        *(here(pair="Qwen/Qwen3-4B", plain=speed, drafted=None, certificate=None) for speed in (90.0, 92.0)),
        here(format="int4 g128", plain=120.0, drafted=300.0),
        here(engine="reference", plain=9.0, drafted=12.0),
        here(format="int4 g128", plain=100.0, drafted=240.0, exact=True, certificate=broken),
        *(here(card="NVIDIA GeForce RTX 3090", plain=speed, drafted=None) for speed in (40.0, 44.0, 48.0)),
    ]
    (table,) = card_tables(user, made, [("RTX 4090", 24.0)])
    others = [each for each in made if each not in table.reports]
    page = list(card_text.markdown([table], others))
    (row,) = (line for line in page if line.startswith("| Qwen/Qwen3-8B |"))
    (second,) = (line for line in page if line.startswith("| Qwen/Qwen3-4B |"))
    assert row.split(" | ")[-2] == "54 and 162 drafted" and second.split(" | ")[-2] == "(91)"
    assert (
        "Also measured: Qwen/Qwen3-8B int4 g128 120 and 300 drafted, bfloat16 reference 9 and 12 drafted, "
        "int4 g128 --exact (100 and 240 drafted)."
    ) in page
    assert page[-1] == "Measured on NVIDIA GeForce RTX 3090: Qwen/Qwen3-8B bfloat16 44."
