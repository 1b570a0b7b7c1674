"""``dflash cards``: the table of usual cards, and the page of docs that is made of it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Cli

PAGE = Path(__file__).parents[2] / "docs" / "cards.md"


def test_the_page_of_docs_is_what_the_command_prints(cli: Cli) -> None:
    assert cli("cards", "--markdown").out == PAGE.read_text(encoding="utf-8"), "dflash cards --markdown > docs/cards.md"


def test_a_card_of_24_gib_runs_what_people_have_it_for(cli: Cli) -> None:
    (card,) = cli("cards", "--gpu-memory", "24", "--json").json["cards"]
    found = {row["pair"]: row for row in card["pairs"]}
    assert found["Qwen/Qwen3.6-27B"]["command"] == "dflash chat Qwen/Qwen3.6-27B --variant autoround-int4"
    assert found["openai/gpt-oss-20b"]["option"]["plan"]["fits"] and found["openai/gpt-oss-120b"]["option"] is None
    assert found["Qwen/Qwen3.5-9B"]["option"]["prediction"]["at"][0]["plain_tokens_per_s"] > 0
    second = found["Qwen/Qwen3.8-27B"]["option"]
    assert second["plan"]["engine"] == "fused" and second["prediction"]["at"][0]["cycle_ms"] > 0
    text = cli("cards", "--gpu-memory", "24").out
    assert "24 GiB: RTX 4090, 1,008 GB/s" in text and "never measured on these cards" in " ".join(text.split())


def test_a_size_that_the_table_lacks_is_named(cli: Cli) -> None:
    found = cli("cards", "--gpu-memory", "20")
    assert found.code == 2 and "--gpu-memory 20 is none of the table's" in found.err and "dflash plan" in found.err
