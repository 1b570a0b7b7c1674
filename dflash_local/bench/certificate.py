"""What a certificate found, and what it says in words: verdict, divergences, strength. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_local.bench.verdict import Noise, Verdict

ORDER: tuple[Verdict, ...] = ("identical", "near-tie", "BUG")


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
    """What was found. ``verdict`` is the worst of all runs and of the plain check.

    Attributes:
        positions: tokens of the drafted replies. same_bits: of these, where all logits of the row computed AR's way
            are, bit for bit, those computed DFlash's way. exact: nothing less was promised.
    """

    runs: tuple[Run, ...]
    noise: Noise
    plain: PlainCheck
    verdict: Verdict
    positions: int = 0
    same_bits: int = 0
    exact: bool = False


def failure(certificate: Certificate) -> tuple[str, str]:
    """Message and hint of the error a BUG verdict ends with."""
    broken = next((run for run in certificate.runs if run.verdict == "BUG"), None)
    hint = "this is an engine bug: please report it with --report FILE attached"
    if broken is None and certificate.exact and not certificate.plain.unexplained:
        other = certificate.positions - certificate.same_bits
        return f"exact mode: {other} of {certificate.positions} rows of logits differ with and without drafting", hint
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
