"""Drafts that are copied from the text: what is found, what is verified, and that no text changes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dflash_local.bench.trial import Written, go_on, write
from dflash_local.catalog.bundled import find
from dflash_local.check.drafting import check_drafter
from dflash_local.check.run import check_exactness
from dflash_local.drafters.kinds import LOOKUP, folder_of
from dflash_local.drafters.lookup.layout import LONGEST, NEWEST, SHORTEST, TextIndex
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.request import Limits, Request, SamplingParams

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.05, seed=4),
}
REPEATED = tuple([*range(5, 60)] * 3 + [*range(5, 20)])
COSTS = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4, 16: 1.8}


def searched(text: list[int], count: int) -> list[int]:
    """The same by reading all of the text."""
    ends = [end for end in range(SHORTEST, len(text)) if text[end - SHORTEST : end] == text[-SHORTEST:]]
    found, best = 0, 0
    for end in ends[-NEWEST:]:
        length = SHORTEST
        while length < min(LONGEST, end) and text[end - length - 1] == text[-length - 1]:
            length += 1
        if length >= found:
            found, best = length, end
    whole = list(text)
    for place in range(best, best + min(count, found)):
        whole.append(whole[place])
    return whole[len(text) :]


def test_the_longest_match_is_found_and_of_equal_ones_the_newest() -> None:
    draw, index, text, drafted = random.Random(0), TextIndex(), list[int](), 0
    for _ in range(3000):
        if draw.random() < 0.02:  # a reply was undone, or another conversation begins
            del text[draw.randrange(len(text) + 1) :]
            index.truncate(len(text))
        at = draw.randrange(max(len(text) - 8, 1))
        text += text[at : at + 8] if draw.random() < 0.3 else [draw.randrange(4) for _ in range(draw.randrange(1, 5))]
        count = draw.randrange(1, 16)
        found, confidence = index.draft(text, count)
        assert found == searched(text, count)
        assert (confidence > 1.5) == bool(found) and confidence <= 5
        drafted += len(found)
    assert drafted > 3000


@pytest.fixture(
    scope="module", params=[(model, engine) for model in ("demo", "demo-hybrid") for engine in ("reference", "fused")]
)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    model, engine = request.param
    loaded = load(find(model, str(folder_of(LOOKUP))), LoadConfig(device="cpu", dtype="float32", engine=engine))
    yield loaded
    loaded.close()


def asked(session: Session, mode: str, prompt: tuple[int, ...], sampling: SamplingParams, cold: bool = True) -> Written:
    request = Request(prompt_ids=prompt, limits=Limits(40), mode=mode, sampling=sampling)  # type: ignore[arg-type]
    return write(session, request) if cold else go_on(session, request)


@pytest.mark.parametrize(("how", "costs"), [("greedy", {}), ("sampled", COSTS), ("filtered", COSTS)])
def test_no_text_changes(session: Session, how: str, costs: dict[int, float]) -> None:
    vars(session.runner)["costs"] = costs
    session.verify_lengths.clear()
    prompt, drafted = REPEATED, 0
    for turn in range(2):
        plain = asked(session, "ar", prompt, SAMPLINGS[how])
        asked(session, "dflash", REPEATED[:40], SAMPLINGS[how])  # the caches hold another text then
        cold = asked(session, "dflash", prompt, SAMPLINGS[how], cold=False)
        again = asked(session, "dflash", prompt[:-3], SAMPLINGS[how], cold=False)  # it goes back
        assert plain.ids == cold.ids, turn
        assert again.ids == asked(session, "ar", prompt[:-3], SAMPLINGS[how]).ids
        assert all(cycle.rows in costs for cycle in cold.cycles if costs)
        drafted += sum(cycle.accepted for cycle in cold.cycles)
        prompt = (*prompt, *plain.ids, 7, 8, 9)
    assert how == "filtered" or drafted > 0


def test_a_check_compares_texts_and_leaves_its_acceptance_alone(session: Session) -> None:
    assert check_drafter(session, find("demo")).state == "skipped"
    found = check_exactness(session, find("demo"))
    assert found.state == "ok" and found.figures["tokens"] > 0


def test_what_never_holds_is_not_verified_and_what_does_is() -> None:
    control = VerifyLength(COSTS, 16, free_drafts=True)
    short, long = [1.6] * 3, [5.0] * 15
    for _ in range(60):
        assert control.next_rows() == 16 and control.drafts
        for told, right in ((short, 0), (long, 15), ([], 0)):
            rows = control.cut(told) if told else 1
            assert rows in COSTS and rows <= len(told) + 1
            control.add(rows, min(right, rows - 1), told)
    assert control.cut(short) == 1 and control.cut(long) == 16
    tried = 0
    for _ in range(1000):  # the text may have become another: now and then they are tried again
        rows = control.cut(short)
        tried += rows > 1
        control.add(rows, 0, short)
    assert 0 < tried < 100
