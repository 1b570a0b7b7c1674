"""The verify-length controller: against the best fixed length on simulated text, and inside whole replies."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, inf
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_local.catalog import bundled
from dflash_local.engine.drafter_choice import FIRST_WAIT, LONGEST_WAIT, STREAK, Chosen, DrafterChoice
from dflash_local.engine.fused_runner import AHEAD
from dflash_local.engine.load_pair import load
from dflash_local.engine.runner import Cycle
from dflash_local.engine.scheduler import _draft_ms
from dflash_local.engine.session import Session
from dflash_local.engine.verify_length import VerifyLength
from dflash_local.events import Notice, Step
from dflash_local.load_config import LoadConfig
from dflash_local.request import Constraint, Limits, SamplingParams, user_request
from tests.engine.fused_sessions import fused_session
from tests.engine_sessions import BLOCK, Reply, ask, random_prompt, text_of
from tests.families import VOCAB
from tests.proposers import Oracle

Shares = Sequence[float]
FLAT = {1: 4.6, 4: 6.0, 6: 6.0, 8: 6.0, 12: 6.0, 16: 6.0}
LARGE_CARD = {1: 4.6, 4: 5.7, 6: 5.75, 8: 5.8, 12: 5.9, 16: 6.0}
RISING = {1: 4.6, 4: 7.0, 6: 8.5, 8: 10.0, 12: 13.0, 16: 16.0}
EXPERTS = {1: 3.0, 4: 6.0, 6: 7.5, 8: 9.0, 12: 11.5, 16: 14.0}
DEAR_DRAFTS = {1: 4.6, 4: 16.0, 6: 16.2, 8: 16.4, 12: 16.7, 16: 17.0}  # a short block never pays
CYCLES = 5000


def even(share: float) -> Shares:
    return [share] * 15


def expected(shares: Shares, rows: int) -> float:
    tokens = alive = 1.0
    for share in shares[: rows - 1]:
        alive *= share
        tokens += alive
    return tokens


def best_fixed(costs: Mapping[int, float], shares: Shares) -> tuple[int, float]:
    """The length with the highest true rate, and that rate."""
    rows = max(costs, key=lambda one: (expected(shares, one) / costs[one], one))
    return rows, expected(shares, rows) / costs[rows]


@dataclass
class Text:
    """Simulated decoding, of which the controller hears ``late`` launches later.

    Attributes:
        wait_ms: that confidences cost where they are waited for. draft_ms: of ``VerifyLength``. ms: of all cycles.
    """

    costs: Mapping[int, float]
    seed: int = 0
    late: int = AHEAD
    wait_ms: float = 0.0
    draft_ms: float = inf
    ms: float = 0.0

    def __post_init__(self) -> None:
        self.control = DrafterChoice([VerifyLength(self.costs, 16, wait_ms=self.wait_ms, draft_ms=self.draft_ms)])
        self.random = random.Random(self.seed)
        self._on_their_way: deque[tuple[Chosen, Cycle]] = deque()

    def cycle(self, shares: Shares, confidences: Sequence[float]) -> tuple[int, int]:
        """Run a cycle of these true shares; returns its rows and tokens."""
        chosen = self.control.next()
        rows = chosen.rows
        if chosen.cut is not None:
            rows = chosen.cut(confidences)
            self.ms += self.wait_ms
        accepted = next((slot for slot in range(rows - 1) if self.random.random() >= shares[slot]), rows - 1)
        self.ms += self.costs[rows] + (self.draft_ms if rows == 1 < chosen.rows else 0.0)
        told = tuple(confidences) if chosen.rows > 1 else ()
        cycle = Cycle((0,) * (accepted + 1), rows - 1, accepted, rows, 0.0, 0.0, confidences=told)
        self._on_their_way.append((chosen, cycle))
        if len(self._on_their_way) > self.late:
            self.control.add(*self._on_their_way.popleft())
        return rows, accepted + 1

    def run(self, shares: Shares, cycles: int) -> tuple[float, list[int]]:
        """Tokens per millisecond, and the rows of each cycle, of a drafter that is never more or less sure."""
        self.ms = 0.0
        found = [self.cycle(shares, [0.0] * 15) for _ in range(cycles)]
        return sum(tokens for _, tokens in found) / self.ms, [rows for rows, _ in found]


@pytest.mark.parametrize(
    ("costs", "shares"),
    [
        (LARGE_CARD, even(0.1)),
        (LARGE_CARD, even(0.8)),
        (FLAT, even(0.85)),
        (LARGE_CARD, [0.8, 0.8, 0.8, *[0.1] * 12]),
        (LARGE_CARD, [0.9 * 0.95**slot for slot in range(15)]),
        (RISING, even(0.6)),
        (RISING, even(0.9)),
        (EXPERTS, even(0.4)),
        (EXPERTS, even(0.9)),
        (DEAR_DRAFTS, even(0.9)),
    ],
)
def test_it_loses_less_than_3_percent_against_the_best_fixed_length(costs: Mapping[int, float], shares: Shares) -> None:
    """Also where it would have to wait too long for confidences."""
    for wait_ms in (0.0, 1.0):
        rate, used = Text(costs, seed=11, wait_ms=wait_ms).run(shares, CYCLES)
        assert rate > 0.97 * best_fixed(costs, shares)[1], (wait_ms, Counter(used))


@pytest.mark.parametrize("costs", [RISING, EXPERTS])
def test_drafts_that_cost_nothing_and_were_not_verified_for_long_are_verified_again(costs: Mapping[int, float]) -> None:
    text = Text(costs, seed=1, draft_ms=0.01)
    text.run(even(0.9), 300)
    assert text.run(even(0.03), 1500)[1].count(1) > 1000
    text.run(even(0.92), 500)
    assert text.run(even(0.92), 1000)[0] > 0.95 * best_fixed(costs, even(0.92))[1]


@pytest.mark.parametrize("costs", [LARGE_CARD, RISING, EXPERTS, DEAR_DRAFTS])
def test_drafting_stops_where_it_loses_and_comes_back_with_easier_text(costs: Mapping[int, float]) -> None:
    for seed in range(4):
        text = Text(costs, seed)
        text.run(even(0.9), 300)
        assert text.control.drafts
        hard = text.run(even(0.05), 1500)[1]
        assert not text.control.drafts and hard[400:].count(1) > 0.95 * 1100
        easy = even(0.92)
        assert best_fixed(costs, easy)[0] > 1
        text.run(easy, 2 * LONGEST_WAIT)
        assert text.control.drafts
        rate, used = text.run(easy, 1000)
        assert 1 not in used
        assert rate > 0.93 * best_fixed(costs, easy)[1]


def test_probing_backs_off_and_is_bounded() -> None:
    text = Text(LARGE_CARD)
    used = text.run(even(0.0), 4000)[1]
    off = used.index(1)
    assert off < 25, "a drafter that never hits is dropped within a few cycles"
    probes = [at for at, rows in enumerate(used) if rows > 1 and at > off]
    streaks = [at for at, before in zip(probes, [0, *probes], strict=False) if at - before > FIRST_WAIT // 2]
    waits = [later - earlier for earlier, later in zip(streaks, streaks[1:], strict=False)]
    assert all(later > 1.5 * earlier for earlier, later in zip(waits[:3], waits[1:4], strict=True))
    assert LONGEST_WAIT <= waits[-1] <= LONGEST_WAIT + 4 * STREAK
    assert len(probes) <= 11 * STREAK


def test_a_reply_begins_with_an_early_probe_and_forgets_what_was_on_its_way() -> None:
    text = Text(LARGE_CARD)
    text.run(even(0.0), 3000)
    control = text.control
    while control.next().rows == 1:  # a probe leaves, and its reply ends before it is known
        pass
    control.begin()
    launched = [control.next().rows for _ in range(FIRST_WAIT + 1)]
    assert sum(rows > 1 for rows in launched) == 1, "one more probe, within the first cycles"


# Regimes and noise as they were fixed before: mean log odds of a draft, spread of regimes and of drafts, noise of the
# confidence, and cycles of a regime.
TEXTS = {
    "chat": (1.0, 0.8, 1.5, 1.0, 60),
    "code": (2.2, 0.8, 1.5, 1.0, 60),
    "chat of many kinds": (1.0, 1.2, 1.5, 1.0, 15),
    "sharp confidence": (2.5, 0.8, 3.0, 0.5, 60),
    "agent": (1.8, 2.0, 2.0, 0.7, 15),
}
MIXTURE = {1: 1.85, 2: 2.05, 3: 2.32, 4: 2.58, 6: 3.12, 8: 3.65, 12: 4.53, 16: 5.41}  # Qwen3.6-35B-A3B int4, H100
DENSE = {1: 6.36, 2: 6.9, 3: 7.07, 4: 7.23, 6: 7.57, 8: 7.9, 12: 8.5, 16: 9.1}  # Qwen3.8-27B int4, H100


def drawn(kind: str, cycles: int, seed: int) -> list[tuple[Shares, Shares]]:
    """Shares and confidences of a text's cycles."""
    mean, of_regimes, of_drafts, noise, length = TEXTS[kind]
    chance, found, regime = random.Random(seed), list[tuple[Shares, Shares]](), 0.0
    for cycle in range(cycles):
        regime = chance.gauss(0, 1) if cycle % length == 0 else regime
        odds = [mean + of_regimes * regime + of_drafts * chance.gauss(0, 1) - 0.05 * slot for slot in range(15)]
        found.append(([1 / (1 + exp(-each)) for each in odds], [each + noise * chance.gauss(0, 1) for each in odds]))
    return found


