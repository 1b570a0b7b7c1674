"""How near a quantised target is to its original: Kullback-Leibler divergence and agreement of the first choice.

Teacher-forced over the original's own greedy replies, so that both score the same positions and neither runs away from
the other. The two are loaded one after the other: the original's log-probabilities wait in main memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from dflash_local.bench.prompts import Prompt
from dflash_local.bench.trial import prompt_ids, write
from dflash_local.engine.runner import Target
from dflash_local.engine.session import Session
from dflash_local.errors import PairError, UsageError
from dflash_local.request import Limits, Request

MAX_KEPT = 8 * 2**30  # bytes of log-probabilities
ROWS = 64  # whose logits are on the device at a time
TOTAL = "total"
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Scored:
    """A reply of the original with its scores.

    Attributes:
        log_probs: [n, V] float32 on the CPU, row i of which chose token i of ``reply``.
    """

    kind: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    log_probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Distance:
    """Of one position: KL(original || quantised) in nats, and whether both have the same likeliest token."""

    kind: str
    kl: float
    agrees: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one kind of prompt, or of all. Divergences are in nats; ``top_1``: share of agreeing positions."""

    kind: str
    positions: int
    mean_kl: float
    median_kl: float
    p99_kl: float
    top_1: float


def score_original(
    session: Session, prompts: Sequence[Prompt], max_new_tokens: int, thinking: bool, progress: Progress
) -> list[Scored]:
    """Let the original answer greedily, and keep what it gives each position.

    Raises:
        UsageError: that would take more than ``MAX_KEPT``. DFlashError: a request failed.
    """
    target = scored_target(session)
    most = len(prompts) * max_new_tokens * target.vocab_size * torch.float32.itemsize
    if most > MAX_KEPT:
        raise UsageError(
            f"{len(prompts)} replies of up to {max_new_tokens} tokens have up to {most / 2**30:.1f} GiB of "
            f"log-probabilities, {MAX_KEPT >> 30} GiB are kept",
            "fewer prompts (--limit N) or shorter replies (--max-new-tokens N)",
        )
    found = []
    for number, prompt in enumerate(prompts):
        progress(f"original, prompt {number + 1} of {len(prompts)}", number / len(prompts))
        ids = prompt_ids(session, prompt, thinking)
        reply = write(session, Request(prompt_ids=ids, limits=Limits(max_new_tokens), mode="ar")).ids
        kept = torch.cat([part.cpu() for part in log_probs(session, target, ids, reply)])
        found.append(Scored(prompt.kind, ids, reply, kept))
    return found


def give_back() -> None:
    """Return the memory of a closed session to the device: the plan of the next load counts what is free there."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def distances(session: Session, texts: Sequence[Scored], progress: Progress) -> list[Distance]:
    """What the quantised target gives the same positions.

    Raises:
        PairError: it has another vocabulary.
    """
    target = scored_target(session)
    found: list[Distance] = []
    for number, text in enumerate(texts):
        progress(f"quantised, prompt {number + 1} of {len(texts)}", number / len(texts))
        rows = text.log_probs.split(ROWS)
        for want, got in zip(rows, log_probs(session, target, text.prompt, text.reply), strict=True):
            if want.shape != got.shape:
                raise PairError(
                    f"the original has {want.shape[1]} ids, the quantised target {got.shape[1]}",
                    "give the checkpoint that it was made of: --original FOLDER",
                )
            original = want.to(got.device)
            kl = (original.exp() * (original - got)).sum(-1).clamp(min=0)  # rounding may take an exact zero below it
            same = original.argmax(-1) == got.argmax(-1)
            found += [Distance(text.kind, *each) for each in zip(kl.tolist(), same.tolist(), strict=True)]
    return found


def scored_target(session: Session) -> Target:
    """What texts are scored with.

    Raises:
        UsageError: the target is in another process.
    """
    target = session.runner.target
    if target is None:
        raise UsageError(f"{session.facts.target} is not in this process", "texts are scored with the target itself")
    return target


@torch.inference_mode()
def log_probs(session: Session, target: Target, prompt: Sequence[int], reply: Sequence[int]) -> Iterator[torch.Tensor]:
    """[at most ROWS, V] float32 on the device, for one token of the reply after the other; the prompt is not empty."""
    target.clear()
    try:
        ids = torch.tensor([*prompt, *reply[:-1]], device=target.device)
        hidden = torch.cat([target.prefill(chunk, False).hidden for chunk in ids.split(target.prefill_chunk)])
        for rows in hidden[len(prompt) - 1 :].split(ROWS):
            yield target.head(rows).float().log_softmax(-1)
    finally:
        session.reset()


def rows(distances: Sequence[Distance]) -> list[Row]:
    """A row for each kind in order of appearance, and one for all when there are several."""
    kinds = list(dict.fromkeys(one.kind for one in distances))
    by_kind = [_row(kind, [one for one in distances if one.kind == kind]) for kind in kinds]
    return [*by_kind, _row(TOTAL, distances)] if len(kinds) > 1 else by_kind


def _row(kind: str, distances: Sequence[Distance]) -> Row:
    divergences = torch.tensor([one.kl for one in distances], dtype=torch.float64)
    return Row(
        kind=kind,
        positions=len(distances),
        mean_kl=float(divergences.mean()),
        median_kl=float(divergences.quantile(0.5)),
        p99_kl=float(divergences.quantile(0.99)),
        top_1=sum(one.agrees for one in distances) / len(distances),
    )
