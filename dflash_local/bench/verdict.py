"""Is a token the target's choice, a near-tie, or a bug: by a threshold that is measured (docs/exactness.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_local.engine.sampling import Sampler
from dflash_local.request import SamplingParams

CAP = 0.5  # noise of good engines is 0 to 0.25, rollback bugs measured 0.6 to 2.4
FLOAT32_CAP = 1e-3
PERCENTILE = 0.999
ENOUGH_POSITIONS = 10_000


@dataclass(frozen=True, slots=True)
class Look:
    """One pass's scores of one emitted token and its rival, in perturbed scores.

    Attributes:
        best: the pass's own choice.
        short, rival_short: how far the token's score and its rival's are below the best one; 0 for the choice, inf for
            what a filter dropped.
        noise: how far the gaps among the contending logits differ between this pass and the block pass.
        rounding: two roundings of the largest contending logit in the head's dtype.
        same_bits: every logit of this pass's row is that of the block pass's.
    """

    best: int
    short: float
    rival_short: float = 0.0
    noise: float = 0.0
    rounding: float = 0.0
    same_bits: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """An emitted token as the passes see it; ``plain`` is None where plain transformers was not run.

    The rival is what the plain reply has here, or would write: the single-row pass's choice, maybe the token itself.
    """

    token: int
    single: Look
    block: Look
    plain: Look | None = None

    @property
    def agreed(self) -> bool:
        """True when both passes choose the token: only such positions may set the threshold."""
        return self.single.short == self.block.short == 0


@dataclass(frozen=True, slots=True)
class Noise:
    """The threshold in logits: ``tau`` is the 99.9th percentile over ``positions``, capped; ``measured`` is not."""

    tau: float
    measured: float
    cap: float
    positions: int

    @property
    def enough(self) -> bool:
        """True when the percentile stands on ``ENOUGH_POSITIONS``."""
        return self.positions >= ENOUGH_POSITIONS

    @property
    def line(self) -> str:
        """Say how the threshold came about."""
        few = "" if self.enough else f", fewer than {ENOUGH_POSITIONS:,}"
        capped = f", over the cap: {self.cap:g} holds" if self.measured > self.cap else ""
        return (
            f"noise of one row against a block: {self.measured:.3g} "
            f"(99.9th percentile over {self.positions:,} positions{few}{capped})"
        )

    def threshold(self, rounding: float, params: SamplingParams) -> float:
        """The largest margin of a near-tie at a position, in scores; never less than the rounding of the two logits.

        A temperature under 1 and a repetition penalty stretch logits, and their noise with them.
        """
        stretch = max(params.repetition_penalty, 1 / params.repetition_penalty)
        if not params.greedy:
            stretch /= params.temperature
        return min(max(self.tau, rounding) * stretch, self.cap)


def measure(samples: Sequence[float], dtype: torch.dtype) -> Noise:
    """The threshold from one noise sample per position (those in doubt left out)."""
    cap = FLOAT32_CAP if dtype == torch.float32 else CAP
    ordered = sorted(samples)
    measured = ordered[min(math.ceil(PERCENTILE * len(ordered)), len(ordered)) - 1] if ordered else 0.0
    return Noise(min(measured, cap), measured, cap, len(ordered))


@torch.inference_mode()
def judge(
    sampler: Sampler,
    prompt: int,
    text: Sequence[int],
    single: torch.Tensor,
    blocks: Iterator[torch.Tensor],
    plain: torch.Tensor | None = None,
    rival: tuple[int, int] | None = None,
) -> list[Position]:
    """What the passes say of every token of ``text``.

    Args:
        sampler: a fresh one of the request. prompt: its length. rival: a token's index, and its id in the plain reply.
        single, plain: logits [n, V]. blocks: logits [k, V] at a time, n rows in all.
    """
    positions: list[Position] = []
    for rows in blocks:
        for row in rows:
            at = len(positions)
            if at == len(text):
                break
            token = torch.tensor([text[at]], device=row.device)
            noise = sampler.noise(prompt + at, 1)
            one_row = single[at].to(row.device)
            one, block = (sampler.scores(each[None], token[:0], noise)[0] for each in (one_row, row))
            other = rival[1] if rival is not None and rival[0] == at else int(one.argmax())
            whole: Look | None = None
            if plain is not None:
                plain_row = plain[at].to(row.device)
                scores = sampler.scores(plain_row[None], token[:0], noise)[0]
                whole = _look(scores, text[at], other, *_noise(plain_row, row))
            one_look = _look(one, text[at], other, *_noise(one_row, row), torch.equal(one_row, row))
            positions.append(Position(text[at], one_look, _look(block, text[at], other), whole))
            sampler.emitted(text[at : at + 1])
    return positions


def _look(
    scores: torch.Tensor, token: int, rival: int, noise: float = 0.0, rounding: float = 0.0, same_bits: bool = False
) -> Look:
    best = int(scores.argmax())
    short, rival_short = (float(scores[best] - scores[x]) for x in (token, rival))
    return Look(best, short, rival_short, noise, rounding, same_bits)


def _noise(row: torch.Tensor, block: torch.Tensor) -> tuple[float, float]:
    """Noise of the gaps among the best two tokens of either row, and the rounding of such a gap.

    The largest logits are the noisiest, and a margin is a difference of two: so differences of those are measured.
    """
    contenders = torch.cat((row.topk(2).indices, block.topk(2).indices))
    ours, theirs = row[contenders].float(), block[contenders].float()
    moved = ours - theirs
    largest = float(torch.cat((ours, theirs)).abs().max())
    return float(moved.max() - moved.min()), 2 * torch.finfo(row.dtype).eps * largest


def explained(position: Position, noise: Noise, params: SamplingParams) -> tuple[bool, float | None]:
    """May the target have written this token: yes or no, and the margin (None at a filter's border).

    The margin is the largest distance from the best score, of the token and its rival in both passes: where it is
    small, either may win in either pass. Where one pass's filter dropped what the other's kept there is no such
    distance; then each pass must choose what was written with it, and no logit may have moved by more than the cap.
    """
    single, block = position.single, position.block
    threshold = noise.threshold(single.rounding, params)
    shorts = (single.short, block.short)
    rivals = (single.rival_short, block.rival_short)
    if math.inf in (min(shorts), min(rivals)):  # no pass would have let it through
        return False, math.inf
    largest = max(*shorts, *rivals)
    if largest < math.inf:
        return largest <= threshold, largest
    chosen = block.short if block.short < math.inf else single.short
    other = single.rival_short if single.rival_short < math.inf else block.rival_short
    return max(chosen, other) <= threshold and single.noise <= noise.cap, None


def agrees(look: Look, noise: Noise, params: SamplingParams) -> bool:
    """Whether one pass's choice is the emitted token, or nearly."""
    return look.short <= noise.threshold(look.rounding, params)
