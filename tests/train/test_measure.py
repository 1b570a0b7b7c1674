"""The cache-free measure: block decoding writes the target's own text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tools.train.drafter import DraftModule
from tools.train.measure import Answers, answer, prompt_ids, right_answers, stop_id
from tools.train.phrasing import Turn

DEMO = Path(__file__).parents[2] / "dflash_local" / "demo"


@pytest.mark.slow  # whole texts of both pairs, token by token
@pytest.mark.parametrize("trained", ["demo", "demo-hybrid"], indirect=True)
def test_blocks_write_the_targets_own_text(
    trained: tuple[str, PreTrainedModel, DraftModule], tokenizer: Tokenizer
) -> None:
    _, target, drafter = trained
    rows = json.loads((DEMO / "heldout.json").read_text(encoding="utf-8"))
    short = sorted(rows, key=lambda row: len(row["answer"]))[4:9]
    turns = [Turn(row["kind"], row["prompt"], row["answer"], "") for row in short]
    prompts = [prompt_ids(tokenizer, turn.prompt) for turn in turns]
    blocks = answer(target, drafter, prompts, stop_id(tokenizer), 96)
    plain = answer(target, None, prompts, stop_id(tokenizer), 96)
    assert blocks.ids == plain.ids
    assert sum(right_answers(tokenizer, turns, blocks)) >= 4
    for ids, cycles in zip(blocks.ids, blocks.cycles, strict=True):
        assert sum(cycles[:-1]) < len(ids) - 1 <= sum(cycles) and max(cycles) <= 8, "the last one may be cut"
    assert blocks.mean_acceptance() > 4 and plain.mean_acceptance() == 0


def test_right_means_to_the_letter_and_stopped(tokenizer: Tokenizer) -> None:
    stop, ids = stop_id(tokenizer), tokenizer.encode("1, 2").ids
    turns = [Turn("counting", "", "1, 2", "")] * 3
    got = Answers([[*ids, stop], ids, [*ids, ids[0], stop]], [[], [], []])
    assert right_answers(tokenizer, turns, got) == [True, False, False]
