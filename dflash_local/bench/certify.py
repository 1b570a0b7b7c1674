"""The exactness certificate: the same requests with and without drafting, every difference explained.

Two claims, never blurred: identical token ids, or *fast*, every token the target's choice on the
verify logits and every divergence from AR a near-tie (ARCHITECTURE 3, RELIABILITY L4). Knows sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dflash_local.bench import plain, replay
from dflash_local.bench.trial import Written, write
from dflash_local.bench.verdict import Noise, Position, Verdict, agrees, explained, judge, measure
from dflash_local.engine.reference import Proposer
from dflash_local.engine.sampling import Sampler
from dflash_local.engine.session import Session
from dflash_local.models.fused.target import FusedTarget
from dflash_local.request import Limits, Request, SamplingParams

Plant = Callable[[tuple[int, ...], tuple[int, ...]], Proposer]
Progress = Callable[[str, float], None]
ORDER: tuple[Verdict, ...] = ("identical", "near-tie", "BUG")


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
class Plan:
    """What is run: prompts as ids, cases, block sizes (each at most the trained one), tokens per reply."""

    prompts: tuple[tuple[int, ...], ...]
    cases: tuple[Case, ...]
    block_sizes: tuple[int, ...]
    max_new_tokens: int = 128


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs. Ids are None where a text ended; texts are None without a tokenizer.

    ``margin`` is in perturbed scores, the larger of both passes' gaps; None at a filter's border.
    """

    index: int
    ar_id: int | None
    dflash_id: int | None
    ar_text: str | None
    dflash_text: str | None
    margin: float | None
    threshold: float
    border: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One request both ways.

    Attributes:
        prompt: index into the plan's prompts, from 0. tokens: of the drafted reply.
        unexplained: indices of tokens that neither pass's scores account for.
        largest_margin: over all tokens of the drafted reply, in scores, filters' borders left out.
    """

    prompt: int
    case: str
    block_size: int
    verdict: Verdict
    tokens: int
    mean_acceptance_length: float | None
    divergence: Divergence | None
    unexplained: tuple[int, ...]
    largest_margin: float
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlainCheck:
    """The greedy replies scored by plain transformers, teacher-forced.

    Attributes:
        positions: tokens scored. other_choice: where its argmax is another token.
        unexplained: of these, beyond the threshold. noise: between its logits and ours.
        skipped: why nothing was checked, empty otherwise.
    """

    positions: int
    other_choice: int
    unexplained: int
    max_margin: float
    noise: Noise | None
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found. ``verdict`` is the worst of all runs and of the plain check."""

    runs: tuple[Run, ...]
    noise: Noise
    plain: PlainCheck
    verdict: Verdict


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
        """Where the texts differ and what AR wrote there, if both wrote something."""
        inside = self.first is not None and self.first < min(len(self.ar.ids), len(self.dflash.ids))
        return (self.first, self.ar.ids[self.first]) if inside and self.first is not None else None


def certify(
    session: Session, plan: Plan, progress: Progress = lambda _text, _fraction: None, plant: Plant | None = None
) -> Certificate:
    """Run the plan and explain every difference.

    Args:
        progress: told what is being done and how far it is (0..1).
        plant: gives the proposer to run instead of the session's, from the prompt and AR's reply.

    Raises:
        DFlashError: a request failed; a bug found is a verdict, not an error.
    """
    trials: list[_Trial] = []
    total = len(plan.prompts) * len(plan.cases) * len(plan.block_sizes)
    skipped = ""
    for number, prompt in enumerate(plan.prompts):
        for case in plan.cases:
            ar = write(session, _request(prompt, case, plan.max_new_tokens, "ar", None))
            for block in plan.block_sizes:
                progress(f"certifying, run {len(trials) + 1} of {total}", len(trials) / total)
                dflash = _drafted(session, prompt, case, plan.max_new_tokens, block, ar, plant)
                trial = _Trial(number, case, block, ar, dflash, _first_difference(ar.ids, dflash.ids), [])
                skipped = _examine(session, prompt, trial) or skipped
                trials.append(trial)
    dtype = session.runner.target.dtype
    noise = measure([p.single.noise for t in trials for p in t.positions if p.agreed], dtype)
    checked = _plain_check(trials, dtype, skipped)
    runs = tuple(_run(session, trial, noise) for trial in trials)
    verdicts: list[Verdict] = [run.verdict for run in runs]
    if checked.unexplained:
        verdicts.append("BUG")
    return Certificate(runs, noise, checked, max(verdicts, key=ORDER.index))


def _request(prompt: tuple[int, ...], case: Case, tokens: int, mode: str, block: int | None) -> Request:
    return Request(
        prompt_ids=prompt,
        sampling=case.sampling,
        limits=Limits(tokens),
        mode="ar" if mode == "ar" else "dflash",
        block_size=block,
    )


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


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    if tuple(one) == tuple(other):
        return None
    shortest = min(len(one), len(other))
    return next((i for i in range(shortest) if one[i] != other[i]), shortest)


