"""How near a quantised target is to its original: Kullback-Leibler divergence and agreement of the first choice.

Teacher-forced over the original's own greedy replies, so that both score the same positions and neither runs away from
the other. The two are loaded one after the other: the original's log-probabilities wait in main memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from dflash_local.bench import provenance
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.report import TOY, Found, Progress, by_kind, finite, header, table
from dflash_local.bench.trial import prompt_ids, scored_target, write
from dflash_local.catalog.bundled import Pair
from dflash_local.engine.runner import ScoringTarget
from dflash_local.engine.session import Session
from dflash_local.errors import PairError, UsageError
from dflash_local.loaded import SessionFacts
from dflash_local.request import Limits, Request

MAX_KEPT = 8 * 2**30  # bytes of log-probabilities
ROWS = 64  # whose logits are on the device at a time
TITLES = ("kind", "positions", "mean KL", "median", "99 %", "top-1")


@dataclass(frozen=True, slots=True)
class Scored:
    """A reply of the original; ``log_probs`` [n, V], float32 on the CPU: row i chose token i of ``reply``."""

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
class FidelityRow:
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
    """Let the original answer greedily, and keep what it gives each position. UsageError: more than ``MAX_KEPT``."""
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
    """What the quantised target gives the same positions. PairError: it has another vocabulary."""
    target = scored_target(session)
    found: list[Distance] = []
    for number, text in enumerate(texts):
        progress(f"quantised, prompt {number + 1} of {len(texts)}", number / len(texts))
        rows = text.log_probs.split(ROWS)
        for want, got in zip(rows, log_probs(session, target, text.prompt, text.reply), strict=True):
            if want.shape != got.shape:
                other = f"the original has {want.shape[1]} ids, the quantised target {got.shape[1]}"
                raise PairError(other, "give the checkpoint that it was made of: --original FOLDER")
            original = want.to(got.device)
            kl = (original.exp() * (original - got)).sum(-1).clamp(min=0)  # rounding may take an exact zero below it
            same = original.argmax(-1) == got.argmax(-1)
            found += [Distance(text.kind, *each) for each in zip(kl.tolist(), same.tolist(), strict=True)]
    return found


@torch.inference_mode()
def log_probs(
    session: Session, target: ScoringTarget, prompt: Sequence[int], reply: Sequence[int]
) -> Iterator[torch.Tensor]:
    """[at most ROWS, V] float32 on the device, for one token of the reply after the other; the prompt is not empty."""
    target.clear()
    try:
        ids = torch.tensor([*prompt, *reply[:-1]], device=target.device)
        hidden = torch.cat([target.prefill(chunk, False).hidden for chunk in ids.split(target.prefill_chunk)])
        for rows in hidden[len(prompt) - 1 :].split(ROWS):
            yield target.head(rows).float().log_softmax(-1)
    finally:
        session.reset()


def rows(distances: Sequence[Distance]) -> list[FidelityRow]:
    """A row for each kind in order of appearance, and one for all when there are several."""
    return by_kind(distances, lambda one: one.kind, _row)


def _row(kind: str, distances: Sequence[Distance]) -> FidelityRow:
    divergences = torch.tensor([one.kl for one in distances], dtype=torch.float64)
    median, p99 = (float(divergences.quantile(share)) for share in (0.5, 0.99))
    top_1 = sum(one.agrees for one in distances) / len(distances)
    return FidelityRow(kind, len(distances), float(divergences.mean()), median, p99, top_1)


def presented(
    pair: Pair,
    facts: SessionFacts,
    original: Pair,
    before: SessionFacts,
    texts: Sequence[Scored],
    distances: Sequence[Distance],
) -> Found:
    """Return every figure and what both targets are; and the table with what its figures are.

    Args:
        before: facts of the original's session.
    """
    kept, figures = sum(text.log_probs.nbytes for text in texts), rows(distances)
    report = finite(
        {
            **header("dflash bench --fidelity", pair, facts),
            "original": {
                "target": asdict(provenance.checkpoint_identity(original.target)),
                "engine": before.engine,
                "weights": before.weights,
                "load": asdict(before.load),
            },
            "kept_bytes": kept,
            "rows": [asdict(row) for row in figures],
            "prompts": [
                {"kind": text.kind, "prompt_tokens": len(text.prompt), "tokens": len(text.reply)} for text in texts
            ],
        }
    )
    lines = [
        f"{pair.label}: {facts.computed_as}, against the original in {before.formats} ({before.engine} engine)",
        "",
        *table(TITLES, [_cells(row) for row in figures]),
        "",
        "KL: of the original's next-token distribution to the quantised one's, in nats, over the whole vocabulary; "
        "top-1: positions with the same likeliest token",
        f"over the original's greedy replies, teacher-forced; {kept / 2**20:,.1f} MiB of its log-probabilities were "
        "kept meanwhile",
    ]
    return report, [*lines, f"({TOY})"] if pair.toy else lines


def _cells(row: FidelityRow) -> tuple[str, ...]:
    figures = (f"{value:.3g}" for value in (row.mean_kl, row.median_kl, row.p99_kl))
    return (row.kind, str(row.positions), *figures, f"{row.top_1:.2%}")
