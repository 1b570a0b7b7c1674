"""Certificates as data and in words: replies with and without drafting, every first difference, the worst verdict.

A loaded pair (``certify``) is judged by its logits; two servers (``certify_servers``) by replies alone. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, get_args

from dflash_local.bench.report import TOY, Found, finite, header, number, table
from dflash_local.catalog.bundled import Pair
from dflash_local.loaded import SessionFacts

if TYPE_CHECKING:
    from dflash_local.bench.certify import CertifyPlan
    from dflash_local.bench.prompts import Prompt
    from dflash_local.bench.verdict import Noise

# The worst last. Of servers, empty: neither reply has a text; wide: by log probabilities; unsteady: one of them does
# not repeat its own reply.
Verdict = Literal["identical", "near-tie", "empty", "unknown", "unsteady", "wide", "BUG"]
ORDER: tuple[Verdict, ...] = get_args(Verdict)
AGAIN = 3  # times that both servers are asked for a differing reply once more
TITLES = ("prompt", "case", "block", "tokens", "per cycle", "verdict")
PLANTED = "drafts are planted (the plain text with mistakes): their acceptance says nothing of the drafter"
PROMISE = (
    "identical: the token ids are the same with and without drafting. fast: every emitted token is the target's "
    "choice on the verify logits; where the text first parts from the plain one the two tokens are a near-tie. strict "
    "(--exact, fused engine): with and without drafting a row's logits are equal in every bit, in any dtype."
)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two replies.

    Attributes:
        index: of the ``unit``, a token or a character. ar_id, dflash_id: None where a text ended or no token is named.
        ar_text, dflash_text: None without a tokenizer.
        margin: of a loaded pair in perturbed scores, the larger of both passes' gaps; of a server in log probabilities.
        over: the margin is larger than this, where it is not known. unknown: why there is neither.
        threshold: the largest margin of a near-tie here. border: a filter's border lies between the two.
        prefix: the end of the text that both have. repeated: of a server, how often the plain one and the drafting one
            wrote the same again up to here when asked ``AGAIN`` times; None where nobody asked.
    """

    index: int
    ar_id: int | None
    dflash_id: int | None
    ar_text: str | None
    dflash_text: str | None
    margin: float | None
    threshold: float
    border: bool = False
    over: float | None = None
    unknown: str = ""
    unit: str = "token"
    prefix: str = ""
    repeated: tuple[int, int] | None = None

    @property
    def steady(self) -> bool:
        """True where both servers repeat themselves, or nobody asked."""
        return self.repeated is None or self.repeated == (AGAIN, AGAIN)

    @property
    def line(self) -> str:
        """Say where, both sides, and how near they were."""
        sides = []
        for token, text in ((self.ar_id, self.ar_text), (self.dflash_id, self.dflash_text)):
            sides.append(" ".join(filter(None, ("" if token is None else str(token), repr(text) if text else ""))))
        ar, dflash = (side or "the end" for side in sides)
        return f"{self.unit} {self.index} is {ar} without, {dflash} with drafting; {self._margin}"

    @property
    def again(self) -> str:
        """Say whether both servers wrote it again; empty where they were not asked."""
        if self.repeated is None:
            return ""
        plain, drafted = self.repeated
        return f"; asked {AGAIN} times again, the same {plain} times without, {drafted} with"

    @property
    def _margin(self) -> str:
        if self.border:
            return "at a filter's border"
        if self.margin is not None:
            return f"margin {self.margin:.3g}"
        return f"margin over {self.over:.3g}" if self.over is not None else f"margin unknown: {self.unknown}"


