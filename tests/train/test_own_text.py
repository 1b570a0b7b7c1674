"""Text that a target writes for its drafter: the same ids as transformers', nothing held out, nothing that repeats."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_local.adapt.dialogues import repeat_start
from dflash_local.adapt.openings import SEEDS, SHARES, frame_of, openings, prompt_ids
from dflash_local.bench.prompts import held_out
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import UsageError
from tests.families import save_model
from tools.train.frozen_target import FrozenTarget
from tools.train.own_text import HeldOutFilter, Keeper, words
from tools.train.slots import Limits, Slots, Written, greedy_replies, write_dialogues

DEMO = Path(__file__).parents[2] / "dflash_local" / "demo"
HELD_OUT = [DEMO / "smollm2" / "heldout.json", DEMO / "smollm2" / "unseen.json"]
TARGET = DEMO / "demo" / "target"


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget.load(TARGET, "cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(open_source(TARGET))
    assert found is not None
    return found


def test_no_beginning_is_that_of_a_held_out_prompt() -> None:
    prompts = [prompt for file in HELD_OUT for prompt in held_out(file)]
    begun = {words(each.text)[:count] for each in prompts for count in range(4, 12)}
    assert [text for texts in SEEDS.values() for text in texts if words(text) in begun] == []
    named = ("scene", "play", "dialogue", "stage", "act", "sketch", "monologue")
    assert not [text for texts in SEEDS.values() for text in texts if set(words(text)) & set(named)]
    assert SHARES.keys() == SEEDS.keys() and abs(sum(SHARES.values()) - 1) < 1e-9


def test_greedy_replies_are_those_of_transformers(target: FrozenTarget, tokenizer: Tokenizer) -> None:
    prompts = [prompt_ids(tokenizer, text) for text in ("Count from 1 to 12.", "Write the function area in Python.")]
    found = greedy_replies(target, prompts, frozenset(tokenizer.stop_ids), 24)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for prompt, reply in zip(prompts, found, strict=True):
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :].tolist()
        assert reply == ids


def test_dialogues_have_the_templates_form(
    target: FrozenTarget, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=count().__next__)  # which is read once in each round of steps
    monkeypatch.setattr("tools.train.slots.time", clock)
    frame = frame_of(tokenizer)
    slots = Slots(target, frame, Limits(20, 30, 4), seed=3)
    written: list[Written] = []
    write_dialogues(slots, openings(tokenizer, 3, 1.0), 12.0, written.append)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    rows = [(chunk, row) for chunk in written for row in range(len(chunk.length))]
    assert len(rows) >= 4  # slots are used again
    for chunk, row in rows[:2] + rows[-2:]:
        ids = chunk.ids[row, : int(chunk.length[row])].tolist()
        start, answer = int(chunk.question[row]), int(chunk.answer[row])
        assert tuple(ids[:start]) == frame.before
        assert tuple(ids[answer - len(frame.after) : answer]) == frame.after
        assert not set(ids[start : answer - len(frame.after)]) & (frame.special | frame.stop)
        assert len(ids) - answer == 30 or ids[-1] in frame.stop or repeat_start(ids[answer:]) < len(ids) - answer
        with torch.no_grad():
            greedy = model(torch.tensor([ids])).logits[0].argmax(-1)[answer - 1 : -1].tolist()
        assert ids[answer:] == greedy == chunk.best[row, answer : len(ids)].tolist()


def test_keeper_drops_what_is_held_out_and_cuts_what_repeats(tokenizer: Tokenizer) -> None:
    keeper = Keeper(tokenizer, HeldOutFilter(["Count from 1 to 12."]))
    texts = ("please count from 1 to 12", "Count from 1 to 30.", "Who are you?")
    asked = [tokenizer.encode(text) for text in texts]
    loop = [*range(100, 140), *range(100, 140)]
    answers = [list(range(50, 90)), loop, list(range(5))]
    ids = torch.zeros(3, 160, dtype=torch.int32)
    for row, (question, reply) in enumerate(zip(asked, answers, strict=True)):
        ids[row, : len(question) + len(reply)] = torch.tensor(question + reply)
    starts = torch.tensor([len(question) for question in asked])
    length = starts + torch.tensor([len(reply) for reply in answers])
    zeros = torch.zeros(3, dtype=torch.long)
    keeper.add(Written(ids, ids, length, zeros, starts))
    found = keeper.dialogues()
    assert keeper.counts == {"dialogues": 3, "held_out": 1, "short": 1, "cut_at_a_repeat": 1}
    assert found.ids.tolist() == asked[1] + loop[:40] and found.answer_tokens == 40


def test_other_targets_are_refused(tmp_path: Path) -> None:
    save_model("mistral", tmp_path)
    with pytest.raises(UsageError, match="full attention"):
        FrozenTarget.load(tmp_path, "cpu")
