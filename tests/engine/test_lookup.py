"""Drafts that are copied from the text: what is found, what is verified, and that no text changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dflash_local import settings
from dflash_local.app.resolve import resolve
from dflash_local.bench.trial import Written, go_on, write
from dflash_local.catalog.bundled import find
from dflash_local.check.drafting import check_drafter
from dflash_local.check.run import check_exactness
from dflash_local.drafters.kinds import LOOKUP, OWN, folder_of
from dflash_local.engine import LoadConfig, Session, load
from dflash_local.engine.copied_drafts import CopiedDrafts
from dflash_local.engine.cycle_costs import MeasuredGrowth
from dflash_local.engine.drafter_choice import DrafterChoice
from dflash_local.engine.runner import Cycle
from dflash_local.engine.scheduler import Scheduler
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.events import Step
from dflash_local.request import Limits, Request, SamplingParams, user_request
from dflash_local.text_index import LONGEST, NEWEST, SHORTEST, Copies, TextIndex
from tests.engine_sessions import Reply

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=0.9, top_k=30, repetition_penalty=1.05, seed=4),
}
TEXTS = ("Count from 3 to 17.", 'Spell the word "bridge" with dashes.')
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
        behind, found, confidence = index.find(text, count)
        assert behind == len(text) and list(found) == searched(text, count)
        assert (confidence > 1.5) == bool(found) and confidence <= 5
        drafted += len(found)
    assert drafted > 3000
    index.truncate(0)
    assert not index._ends, "a conversation that is gone leaves nothing"


def opened(model: str, engine: str, drafter: str | None = None) -> Session:
    pair = resolve(model, drafter, settings.load(), lambda _: None)
    return load(pair, LoadConfig(device="cpu", dtype="float32", engine=engine))


PAIRS = [(model, engine) for model in ("demo", "demo-hybrid") for engine in ("reference", "fused")]


@pytest.fixture(scope="module", params=PAIRS)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    model, engine = request.param
    loaded = opened(model, engine, str(folder_of(LOOKUP)))
    yield loaded
    loaded.close()


@pytest.fixture(scope="module", params=[*PAIRS, ("demo-hybrid", "reference", OWN), ("demo-hybrid", "fused", OWN)])
def pair(request: pytest.FixtureRequest) -> Iterator[Session]:
    """With a trained drafter."""
    loaded = opened(*request.param)
    yield loaded
    loaded.close()


def asked(session: Session, mode: str, prompt: tuple[int, ...], sampling: SamplingParams, cold: bool = True) -> Written:
    request = Request(prompt_ids=prompt, limits=Limits(40), mode=mode, sampling=sampling)  # type: ignore[arg-type]
    return write(session, request) if cold else go_on(session, request)


class Foreseen(TextIndex):
    """Knows what a reply will be, and is wrong at some places; at some places it finds nothing."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self._foreseen = text

    def find(self, ids: Sequence[int], count: int) -> Copies:
        behind = len(ids)
        places = range(behind, min(behind + count, len(self._foreseen)) if behind % 5 < 3 else behind)
        return Copies(behind, tuple(self._foreseen[at] + (at % 17 == 0 or at % 31 == 0) for at in places), 4.0)


def plant(session: Session, index: TextIndex, drafting: dict[int, float], given: dict[int, float]) -> None:
    """Begin anew with a text's index, and with costs of drafter's cycles and of those whose drafts are given."""
    session.conversations.index = index
    session.schedulers.clear()
    vars(session.runner).update(costs=drafting, verify_costs=given)


def cycles(session: Session, prompt: tuple[int, ...], sampling: SamplingParams, plain: Written) -> list[Step]:
    """Ask for a reply, which must be the plain one; return the cycles that drafted."""
    request = Request(prompt_ids=prompt, limits=Limits(40), mode="dflash", sampling=sampling)
    reply = Reply(list(session.generate(request)))
    assert reply.ids == list(plain.ids)
    found = [step for step in reply.find(Step) if step.drafted]
    assert reply.finished.stats.copied_cycles == sum(step.copied for step in found)
    return found


@pytest.mark.parametrize(("how", "costs"), [("greedy", {}), ("sampled", COSTS), ("filtered", COSTS)])
def test_no_text_changes(session: Session, how: str, costs: dict[int, float]) -> None:
    plant(session, TextIndex(), {}, costs)
    prompt, copied = REPEATED, 0
    for _ in range(2):
        plain = asked(session, "ar", prompt, SAMPLINGS[how])
        asked(session, "dflash", REPEATED[:40], SAMPLINGS[how])  # the caches hold another text then
        copied += sum(step.copied for step in cycles(session, prompt, SAMPLINGS[how], plain))
        again = asked(session, "dflash", prompt[:-3], SAMPLINGS[how], cold=False)  # it goes back
        assert again.ids == asked(session, "ar", prompt[:-3], SAMPLINGS[how]).ids
        prompt = (*prompt, *plain.ids, 7, 8, 9)
    assert costs or copied or session.facts.target != "demo"