def gains(costs: Mapping[int, float], kind: str, shuffled: bool, wait_ms: float = 0.0) -> float:
    """Its rate over the best fixed length's."""
    cycles = drawn(kind, 2000, 1)
    fixed = max(sum(expected(shares, rows) for shares, _ in cycles) / (len(cycles) * costs[rows]) for rows in costs)
    told = [confidences for _, confidences in cycles]
    if shuffled:
        every = [each for confidences in told for each in confidences]
        random.Random(2).shuffle(every)
        told = [every[15 * at : 15 * at + 15] for at in range(len(cycles))]
    text = Text(costs, wait_ms=wait_ms)
    tokens = sum(text.cycle(shares, sure)[1] for (shares, _), sure in zip(cycles, told, strict=True))
    return tokens / text.ms / fixed


@pytest.mark.parametrize(("costs", "least"), [(MIXTURE, 1.10), (DENSE, 1.04)], ids=["mixture", "dense"])
def test_confidences_pay_and_shuffled_ones_do_not(costs: Mapping[int, float], least: float) -> None:
    found = {kind: gains(costs, kind, shuffled=False) for kind in TEXTS}
    assert sum(found.values()) / len(found) > least and min(found.values()) > 1.0, found
    useless = {kind: gains(costs, kind, shuffled=True) for kind in TEXTS}
    # What it follows without a signal is the regime, where that lasts.
    assert max(useless.values()) < 1.05 and min(useless.values()) > 0.97, useless


