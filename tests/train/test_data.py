"""The toy's text: deterministic, its answers right, its held-out prompts never trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from tools.train.code_text import _TASKS, _Task, class_answer, code, function_answer
from tools.train.data import (
    DEMO_PROMPTS,
    HELDOUT_COUNTS,
    KINDS,
    conversations,
    held_out_turns,
    is_held_out,
    turn,
)
from tools.train.demo import HELDOUT_SEED
from tools.train.number_text import count_answer, sorting
from tools.train.words import NUMBER_WORDS, WORDS

DEMO = Path(__file__).parents[2] / "dflash_local" / "demo"


@pytest.fixture(scope="module")
def shipped() -> list[dict[str, str]]:
    return list(json.loads((DEMO / "heldout.json").read_text(encoding="utf-8")))


def test_same_seed_same_conversations() -> None:
    assert list(conversations(3, 50)) == list(conversations(3, 50))
    assert list(conversations(3, 50)) != list(conversations(4, 50))


def test_shipped_held_out_prompts_are_the_generators(shipped: list[dict[str, str]]) -> None:
    turns = held_out_turns(HELDOUT_SEED, HELDOUT_COUNTS)
    made = [{"kind": t.kind, "prompt": t.prompt, "answer": t.answer} for t in turns]
    assert shipped == made
    assert len(shipped) == 40 and {row["kind"] for row in shipped} == set(KINDS)
    assert json.loads((DEMO / "prompts.json").read_text()) == {name: text for name, (text, _) in DEMO_PROMPTS.items()}


def test_no_held_out_or_shown_prompt_is_ever_trained(shipped: list[dict[str, str]]) -> None:
    hidden = {row["prompt"].lower() for row in shipped} | {prompt.lower() for prompt, _ in DEMO_PROMPTS.values()}
    trained = {t.prompt.lower() for one in conversations(7, 4000) for t in one.turns}
    assert len(trained) > 5000
    assert not hidden & trained


@pytest.mark.parametrize("kind", list(KINDS))
def test_split_goes_by_key_and_ignores_case(kind: str) -> None:
    rng = Random(1)
    assert all(not is_held_out(turn(rng, kind).key) for _ in range(50))
    drawn = [turn(rng, kind, held_out=True) for _ in range(5)]
    assert all(is_held_out(t.key) and is_held_out(t.key.upper()) for t in drawn)
    assert all(t.kind == kind and t.answer == t.answer.strip() for t in drawn)


def test_one_prompt_has_one_answer() -> None:
    answers: dict[str, str] = {}
    rng = Random(5)
    for _ in range(20_000):
        drawn = turn(rng)
        assert answers.setdefault(drawn.prompt, drawn.answer) == drawn.answer, drawn.prompt


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("task", _TASKS, ids=lambda task: task.name)
def test_every_function_does_what_its_example_says(
    task: _Task, names: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    name, args = task.name, task.args
    if names:
        name, args = "run_result", ("value", "x")[: len(args)]
    answer = function_answer(task, name, args)
    source = answer.split("```python\n")[1].split("\n```")[0]
    space: dict[str, object] = {}
    exec(source, space)
    example = re.fullmatch(r"For example, (.*) (returns|prints) (.*)\.", answer.splitlines()[-1])
    assert example is not None
    call, verb, wanted = example.groups()
    got = eval(call, space)
    if verb == "returns":
        assert got == eval(wanted)
    else:
        printed = capsys.readouterr().out.split()
        assert printed == wanted.strip('"').replace(" and ", " ").replace("1, 2", "1 2").split()


def test_classes_run_and_get_their_fields() -> None:
    space: dict[str, object] = {}
    exec(class_answer("Robot", ["name", "speed"]).removeprefix("```python\n").removesuffix("\n```"), space)
    robot = space["Robot"]("R2", 7)  # type: ignore[operator]
    assert (robot.get_name(), robot.get_speed()) == ("R2", 7)


def test_code_asked_for_by_another_name_uses_it() -> None:
    rng = Random(2)
    named = [t for t in (code(rng) for _ in range(300)) if re.search(r" (called|named) [a-z]\w*", t.prompt)]
    assert len(named) > 50
    for t in named:
        name = re.search(r" (?:called|named) ([a-z]\w*)", t.prompt).group(1)
        assert f"def {name}(" in t.answer


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ((3, 7, 1, False), "3, 4, 5, 6, 7"),
        ((7, 3, 2, True), "7\n5\n3"),
        ((1, 10, 4, False), "1, 5, 9"),
        ((1, 1000, 1, False), "That is too far for a toy model. I count at most 100 numbers at a time."),
    ],
)
def test_counts(arguments: tuple[int, int, int, bool], answer: str) -> None:
    assert count_answer(*arguments) == answer


def test_sorting_answers_are_sorted_permutations() -> None:
    rng = Random(9)
    for _ in range(200):
        t = sorting(rng)
        items = t.answer.split("Sorted: ")[1].split(".\n")[0].split(", ")
        if items[0].isdigit():
            values = [int(item) for item in items]
            falling = t.answer.startswith("In descending")
            assert values == sorted(values, reverse=falling)
            assert sorted(items) == sorted(re.findall(r"\d+", t.prompt))
        else:
            assert items == sorted(items) and all(re.search(rf"\b{item}\b", t.prompt) for item in items)


def test_words_are_distinct_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(re.fullmatch("[a-z]+", word) for word in WORDS)
    assert NUMBER_WORDS[12] == "twelve"
