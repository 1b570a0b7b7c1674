"""The replies of this machine are counted, so that plans of the pair have its own acceptance length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dflash_local import settings
from dflash_local.app import loading
from dflash_local.app.fitting import shapes
from dflash_local.app.recommending import recommended
from dflash_local.app.resolve import choose
from dflash_local.catalog import bundled
from dflash_local.catalog.shapes import shape
from dflash_local.config.read_model import read_model
from dflash_local.events import Event, Finished, Usage
from dflash_local.load_config import LoadConfig
from dflash_local.planner.acceptance_record import ENOUGH, AcceptanceRecord, Count
from dflash_local.planner.machine import named
from dflash_local.planner.recommend import Weights, recommend
from dflash_local.planner.speed import Times
from dflash_local.planner.speed_record import SpeedMeasurement
from dflash_local.request import Message, Request
from dflash_local.store.paths import speeds_folder
from tests.drafter_configs import decoder_of_shape
from tests.service.scripted import ScriptedFacts, ScriptedSession

pytest.importorskip("torch")
from dflash_local.engine.drafter_choice import DrafterChoice  # noqa: E402
from dflash_local.engine.reply_figures import ReplyFigures  # noqa: E402
from dflash_local.engine.runner import Cycle  # noqa: E402
from dflash_local.engine.verify_length import VerifyLength  # noqa: E402

TARGET = "Qwen/Qwen3.5-9B"
REQUEST = Request((Message("user", "hello"),))


def test_a_reply_with_the_pairs_own_block_is_counted_and_a_session_closed_lets_its_files_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user, pair, released = settings.load(), bundled.find("demo"), list[bool]()

    @contextmanager
    def held(*_: object) -> Iterator[None]:
        yield
        released.append(True)

    monkeypatch.setattr(loading, "held", held)
    session = loading.open_held(pair, LoadConfig(device="cpu"), user, lambda _event: None)
    record = AcceptanceRecord(speeds_folder(user))
    for changes in ({}, {"block_size": 2}, {"mode": "ar"}):
        done = [event for event in session.generate(replace(REQUEST, **changes)) if isinstance(event, Finished)]
        stats = done[0].stats
        if not changes:
            tokens = sum(stats.acceptance_lengths) + stats.undrafted_cycles
            counted = {pair.name: Count(tokens, dict(stats.verify_rows))}
        assert record.read() == counted
    assert not released
    session.close()
    assert released


def test_replies_with_another_drafter_than_the_rows_own_count_for_nothing_and_are_not_predicted_by_its() -> None:
    user, model = settings.load(), "Qwen/Qwen3.5-9B"
    record = AcceptanceRecord(speeds_folder(user))
    record.add(model, 2 * ENOUGH, {16: 100})

    def source_of(drafter: str | None) -> str:
        choice = choose(model, drafter, user)
        known = shapes(choice, None)
        assert known is not None
        found = recommended(choice, known, named("RTX 4090", 24), user).best
        assert found is not None and found.prediction is not None and found.prediction.acceptance is not None
        return found.prediction.acceptance.source

    assert source_of(None).startswith("measured here") and "measured here" not in source_of("z-lab/Qwen3-8B-DFlash-b16")
    kept = record.read()
    other = str(bundled.FOLDER / "demo" / "drafter")
    with closing(loading.open_held(bundled.find("demo", other), LoadConfig(device="cpu"), user, print)) as session:
        assert session.facts.drafter is not None and list(session.generate(REQUEST))
    assert record.read() == kept


@dataclass
class SimulatedSession(ScriptedSession):
    """Replies of 500 cycles whose verify length is chosen; a draft is right with a constant probability.

    Attributes:
        costs: milliseconds of a cycle by its rows. tokens, ms: of all replies.
    """

    costs: Mapping[int, float] | None = None
    share: float = 0.0
    tokens: int = 0
    ms: float = 0.0

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        assert self.costs is not None
        figures, chance = ReplyFigures("fused", "dflash", 16, 0, 16), random.Random(len(self.requests))
        choice = DrafterChoice([VerifyLength(self.costs, 16)])
        self.requests.append(request)
        for _ in range(500):
            chosen = choice.next()
            rows = chosen.rows if chosen.cut is None else chosen.cut([0.0] * 15)
            accepted = next((slot for slot in range(rows - 1) if chance.random() >= self.share), rows - 1)
            told = (0.0,) * 15 if rows > 1 else ()
            cycle = Cycle((1,) * (accepted + 1), rows - 1, accepted, rows, 0.0, 0.0, confidences=told)
            choice.add(chosen, cycle)
            figures.add(cycle)
            self.tokens += accepted + 1
            self.ms += self.costs[rows]
        yield Finished("length", Usage(5, self.tokens), figures.stats(self.tokens))


@pytest.mark.parametrize(
    ("costs", "share", "often"),
    [
        ({1: 4.6, 4: 5.0, 6: 8.5, 8: 10.0, 12: 15.0, 16: 21.0}, 0.85, 4),
        ({1: 4.6, 4: 7.0, 6: 8.5, 8: 10.0, 12: 13.0, 16: 16.0}, 0.3, 1),
        ({1: 4.6, 4: 5.7, 6: 5.75, 8: 5.8, 12: 5.9, 16: 6.0}, 0.85, 16),
    ],
    ids=["a short block pays", "no drafts pay", "the whole block pays"],
)
def test_replies_whose_verify_length_is_chosen_are_predicted_as_fast_as_they_are(
    costs: dict[int, float], share: float, often: int, tmp_path: Path
) -> None:
    session = SimulatedSession(ScriptedFacts(block_size=16), costs=costs, share=share)
    record = AcceptanceRecord(tmp_path)
    for _ in range(8):
        (done,) = session.generate(REQUEST)
        assert isinstance(done, Finished)
        record.add_reply(TARGET, 16, done.stats)
    found = record.read()[TARGET]
    assert max(found.cycles, key=lambda rows: found.cycles[rows]) == often

    model, block = shape(TARGET), shape("z-lab/Qwen3.5-9B-DFlash")
    assert model is not None and block is not None
    target, drafter = read_model(model, TARGET), decoder_of_shape(block, "d")
    card = named("RTX 4090", 24)
    plan = recommend([Weights(target)], drafter, card).fitting[0].plan
    load = replace(plan.load, drafter_precision="8bit")
    times = Times(1024, costs[1], costs[16], 16, tuple((rows, costs[rows]) for rows in (4, 6, 8, 12)))
    measured = SpeedMeasurement.of(card.name, TARGET, plan.format, load, times, None)
    best = recommend([Weights(target)], drafter, card, None, "balanced", None, (measured,), record.read()).best
    assert best is not None and best.prediction is not None and best.prediction.acceptance is not None
    lengths, first = best.prediction.acceptance, best.prediction.times[0]
    assert first.measured and lengths.source == f"measured here over {session.tokens:,} tokens"
    assert best.prediction.drafted_tokens_per_s(first) == pytest.approx(
        (1e3 * session.tokens / session.ms,) * 2, rel=0.01
    )
    assert first.plain_tokens_per_s == pytest.approx(1e3 / costs[1])