def test_it_waits_for_confidences_where_they_are_worth_it() -> None:
    for kind in ("chat", "agent"):
        free, dear = gains(DENSE, kind, False, 0.02), gains(DENSE, kind, False, 5.0)
        assert free > 1.02 and dear > 0.97, (kind, free, dear)


def test_no_draft_is_verified_where_none_is_worth_it() -> None:
    """Of every second block none is right, and the drafter knows; then those are right as well, which is found out."""
    blocks = [(even(0.9), [3.0] * 15), (even(0.02), [-1.0] * 15)] * 500
    rates = {}
    for draft_ms in (inf, 0.3):
        text = Text({1: 1.8, 2: 2.5, 4: 2.8, 8: 3.4, 16: 5.2}, draft_ms=draft_ms)
        found = [text.cycle(*each) for each in blocks]
        rates[draft_ms] = sum(tokens for _, tokens in found) / text.ms
        doubted = [rows for rows, _ in found[101::2]]
        assert doubted.count(2 if draft_ms == inf else 1) > 0.9 * len(doubted)
    assert 1.02 < rates[0.3] / rates[inf] < 1.1
    later = [text.cycle(even(0.9), told)[0] for _, told in blocks]
    assert later[401::2].count(1) == 0


def test_what_a_confidence_is_worth_is_learnt() -> None:
    """High ones are wrong, low ones right; what is no number counts as low."""
    control = VerifyLength({1: 1.0, 2: 1.2, 8: 3.0}, 8)
    for _ in range(300):
        control.add(control.cut([6.0] * 7), 0, [6.0] * 7)
        rows = control.cut([0.5] * 7)
        control.add(rows, rows - 1, [0.5] * 7)
    assert control.cut([6.0] * 7) == 2 and control.cut([0.5] * 7) == 8
    for odd in (float("nan"), float("-inf"), float("inf"), 1e30):
        assert control.cut([odd] * 7) in (2, 8)


def test_only_slots_that_were_reached_teach_anything() -> None:
    control = VerifyLength({1: 1.0, 4: 1.0, 8: 1.0}, 8)
    for _ in range(500):
        control.add(4, 2)  # slot 3 is rejected, what is behind it was not verified
    assert control.expected(3) == pytest.approx(3.0, abs=0.1)
    assert control.expected(4) == pytest.approx(3.0, abs=0.1)
    for _ in range(500):
        control.add(8, 1)
    assert control.expected(2) == pytest.approx(2.0, abs=0.15)
    assert control.expected(8) == pytest.approx(2.0, abs=0.15)
    before = control.expected(8)
    control.add(1, 0)
    assert control.expected(8) == before


def test_costs_beyond_the_block_are_left_out_and_none_is_refused() -> None:
    assert VerifyLength(FLAT, 8).longest == 8
    for costs in ({}, {16: 1.0}, {1: 0.0, 4: 1.0}, {4: 1.0, 8: 1.0}):
        with pytest.raises(ValueError, match="no usable costs"):
            VerifyLength(costs, 8)


# Whole replies


@cache
def session_of(name: str) -> Session:
    return load(bundled.find(name), LoadConfig(dtype="float32", device="cpu", engine="fused"))