def _examine(session: Session, prompt: tuple[int, ...], trial: _Trial) -> str:
    """Score the drafted reply both ways (greedy ones by plain transformers too); why the last was left out."""
    target, text, params = session.runner.target, trial.dflash.ids, trial.case.sampling
    whole: torch.Tensor | None = None
    skipped = ""
    if not text:
        return skipped
    try:
        single = replay.single_rows(target, prompt, text)
        if isinstance(target, FusedTarget):
            skipped = "the fused engine holds no transformers model; --engine reference checks against it"
        elif params.greedy:
            try:
                whole = plain.plain_rows(target.model, prompt, text)
            except torch.cuda.OutOfMemoryError:
                skipped = f"no memory for one forward over {len(prompt) + len(text)} tokens"
        seed = trial.dflash.stats.seed
        sampler = Sampler(params, seed, target.vocab_size, torch.tensor(prompt, device=target.device))
        rows = replay.block_rows(target, prompt, text, trial.dflash.cycles)
        trial.positions = judge(sampler, len(prompt), text, single, rows, whole, trial.rival)
    finally:
        session.reset()
    return skipped


def _plain_check(trials: Sequence[_Trial], dtype: torch.dtype, skipped: str) -> PlainCheck:
    """Plain transformers runs other kernels over the whole text at once, so its noise is measured apart."""
    asked = [(trial, p.plain) for trial in trials for p in trial.positions if p.plain is not None]
    if not asked:
        return PlainCheck(0, 0, 0, 0.0, None, skipped or "no greedy reply")
    noise = measure([look.noise for _, look in asked if look.short == 0], dtype)
    other = [(trial, look) for trial, look in asked if look.short > 0]
    beyond = sum(not agrees(look, noise, trial.case.sampling) for trial, look in other)
    return PlainCheck(len(asked), len(other), beyond, max(look.short for _, look in asked), noise, skipped)


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
    texts = [_text(session, token) for token in ids]
    margin: float | None = None
    threshold = noise.tau
    if trial.rival is not None:
        position = trial.positions[at]
        _, margin = explained(position, noise, trial.case.sampling)
        threshold = noise.threshold(position.single.rounding, trial.case.sampling)
    border = margin is None and trial.rival is not None
    return Divergence(at, ids[0], ids[1], texts[0], texts[1], margin, threshold, border)


def _text(session: Session, token: int | None) -> str | None:
    if token is None or session.tokenizer is None:
        return None
    return session.tokenizer.decode([token], skip_special=False)


def failure(certificate: Certificate) -> tuple[str, str]:
    """Message and hint of the error a BUG verdict ends with."""
    broken = next((run for run in certificate.runs if run.verdict == "BUG"), None)
    hint = "this is an engine bug: please report it with --report FILE attached"
    if broken is None:
        check = certificate.plain
        return (
            f"{check.unexplained} of {check.positions} greedy tokens are not the choice of plain transformers "
            f"(largest margin {check.max_margin:.3g})",
            hint,
        )
    where = f"prompt {broken.prompt + 1}, {broken.case}, block {broken.block_size}"
    index = min((*broken.unexplained, broken.divergence.index if broken.divergence else broken.tokens))
    return f"{where}: token {index} is not the target's choice (margin {broken.largest_margin:.3g})", hint


def statement(certificate: Certificate, dtype: str) -> str:
    """The strength that holds, in one line."""
    runs = certificate.runs
    same = sum(run.verdict == "identical" for run in runs)
    if certificate.verdict == "BUG":
        return f"BUG: {failure(certificate)[0]}"
    if same == len(runs) and dtype == "float32":
        return f"identical (float32): the same token ids with and without drafting in {same} of {same} runs"
    fast = f"fast mode ({dtype}): every token is the target's choice on the verify logits"
    beyond = sum(len(run.unexplained) for run in runs)  # of identical runs: any other such run is a bug
    fast += f" ({beyond} beyond the noise when replayed)" if beyond else ""
    if same == len(runs):
        return f"{fast}; the token ids are the same with and without drafting in {same} of {same} runs"
    parted = [run.divergence for run in runs if run.divergence]
    margins = [divergence.margin for divergence in parted if divergence.margin is not None]
    borders = sum(divergence.border for divergence in parted)
    details = [f"largest margin {max(margins):.3g}"] if margins else []
    details += [f"{borders} at a filter's border"] if borders else []
    return (
        f"{fast}; {same} of {len(runs)} runs identical, the others part at a near-tie "
        f"({', '.join(details)}; noise {certificate.noise.tau:.3g})"
    )
