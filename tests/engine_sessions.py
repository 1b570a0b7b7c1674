"""Sessions over tiny random targets with planted or random drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dflash_local.engine.session import Session
from dflash_local.events import Event, Finished, Step
from dflash_local.models.transformers_target import TransformersTarget
from dflash_local.request import Limits, Request, SamplingParams
from tests.families import VOCAB, random_model
from tests.proposers import decode

BLOCK = 8


@dataclass(frozen=True)
class Reply:
    """A reply's events, put together."""

    events: list[Event]

    @property
    def ids(self) -> list[int]:
        return [i for e in self.events if isinstance(e, Step) for i in e.token_ids]

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished)
        return self.events[-1]

    def find(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def ask(
    session: Session, prompt: list[int], new: int = 24, cancelled: Callable[[], bool] = lambda: False, **fields: Any
) -> Reply:
    sampling = fields.pop("sampling", SamplingParams(seed=1))
    request = Request(prompt_ids=tuple(prompt), limits=Limits(max_new_tokens=new), sampling=sampling, **fields)
    return Reply(list(session.generate(request, cancelled)))


@cache
def target_of(family: str) -> TransformersTarget:
    return TransformersTarget(random_model(family), (0, 2))


@cache
def text_of(family: str, prompt: tuple[int, ...], new: int = 80) -> tuple[int, ...]:
    """Prompt and the target's own greedy continuation."""
    return tuple(decode(target_of(family), prompt, new)[0])


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