@pytest.mark.parametrize("how", SAMPLINGS)
def test_no_text_changes_beside_a_drafter(pair: Session, how: str) -> None:
    sampling = SAMPLINGS[how]
    drafting = {rows: ms + 1.0 * (rows > 1) for rows, ms in COSTS.items() if rows <= pair.facts.block_size}
    found = list[Step]()
    for text in TEXTS:
        prompt = pair.render(user_request(text)).ids
        plain = asked(pair, "ar", prompt, sampling)
        plant(pair, Foreseen((*prompt, *plain.ids)), drafting, {**COSTS, 16: 1.45})
        found += cycles(pair, prompt, sampling, plain)
        fixed = Request(prompt_ids=prompt, limits=Limits(20), mode="dflash", block_size=4, sampling=sampling)
        reply = write(pair, fixed)
        assert reply.ids == plain.ids[:20] and not reply.stats.copied_cycles, "a named block size is the drafter's"
    assert {step.copied for step in found} == {0, 1}
    assert max(step.accepted for step in found) >= pair.facts.block_size, "copies are longer than the drafter's block"


def test_a_check_compares_texts_and_leaves_its_acceptance_alone(session: Session) -> None:
    assert check_drafter(session, find("demo")).state == "skipped"
    found = check_exactness(session, find("demo"))
    assert found.state == "ok" and found.figures["tokens"] > 0


@pytest.mark.parametrize("beside", [False, True])
def test_copies_are_verified_where_they_have_held(beside: bool) -> None:
    """It is learnt from the text alone: nothing has to be verified for that."""
    control = VerifyLength({rows: ms + 0.3 for rows, ms in COSTS.items()}, 16)
    for _ in range(100):
        control.add(16, 1)
    choice = DrafterChoice([control]) if beside else None
    copied, draw = CopiedDrafts(TextIndex(), COSTS, 16), random.Random(3)
    text = [draw.randrange(1000) for _ in range(200)]

    def verified(repeats: bool) -> set[int]:
        """Let the text go on for a while, with a match of eight ids now and then; return the rows at the last ones."""
        rows = []
        for _ in range(100):
            at = draw.randrange(len(text) - 30)
            text.extend(text[at : at + 8])
            rows.append(copied.rows(copied.find(text), choice))
            text.extend(text[at + 8 : at + 24] if repeats else [draw.randrange(1000) for _ in range(16)])
            copied.find(text)
        return set(rows[80:])

    assert verified(repeats=False) == {1}
    assert min(verified(repeats=True)) == 8, "a match of eight ids copies eight, of which seven make a length"
    assert verified(repeats=False) == {1}


class Repeating(TextIndex):
    """A text that repeats at every other cycle, and the runner of its cycles, whose drafts are right there.

    Of its copies three of seven are right at the longer matches, and none at the shorter ones.
    """

    proposer, experts, wait_ms, own_costs, growth = True, None, 1e9, dict[int, float](), MeasuredGrowth()
    costs, verify_costs = {1: 1.0, 2: 1.5, 4: 1.55, 8: 1.6}, {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2}

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.cycles, self.rows = [0], list[Cycle](), 1

    def find(self, ids: Sequence[int], count: int) -> Copies:
        behind, place = len(ids), len(self.cycles)
        right = 3 if place % 4 == 0 else 0
        copies = [behind + at if at < right else -1 for at in range(min(count, 7 if place % 2 == 0 else 0))]
        return Copies(behind, tuple(copies), 4.0 if right else 2.0)

    def settle(self, newest: int = 0) -> None:
        """All is known at once."""

    def set_block(self, rows: int, own: bool = False) -> None:
        self.rows = rows

    def launch(self, _cut: Any = None, copied: Sequence[int] = ()) -> None:
        rows, place = len(copied) + 1 if copied else self.rows, len(self.cycles)
        right = (3 if place % 4 == 0 else 0) if copied else 7 if place % 2 == 0 else 1
        accepted = min(right, rows - 1)
        self.ids += range(len(self.ids), len(self.ids) + accepted + 1)
        self.cycles.append(Cycle((0,), rows - 1, accepted, rows, 0.0, 0.0, copied=bool(copied)))


def test_copies_leave_text_that_a_drafter_finds_as_easy() -> None:
    runner = Repeating()
    scheduler = Scheduler(runner, 8, runner)  # type: ignore[arg-type]
    scheduler.begin("final")
    for _ in range(400):
        scheduler.launch()
        scheduler.add(runner.cycles[-1])
    copied = [cycle.copied for cycle in runner.cycles]
    assert any(copied[:100]) and not any(copied[300:])
