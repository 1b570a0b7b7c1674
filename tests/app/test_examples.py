"""The prompts of the first screens: the toys answer theirs rightly, other pairs get general ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_local.app import examples as examples_module
from dflash_local.app.examples import built_in_prompt, examples
from dflash_local.bench.prompts import BUILT_IN
from dflash_local.catalog.bundled import BUNDLED, Pair, find
from dflash_local.events import Finished, Step
from dflash_local.request import Limits, user_request

ANSWERS = {
    built_in_prompt(): "class Robot:",
    "Count from 3 to 7.": "3, 4, 5, 6, 7",
    "Put these words in order: pear, apple, melon, fig.": "Sorted: apple, fig, melon, pear.",
    "Make a table of name and score: Anna 70, Ben 94, Ida 15.": "| Anna | 70 |\n| Ben | 94 |\n| Ida | 15 |",
}


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", BUNDLED)
def test_a_toy_answers_what_it_is_offered_for_and_stops(name: str) -> None:
    from dflash_local.engine.load_pair import load
    from dflash_local.load_config import LoadConfig

    pair = find(name)
    assert set(examples(pair)) == set(ANSWERS)
    session = load(pair, LoadConfig(device="cpu"), None)
    for prompt in examples(pair):
        events = list(session.generate(user_request(prompt, limits=Limits(256))))
        text = "".join(piece.text for event in events if isinstance(event, Step) for piece in event.pieces)
        assert ANSWERS[prompt] in text and isinstance(events[-1], Finished) and events[-1].reason == "stop", text
    session.close()


def test_other_pairs_get_what_any_instruction_model_can_answer(tmp_path: Path) -> None:
    pair = Pair("other", tmp_path, tmp_path, bundled=False)
    assert examples(pair) == tuple(text for _, text in BUILT_IN)


def test_the_prompt_comes_from_the_file_and_has_a_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "prompts.json"
    monkeypatch.setattr(examples_module, "EXAMPLES", path)
    assert examples_module.built_in_prompt() == examples_module.FALLBACK_PROMPT
    for content, wanted in (({"demo": "Count to ten."}, "Count to ten."), ([1], None), ({"demo": 3}, None)):
        path.write_text(json.dumps(content), encoding="utf-8")
        assert examples_module.built_in_prompt() == (wanted or examples_module.FALLBACK_PROMPT)
