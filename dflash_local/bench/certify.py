"""The exactness certificate: the same requests with and without drafting, every difference explained.

Two claims: identical token ids, or *fast*, every token the target's choice on the verify logits and every divergence
from the plain one a near-tie (docs/exactness.md).
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_local.bench import plain
from dflash_local.bench.certificate import ORDER, Certificate, Divergence, PlainCheck, Run, Verdict
from dflash_local.bench.report import Progress
from dflash_local.bench.trial import CycleShape, Written, scored_target, write
from dflash_local.bench.verdict import Noise, Position, agrees, explained, judge, measure
from dflash_local.engine.runner import ScoringTarget
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.events import Mode
from dflash_local.request import Limits, Request, SamplingParams

Plant = Callable[[tuple[int, ...], tuple[int, ...]], Any]  # from prompt and reply to a proposer of the runner's kind


@dataclass(frozen=True, slots=True)
class Case:
    """One way to choose tokens, with the name reports give it."""

    name: str
    sampling: SamplingParams


def cases(seed: int) -> tuple[Case, ...]:
    """Greedy, sampled, and sampled through a filter; the noise of the last two is the same."""
    return (
        Case("greedy", SamplingParams(seed=seed)),
        Case("T=0.8", SamplingParams(temperature=0.8, seed=seed)),
        Case("T=1 top-p=0.9", SamplingParams(temperature=1.0, top_p=0.9, seed=seed)),
    )


@dataclass(frozen=True, slots=True)
class CertifyPlan:
    """Prompts as ids, cases, block sizes, tokens per reply; ``planted``: drafts are the plain text with mistakes."""

    prompts: tuple[tuple[int, ...], ...]
    cases: tuple[Case, ...]
    block_sizes: tuple[int, ...]
    max_new_tokens: int = 128
    planted: bool = False


@dataclass(slots=True)
class _Trial:
    """A run before the noise is known."""

    prompt: int
    case: Case
    block: int
    ar: Written
    dflash: Written
    first: int | None
    positions: list[Position]

    @property
    def rival(self) -> tuple[int, int] | None:
        """Where the texts differ and what the plain reply has there, if both wrote something."""
        inside = self.first is not None and self.first < min(len(self.ar.ids), len(self.dflash.ids))
        return (self.first, self.ar.ids[self.first]) if inside and self.first is not None else None


def certify(
    session: Session,
    plan: CertifyPlan,
    progress: Progress = lambda _text, _fraction: None,
    plant: Plant | None = None,
    load_plain: plain.Load | None = None,
) -> Certificate:
    """Run the plan and explain every difference.

    Args:
        progress: called with what is being done and how far it is (0..1).
        plant: gives the proposer to run instead of the session's, from the prompt and the plain reply.
        load_plain: gives the target as transformers loads it, where the session holds none; beside the session.

    Raises:
        DFlashError: a request failed; a bug found is a verdict, not an error.
    """
    target = scored_target(session)
    if plan.planted:
        session.runner.oracle_drafter(())  # refused before anything is run

        def plant(prompt: tuple[int, ...], text: tuple[int, ...]) -> Any:
            return session.runner.oracle_drafter([*prompt, *text])

    trials: list[_Trial] = []
    oracle = plain.Oracle(target, load_plain)
    total = len(plan.prompts) * len(plan.cases) * len(plan.block_sizes)
    skipped = ""
    for number, prompt in enumerate(plan.prompts):
        for case in plan.cases:
            ar = write(session, _request(prompt, case, plan.max_new_tokens, "ar", None))
            for block in plan.block_sizes:
                progress(f"certifying, run {len(trials) + 1} of {total}", len(trials) / total)
                dflash = _drafted(session, prompt, case, plan.max_new_tokens, block, ar, plant)
                first = len(os.path.commonprefix([ar.ids, dflash.ids])) if ar.ids != dflash.ids else None
                trial = _Trial(number, case, block, ar, dflash, first, [])
                skipped = _examine(session, prompt, trial, oracle) or skipped
                trials.append(trial)
    dtype = target.dtype
    noise = measure([p.single.noise for t in trials for p in t.positions if p.agreed], dtype)
    checked = _plain_check(trials, dtype, skipped)
    runs = tuple(_run(session, trial, noise) for trial in trials)
    verdicts: list[Verdict] = [run.verdict for run in runs]
    looks = [position.single.same_bits for trial in trials for position in trial.positions]
    exact = session.facts.load.exact
    broken = exact and not (all(looks) and set(verdicts) <= {"identical"})
    if checked.unexplained or broken:
        verdicts.append("BUG")
    return Certificate(runs, noise, checked, max(verdicts, key=ORDER.index), len(looks), sum(looks), exact)


def _request(prompt: tuple[int, ...], case: Case, tokens: int, mode: Mode, block: int | None) -> Request:
    return Request(prompt_ids=prompt, sampling=case.sampling, limits=Limits(tokens), mode=mode, block_size=block)


def _drafted(
    session: Session, prompt: tuple[int, ...], case: Case, tokens: int, block: int, ar: Written, plant: Plant | None
) -> Written:
    """The drafted reply, with a planted proposer in the drafter's place if there is one."""
    runner = session.runner
    own = runner.proposer
    try:
        if plant is not None:
            runner.proposer = plant(prompt, ar.ids)
        return write(session, _request(prompt, case, tokens, "dflash", block))
    finally:
        runner.proposer = own
        session.reset()