@dataclass(frozen=True, slots=True)
class Run:
    """One request both ways.

    Attributes:
        prompt: index into the prompts, from 0. tokens: of the drafted reply.
        unexplained: indices of tokens that neither pass's scores account for.
        largest_margin: over all tokens of the drafted reply, in scores, filters' borders left out.
        compared: token ids, or texts of a server that names none.
    """

    prompt: int
    case: str
    block_size: int
    verdict: Verdict
    tokens: int
    mean_acceptance_length: float | None
    divergence: Divergence | None
    unexplained: tuple[int, ...] = ()
    largest_margin: float = 0.0
    notices: tuple[str, ...] = ()
    compared: str = "token ids"


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

    @property
    def line(self) -> str:
        """Say what plain transformers makes of the greedy replies."""
        if not self.positions:
            return f"plain transformers: not checked, {self.skipped}"
        line = f"plain transformers, teacher-forced: {self.positions - self.other_choice} of {self.positions} tokens"
        line += " are its argmax"
        if self.other_choice:
            line += f", the largest margin of the others is {self.max_margin:.3g}"
            line += f", {self.unexplained} beyond the noise" if self.unexplained else ", all within the noise"
        return f"{line}; partly skipped: {self.skipped}" if self.skipped else line


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found of a loaded pair. ``verdict`` is the worst of all runs and of the plain check.

    Attributes:
        positions: tokens of the drafted replies. same_bits: of these, where all logits of the row computed as plain
            are, bit for bit, those computed DFlash's way. exact: nothing less was promised.
    """

    runs: tuple[Run, ...]
    noise: Noise
    plain: PlainCheck
    verdict: Verdict
    positions: int = 0
    same_bits: int = 0
    exact: bool = False


def worst(runs: Sequence[Run]) -> Verdict:
    """Return the worst verdict."""
    return max((run.verdict for run in runs), key=ORDER.index, default="identical")


def failure(certificate: Certificate) -> str:
    """Return the message of the error that a BUG verdict ends with."""
    broken = next((run for run in certificate.runs if run.verdict == "BUG"), None)
    if broken is not None:
        where = f"prompt {broken.prompt + 1}, {broken.case}, block {broken.block_size}"
        index = min((*broken.unexplained, broken.divergence.index if broken.divergence else broken.tokens))
        return f"{where}: token {index} is not the target's choice (margin {broken.largest_margin:.3g})"
    check = certificate.plain
    if certificate.exact and not check.unexplained:
        other = certificate.positions - certificate.same_bits
        return f"exact mode: {other} of {certificate.positions} rows of logits differ with and without drafting"
    return (
        f"{check.unexplained} of {check.positions} greedy tokens are not the choice of plain transformers "
        f"(largest margin {check.max_margin:.3g})"
    )


def statement(certificate: Certificate, dtype: str) -> str:
    """Say which strength holds, in one line."""
    return _outcome(certificate, dtype) + "; no draft was made, so nothing is known of drafting" * _untried(certificate)


def _untried(certificate: Certificate) -> bool:
    return all(run.mean_acceptance_length is None for run in certificate.runs)


def _outcome(certificate: Certificate, dtype: str) -> str:
    runs = certificate.runs
    same = sum(run.verdict == "identical" for run in runs)
    if certificate.verdict == "BUG":
        return f"BUG: {failure(certificate)}"
    if certificate.exact:
        return (
            f"strict ({dtype}): all logits equal in every bit with and without drafting at "
            f"{certificate.same_bits} of {certificate.positions} tokens, the same token ids in {same} of {same} runs"
        )
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


def _strength(certificate: Certificate, dtype: str) -> str | None:
    """Name the promise that holds; none after a bug or without drafts. Equal ids in 16 bits are luck, not a promise."""
    if certificate.verdict == "BUG" or _untried(certificate):
        return None
    if certificate.exact:
        return "strict"
    return "identical" if certificate.verdict == "identical" and dtype == "float32" else "fast"


def presented(
    pair: Pair, facts: SessionFacts, prompts: Sequence[Prompt], plan: CertifyPlan, seed: int, certificate: Certificate
) -> Found:
    """Return the certificate to hand in and its lines; ``prompts`` are those whose ids stand in the plan."""
    looks, noise = certificate.positions, certificate.noise
    report = finite(
        {
            **header("dflash certify", pair, facts),
            "verdict": certificate.verdict,
            "statement": statement(certificate, facts.dtype),
            "strength": _strength(certificate, facts.dtype),
            "promise": PROMISE,
            "failure": failure(certificate) if certificate.verdict == "BUG" else None,
            "seed": seed,
            "drafts": "planted" if plan.planted else "drafter",
            "block_sizes": list(plan.block_sizes),
            "max_new_tokens": plan.max_new_tokens,
            "cases": [{"name": case.name, **asdict(case.sampling)} for case in plan.cases],
            "prompts": [{"kind": one.kind, "ids": list(ids)} for one, ids in zip(prompts, plan.prompts, strict=True)],
            "strict": {"promised": certificate.exact, "positions": looks, "same_bits": certificate.same_bits},
            "noise": {**asdict(noise), "enough_positions": noise.enough},
            "runs": [asdict(run) for run in certificate.runs],
            "plain_transformers": asdict(certificate.plain),
        }
    )
    other = "compared with itself, not with the plain weights (dflash bench --fidelity)"
    rounded = [f"target: {facts.weights}; {other}"] if facts.load.quantize is not None else []
    lines = [
        f"{pair.label}: {facts.computed_as}, seed {seed}",
        *rounded,
        "",
        *runs_table(certificate.runs),
        "",
        *([PLANTED] if plan.planted else []),
        noise.line,
        certificate.plain.line,
        *(f"notice: {notice}" for notice in sorted({n for run in certificate.runs for n in run.notices})),
        f"verdict: {statement(certificate, facts.dtype)}",
    ]
    return report, [*lines, f"({TOY})"] if pair.toy else lines


def runs_table(runs: Sequence[Run]) -> list[str]:
    """Align a line for each run."""
    rows = [
        (
            str(run.prompt + 1),
            run.case,
            str(run.block_size or "-"),
            str(run.tokens),
            number(run.mean_acceptance_length, 2),
            run.verdict if run.divergence is None else f"{run.verdict}: {run.divergence.line}{run.divergence.again}",
        )
        for run in runs
    ]
    return table(TITLES, rows)
