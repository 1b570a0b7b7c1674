"""What a cycle costs by the number of rows it verifies, measured with the very graphs that will be replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch

from dflash_local.engine.runner import Runner
from dflash_local.kernels.timing import span_ms

LENGTHS = (1, 4, 6, 8, 12, 16)  # ENGINE 8.1; and the trained block
REPLAYS = 7
AT = 1024  # committed tokens that attention looks back on, where the context holds as many


class Replaying(Runner, Protocol):
    """A runner whose cycles can be run by themselves. ``context``: tokens it may hold."""

    context: int
    costs: Mapping[int, float]

    def idle(self, ids: Sequence[int]) -> AbstractContextManager[None]:
        """Within, ``replay`` runs cycles behind these committed ids; they emit nothing and move nothing."""

    def set_anchor(self, token: int) -> None:
        """Let the next cycles begin with an id."""

    def replay(self, rows: int) -> None:
        """One greedy cycle of so many rows, recorded or replayed; 1 is the plain step."""


@torch.inference_mode()
def measure_costs(runner: Replaying, block: int, say: Callable[[float], None] = lambda _part: None) -> None:
    """Fill ``runner.costs``: medians in milliseconds, at about a thousand committed tokens.

    The runner must be fresh. Tokens are varied, committed ones and anchors: what a mixture of experts reads follows
    from them, and a text of one id would read as little as no text does. Without CUDA nothing is measured.
    """
    if runner.device.type != "cuda" or runner.proposer is None:
        return
    lengths = sorted({length for length in LENGTHS if length < block} | {block})
    if runner.exact:  # every forward has the same rows
        lengths = [1, block]
    length = min(AT, runner.context // 2)
    ids = varied_ids(length + REPLAYS + 2, runner.vocab_size)
    found = {}
    with runner.idle(ids[:length]):
        for index, rows in enumerate(lengths):
            say(index / len(lengths))
            spans = []
            for anchor in ids[length:]:
                runner.set_anchor(anchor)
                spans.append(span_ms(partial(runner.replay, rows)))
            found[rows] = sorted(spans[2:])[REPLAYS // 2]  # the first compiles, the second records
    runner.costs = found


def varied_ids(count: int, vocab_size: int) -> list[int]:
    """So many ids from all of the vocabulary, the same ones every time."""
    found: list[int] = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    return found
