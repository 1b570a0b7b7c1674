"""The seam between sessions and engines: both runners fill it; a third one needs nothing else to serve a session."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from dflash_local.bench.certify import Plan, cases, certify
from dflash_local.engine.cycle import Cycle, PrefillStep
from dflash_local.engine.fused import FusedRunner
from dflash_local.engine.reference import ReferenceRunner
from dflash_local.engine.runner import Runner
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.errors import UsageError
from dflash_local.events import Started, Step
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from tests.engine_sessions import ask, target_of
from tests.fused_models import fused_target

VOCAB, ROWS, STOP = 100, 4, 99
MEMBERS = {name for name in vars(Runner) if not name.startswith("_")} | {"proposer"}


class Context:
    """A drafter elsewhere: all that is known here is how far it has read."""

    length = 0


class DistantRunner:
    """The target and its drafter are elsewhere: each prompt is answered by counting on from its last id.

    Inherits nothing. Every cycle drafts ``ROWS - 1`` ids, of which all but the last are right.
    """

    name = "distant"
    target = None
    vocab_size = VOCAB
    device = torch.device("cpu")
    is_recurrent = False
    exact = False
    drafter_precision = "full"
    costs: Mapping[int, float] = {}
    experts = None

    def __init__(self) -> None:
        self.proposer: Any = Context()
        self.ids: list[int] = []
        self.committed: list[int] = []
        self.processed: list[int] = []  # prompt tokens of each request
        self.closed = False
        self._block = 1
        self._ready: list[Cycle] = []

    def begin(
        self, sampler: Sampler, stop_ids: frozenset[int], block: int, with_drafts: bool, top: int | None = None
    ) -> None:
        self._block, self._stop_ids = block, stop_ids

    def end_at(self, length: int, exactly: bool) -> None:
        self._end = length

    def set_block(self, block: int) -> None:
        self._block = block

    def prefill(self, ids: Sequence[int], stable: int) -> Iterator[PrefillStep]:
        count = len(ids) - len(self.committed)
        self.processed.append(count)
        self.committed = list(ids)
        self.ids = [*ids, ids[-1] + 1]
        self.proposer.length = len(ids)
        yield PrefillStep(count, count, None, Cycle((self.ids[-1],), 0, 0, 0, 0.0, 0.0))

    def launch(self) -> None:
        drafted = self._block - 1
        count = max(drafted, 1)  # all drafts but one, and the target's own
        found = [self.ids[-1] + 1 + i for i in range(count)]
        if STOP in found and STOP in self._stop_ids:
            found = found[: found.index(STOP) + 1]
        self.ids += found
        self.committed = self.ids[:-1]
        self.proposer.length = len(self.committed)
        self._ready.append(Cycle(tuple(found), drafted, count - 1, self._block, 0.0, 0.0))

    def collect(self) -> list[Cycle]:
        ready, self._ready = self._ready, []
        return ready

    def notice(self) -> str:
        return ""

    def rewind(self, length: int) -> None:
        del self.ids[length:]
        self.committed = self.ids[: length - 1]

    def restart(self, length: int, point: Any) -> None:
        self.committed = self.committed[:length]
        self.ids = list(self.committed)
        self.proposer.length = length

    def planted(self, text: Sequence[int]) -> Any:
        raise UsageError("there is none")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def distant() -> Session:
    facts = SessionFacts("counting", "counting", ROWS, False, LoadConfig(context=200))
    return Session(DistantRunner(), facts, None, frozenset({STOP}))


@pytest.mark.parametrize("engine", ["reference", "fused", "distant"])
def test_every_runner_has_what_a_session_uses_and_takes_it_the_same_way(engine: str) -> None:
    runner: Any = {
        "reference": lambda: ReferenceRunner(target_of("qwen3"), None, 100),
        "fused": lambda: FusedRunner(fused_target("qwen3", 100), None, 100),
        "distant": DistantRunner,
    }[engine]()
    assert runner.name == engine and len(MEMBERS) > 15
    for member in MEMBERS:
        wanted = vars(Runner).get(member)
        found = getattr(runner, member)
        if inspect.isfunction(wanted):
            assert list(inspect.signature(found).parameters) == list(inspect.signature(wanted).parameters)[1:], member


def test_a_third_runner_answers_a_session(distant: Session) -> None:
    reply = ask(distant, [1, 2, 3], 10, mode="dflash")
    assert reply.ids == list(range(4, 14))
    assert reply.finished.reason == "length" and reply.finished.usage.completion_tokens == 10
    assert reply.finished.stats.mean_acceptance_length == ROWS - 1
    assert [step.rows for step in reply.find(Step)] == [0, ROWS, ROWS, ROWS]


def test_a_third_runner_keeps_what_a_prompt_shares_with_the_last_one(distant: Session) -> None:
    first = ask(distant, [1, 2, 3], 8, mode="ar")
    again = ask(distant, [1, 2, 3, *first.ids, 50], 4, mode="dflash")
    assert again.ids == [51, 52, 53, 54]
    assert again.find(Started)[0].reused_tokens == 10 and distant.runner.processed == [3, 2]  # type: ignore[attr-defined]


def test_a_third_runner_stops_and_is_cancelled(distant: Session) -> None:
    stopped = ask(distant, [90], 50, mode="dflash")
    assert stopped.ids[-1] == STOP and stopped.finished.reason == "stop"
    assert ask(distant, [1, 2], 50, lambda: True, mode="dflash").finished.reason == "cancelled"
    with pytest.raises(UsageError, match=f"outside the vocabulary of {VOCAB}"):
        ask(distant, [VOCAB], 5)
    distant.close()
    assert distant.runner.closed  # type: ignore[attr-defined]


def test_a_target_elsewhere_cannot_be_certified(distant: Session) -> None:
    with pytest.raises(UsageError, match="counting is not in this process"):
        certify(distant, Plan(((1, 2),), cases(1), (ROWS,), 8))