def planted(session: Session, costs: Mapping[int, float]) -> Session:
    """The session with these costs and nothing learnt."""
    session.schedulers.clear()
    session.runner.costs = costs  # type: ignore[misc]
    return session


PROMPTS = ("Count from 3 to 17.", 'Spell the word "bridge" with dashes.')


# How a token is chosen does not know what the target remembers by: one is greedy here, one sampled, and all else long.
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=1.2, seed=5)}
HERE = (("demo", "greedy"), ("demo-hybrid", "sampled"))


@pytest.mark.parametrize(("pair", "how"), HERE)
def test_the_text_is_the_same_whatever_is_verified(pair: str, how: str) -> None:
    session, sampling = session_of(pair), SAMPLINGS[how]
    asked = [user_request(prompt, sampling=sampling, limits=Limits(max_new_tokens=32)) for prompt in PROMPTS]
    want = [Reply(list(session.generate(replace(request, mode="ar")))).ids for request in asked]
    used: Counter[int] = Counter()
    for costs in ({1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0}, {1: 1.0, 3: 1.7, 5: 2.6, 8: 3.0}):
        planted(session, costs)
        for request, ids in zip(asked, want, strict=True):
            reply = Reply(list(session.generate(request)))
            assert reply.ids == ids, costs
            used.update(dict(reply.finished.stats.verify_rows))
    assert len(used) >= 3, f"the lengths were to change: {used}"


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("asked", [{}, {"constraint": Constraint("regex", "(abc|abd|xyz){3,60}")}])
def test_cycles_that_are_cut_short_have_lengths_that_nobody_measured(engine: str, asked: dict[str, Any]) -> None:
    """By the context's end, and by a grammar."""
    session = load(bundled.find("demo"), LoadConfig(dtype="float32", device="cpu", engine=engine, context=96))
    planted(session, {1: 1.0, session.facts.block_size or 0: 1.1})
    for sampling in SAMPLINGS.values():
        request = user_request(PROMPTS[0], sampling=sampling, limits=Limits(200), **asked)
        plain, drafted = (list(session.generate(replace(request, mode=mode))) for mode in ("ar", "dflash"))
        assert Reply(drafted).ids == Reply(plain).ids and len(Reply(plain).ids) > 8
    session.close()


def test_what_is_learnt_stays_with_the_session_and_the_kind_of_sampling() -> None:
    session = planted(
        fused_session("qwen3", Oracle(VOCAB, text_of("qwen3", tuple(random_prompt(9))), 1), 2000), LARGE_CARD
    )
    first = ask(session, random_prompt(9), 60)
    (notice,) = first.find(Notice)
    assert "drafting does not pay here" in notice.message and "one per 4.6 ms" in notice.message
    again = ask(session, random_prompt(9), 30)
    assert again.find(Step)[1].rows == 1 and not again.find(Notice)
    assert list(session.schedulers) == [True]
    ask(session, random_prompt(9), 5, sampling=SamplingParams(temperature=1.0, seed=1))
    assert list(session.schedulers) == [True, False]


def test_drafting_that_pays_again_is_said_once() -> None:
    """A drafter that misses everything in the reply's first part and nothing after it."""
    prompt = random_prompt(9)
    text = text_of("qwen3", tuple(prompt), 400)

    class Awakes(Oracle):
        def token(self, position: int) -> int:
            right = super().token(position)
            return right if position > 100 else (right + 1) % VOCAB

    session = planted(fused_session("qwen3", Awakes(VOCAB, text), 2000), {1: 1.0, 4: 1.5, 8: 1.6})
    reply = ask(session, prompt, 350)
    assert reply.ids == list(text[9 : 9 + 350])
    off, on = (notice.message for notice in reply.find(Notice))
    assert "does not pay" in off and "pays again" in on and "tokens per cycle of 1." in on
    assert reply.find(Step)[-1].rows > 1
    assert 0 < reply.finished.stats.undrafted_cycles < 230


def test_an_asked_block_size_and_unknown_costs_are_not_touched() -> None:
    text = text_of("qwen3", tuple(random_prompt(9)))
    for costs, asked in ((LARGE_CARD, 5), ({}, None), ({8: 3.0}, None), ({1: 1.0, 16: 2.0}, None)):
        session = planted(fused_session("qwen3", Oracle(VOCAB, text, 3), 2000), costs)
        reply = ask(session, random_prompt(9), 40, block_size=asked)
        assert {rows for rows, _ in reply.finished.stats.verify_rows} == {asked or BLOCK}
        assert not session.schedulers


def test_a_drafters_pass_is_told_by_the_shortest_block() -> None:
    """Experts of longer ones differ from those of the given ids beside them."""
    runner: Any = SimpleNamespace(costs={1: 1.9, 2: 2.4, 16: 3.1}, verify_costs={1: 1.9, 2: 2.0, 16: 3.0})
    assert _draft_ms(runner) == pytest.approx(0.4)