def _examine(session: Session, prompt: tuple[int, ...], trial: _Trial, oracle: plain.Oracle) -> str:
    """Score the drafted reply both ways (greedy ones by plain transformers too); why the last was left out."""
    target, text, params = scored_target(session), trial.dflash.ids, trial.case.sampling
    whole: torch.Tensor | None = None
    skipped = ""
    if not text:
        return skipped
    try:
        single = single_rows(target, prompt, text)
        if params.greedy:
            whole, skipped = oracle.rows(prompt, text)
        seed = trial.dflash.stats.seed
        sampler = Sampler(params, seed, target.vocab_size, torch.tensor(prompt, device=target.device))
        rows = block_rows(target, prompt, text, trial.dflash.cycles)
        trial.positions = judge(sampler, len(prompt), text, single, rows, whole, trial.rival)
    finally:
        session.reset()
    return skipped


def _plain_check(trials: Sequence[_Trial], dtype: torch.dtype, skipped: str) -> PlainCheck:
    """Plain transformers runs other kernels over the whole text at once, so its noise is measured apart."""
    compared = [(trial, p.plain) for trial in trials for p in trial.positions if p.plain is not None]
    if not compared:
        return PlainCheck(0, 0, 0, 0.0, None, skipped or "no greedy reply")
    noise = measure([look.noise for _, look in compared if look.short == 0], dtype)
    other = [(trial, look) for trial, look in compared if look.short > 0]
    beyond = sum(not agrees(look, noise, trial.case.sampling) for trial, look in other)
    return PlainCheck(len(compared), len(other), beyond, max(look.short for _, look in compared), noise, skipped)


def _run(session: Session, trial: _Trial, noise: Noise) -> Run:
    params = trial.case.sampling
    opinions = [explained(position, noise, params) for position in trial.positions]
    unexplained = tuple(i for i, (fine, _) in enumerate(opinions) if not fine)
    divergence = _divergence(session, trial, noise)
    verdict: Verdict = "identical"
    if trial.first is not None:
        verdict = "BUG" if unexplained or trial.rival is None else "near-tie"
    return Run(
        prompt=trial.prompt,
        case=trial.case.name,
        block_size=trial.block,
        verdict=verdict,
        tokens=len(trial.dflash.ids),
        mean_acceptance_length=trial.dflash.stats.mean_acceptance_length,
        divergence=divergence,
        unexplained=unexplained,
        largest_margin=max((margin for _, margin in opinions if margin is not None), default=0.0),
        notices=trial.dflash.notices,
    )


def _divergence(session: Session, trial: _Trial, noise: Noise) -> Divergence | None:
    if trial.first is None:
        return None
    at = trial.first
    ids = [text[at] if at < len(text) else None for text in (trial.ar.ids, trial.dflash.ids)]
    decode = session.tokenizer.decode if session.tokenizer is not None else None
    texts = [decode([token], skip_special=False) if decode and token is not None else None for token in ids]
    margin: float | None = None
    threshold = noise.tau
    if trial.rival is not None:
        position = trial.positions[at]
        _, margin = explained(position, noise, trial.case.sampling)
        threshold = noise.threshold(position.single.rounding, trial.case.sampling)
    border = margin is None and trial.rival is not None
    return Divergence(at, ids[0], ids[1], texts[0], texts[1], margin, threshold, border)


@torch.inference_mode()
def single_rows(target: ScoringTarget, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
    """Logits [n, V] on the CPU, row i of which chooses token i of ``text``: the plain way, from cold caches."""
    rows = [_prefill(target, prompt).cpu()]
    for token in text[:-1]:
        out = target.verify(torch.tensor([token], device=target.device), False)
        rows.append(target.head(out.hidden).cpu())
        target.commit(1)
    return torch.cat(rows)


@torch.inference_mode()
def block_rows(
    target: ScoringTarget, prompt: Sequence[int], text: Sequence[int], cycles: Sequence[CycleShape]
) -> Iterator[torch.Tensor]:
    """Logits of the same tokens DFlash's way, [k, V] at a time on the device.

    In place of rejected drafts stand the tokens that followed: the rows before them do not see them.
    """
    yield _prefill(target, prompt)
    at = 0  # index of the anchor in ``text``
    for cycle in cycles:
        ids = list(text[at : at + cycle.rows])
        ids += ids[-1:] * (cycle.rows - len(ids))
        out = target.verify(torch.tensor(ids, device=target.device), False)
        yield target.head(out.hidden)[: cycle.emitted]
        target.commit(cycle.emitted)
        at += cycle.emitted


def _prefill(target: ScoringTarget, prompt: Sequence[int]) -> torch.Tensor:
    """Logits [1, V] after the prompt, processed in the runner's chunks."""
    target.clear()
    ids = torch.tensor(list(prompt), device=target.device)
    for chunk in ids.split(target.prefill_chunk):
        out = target.prefill(chunk, False)
    return target.head(out.hidden[-1:])
