"""A session without a model: it plays a script, so that the rooms above the engine can be tested."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_local.app.model_sources import ModelSource
from dflash_local.catalog.bundled import Pair
from dflash_local.catalog.generation_config import sampling_defaults
from dflash_local.checkpoint_files.source import open_source
from dflash_local.errors import DFlashError
from dflash_local.events import (
    Event,
    Finished,
    FinishReason,
    Piece,
    PrefillProgress,
    Started,
    Stats,
    Step,
    TokenLogprob,
    Usage,
)
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import HeldCount, SessionFacts
from dflash_local.request import Request
from dflash_local.service.backend import Backend, Model
from dflash_local.store.confidence_record import ConfidenceRecord
from dflash_local.store.said_record import SaidRecord
from dflash_local.store.sequence_files import SequenceFiles


@dataclass(frozen=True, slots=True)
class ScriptedFacts(SessionFacts):
    """What the scripted session says of itself."""

    target: str = "scripted"
    drafter: str | None = "scripted drafter"
    block_size: int = 4
    has_tokenizer: bool = True
    load: LoadConfig = LoadConfig(engine="reference", dtype="float32", device="cpu", context=512)


STATS = Stats(
    acceptance_lengths=(3, 2),
    acceptance_per_position=(1.0, 0.5, 0.0),
    mean_acceptance_length=2.5,
    turn_acceptance_length=3.0,
    tokens_per_s=120.0,
    end_to_end_tokens_per_s=100.0,
    ttft_s=0.01,
    prefill_s=0.01,
    decode_s=0.05,
    draft_s=0.02,
    verify_s=0.02,
    other_s=0.01,
    engine="reference",
    mode="dflash",
    block_size=4,
    seed=99,
    verify_rows=((4, 2),),
    plain_step_s=1 / 60,
    plain_from="measured at load",
)
PROMPT_IDS = (3, 1, 4, 1, 5)
HELLO = (
    Step((Piece("Hello"),), (10,), 0, 0, 0, 0.01),
    Step((Piece(", wor", origin="accepted"), Piece("ld")), (11, 12, 13), 3, 2, 4, 0.02),
    Step((Piece("!", origin="accepted"), Piece("\n")), (14, 15), 3, 1, 4, 0.03),
)


class PromptFault(Exception):
    """Stands for ``error`` while the prompt is prepared."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(slots=True)
class ScriptedSession:
    """Answers every request with ``steps``; one step is one cycle.

    Attributes:
        faults: raised instead of finishing, one per request, None meaning no fault; one that is a ``PromptFault``
            comes while the prompt is prepared.
        end: the reason of replies that come to their end.
        gate: when given, each step waits for it (a slow engine). on_step: called before each step.
        takes_turns: it can set replies aside.
        drafts, observe, confidences, said, locks: as the engine's session has them.
    """

    facts: ScriptedFacts = field(default_factory=ScriptedFacts)
    steps: Sequence[Step] = HELLO
    faults: list[BaseException | None] = field(default_factory=list)
    end: FinishReason = "stop"
    gate: threading.Event | None = None
    on_step: Callable[[int], None] | None = None
    requests: list[Request] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    drafts: bool = True
    observe: Callable[[Stats], None] = lambda _stats: None
    confidences: ConfidenceRecord = field(default_factory=lambda: ConfidenceRecord(None))
    said: SaidRecord | None = None
    locks: ExitStack = field(default_factory=ExitStack)
    closed: bool = False
    takes_turns: bool = False

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        self.requests.append(request)
        self.threads.add(threading.get_ident())
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, PromptFault):
            raise fault.error
        return self._events(request, cancelled, fault)

    def count(self, request: Request) -> int:
        return len(PROMPT_IDS)

    def set_aside(self) -> bool:
        return self.takes_turns

    def keep_on_disk(self, files: SequenceFiles | None) -> None:
        pass

    def held(self) -> tuple[HeldCount, ...]:
        return HeldCount("device", 1, 700, None), HeldCount("host", 2, 3000, 4000), HeldCount("disk", 0, 0, 0)

    def _events(self, request: Request, cancelled: Callable[[], bool], fault: BaseException | None) -> Iterator[Event]:
        if isinstance(fault, DFlashError) and fault.message.startswith("at once"):
            raise fault
        yield PrefillProgress(5, 5)
        yield Started(len(PROMPT_IDS), 0, 0.01, PROMPT_IDS if request.return_token_ids else ())
        tokens, reason = 0, self.end
        for index, step in enumerate(self.steps):
            if self.on_step:
                self.on_step(index)
            while self.gate is not None and not self.gate.is_set() and not cancelled():
                time.sleep(0.002)
            if cancelled():
                reason = "cancelled"
                break
            tokens += len(step.token_ids)
            yield step
        if fault is not None:
            raise fault
        yield self._finished(request, tokens, reason)

    def _finished(self, request: Request, tokens: int, reason: FinishReason) -> Finished:
        seed = request.sampling.seed if request.sampling.seed is not None else STATS.seed
        stats = replace(STATS, mode=request.mode, seed=seed, block_size=request.block_size or self.facts.block_size)
        if request.mode == "ar":
            stats = replace(stats, acceptance_lengths=(), mean_acceptance_length=None, tokens_per_s=60.0, decode_s=0.1)
        return Finished(reason, Usage(5, tokens), stats)

    def close(self) -> None:
        self.closed = True
        self.locks.close()


@dataclass(slots=True)
class PartingSession(ScriptedSession):
    """Its drafted reply has another token 1; asked for likelihoods, it tells how near that one was.

    Attributes:
        rival: log probability of the drafted reply's token 1, where the target's own has -0.5; None when it is
            not among the likeliest, of which the last has -8.5.
    """

    rival: float | None = -0.53

    def generate(self, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        ids = (10, 11, 12) if request.mode == "ar" else (10, 9)
        rival = ((9, "c", self.rival, None),) if self.rival is not None else ()
        top = ((11, "b", -0.5, None), *rival, (7, "d", -8.5, None))
        rows = (TokenLogprob(10, "a", -0.1, ((10, "a", -0.1, None),)), TokenLogprob(11, "b", -0.5, top))
        self.steps = [
            Step((Piece("x"),), (token,), 0, 0, 0, 0.01, rows[index : index + 1] if request.logprobs else ())
            for index, token in enumerate(ids[: request.limits.max_new_tokens])
        ]
        yield from ScriptedSession.generate(self, request, cancelled)


class ScriptedModels(ModelSource):
    """Models whose backends are the test's: ``open_backend`` gets the pair and how it is to be loaded."""

    def __init__(self, open_backend: Callable[[Pair, LoadConfig], Backend], label: str = "") -> None:
        self._open, self._label = open_backend, label
        self.notify = lambda _event: None

    @property
    def label(self) -> str:
        return self._label

    def pair(self, name: str | None, drafter: str | None = None, load: LoadConfig | None = None) -> Pair:
        return Pair(name or "scripted", Path("nowhere"), Path("nowhere"), bundled=False)

    def model(self, pair: Pair, load: LoadConfig, thinking: bool) -> Model:
        sampling = sampling_defaults(open_source(pair.target), pair.sampling)
        return Model(pair.name, lambda _progress: self._open(pair, load), pair, sampling=sampling, thinking=thinking)

    def find(self, name: str, load: LoadConfig | None) -> Model:
        return self.model(self.pair(name), load or LoadConfig(), False)

    def names(self) -> tuple[str, ...]:
        return ()

    def check(self, pair: Pair) -> None: ...

    def without_questions(self) -> ScriptedModels:
        return self
