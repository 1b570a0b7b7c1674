"""Reports as JSON-able dicts and as lines of text. Says *toy* wherever a toy was measured."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, TypeVar

from dflash_local import tables
from dflash_local.bench import provenance
from dflash_local.bench.certificate import Certificate, Divergence, Run, failure, statement
from dflash_local.bench.certify import Plan
from dflash_local.bench.prompts import Prompt
from dflash_local.bench.verdict import ENOUGH_POSITIONS
from dflash_local.catalog.bundled import Pair
from dflash_local.loaded import SessionFacts

SCHEMA = 1
TITLES = ("prompt", "case", "block", "tokens", "per cycle", "verdict")
TOTAL = "total"
Item = TypeVar("Item")
Figures = TypeVar("Figures")
_NUMBER = re.compile(r"-|-?\d+(\.\d*)?(e[+-]\d+)?[x%]?")
TOY = "toy pair: test material, never a speed claim"
PLANTED = "drafts are planted (AR's own text with mistakes): their acceptance says nothing of the drafter"
PROMISE = (
    "identical: the token ids are the same with and without drafting. fast: every emitted token is the target's "
    "choice on the verify logits; where the text first parts from AR the two tokens are a near-tie. strict "
    "(--exact, fused engine): with and without drafting a row's logits are equal in every bit, in any dtype."
)


def header(kind: str, pair: Pair, facts: SessionFacts) -> dict[str, Any]:
    """What every report begins with."""
    return {
        "report": kind,
        "schema": SCHEMA,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "pair": pair.name if pair.bundled else provenance.checkpoint_identity(pair.target).name,
        "note": TOY if pair.toy else None,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "target": asdict(provenance.checkpoint_identity(pair.target)),
        "drafter": asdict(provenance.checkpoint_identity(pair.drafter)) if pair.drafter else None,
        "engine": facts.engine,
        "dtype": facts.dtype,
        "weights": facts.weights,
        "device": facts.device,
        "load": asdict(facts.load),
        "notices": list(facts.notices),
    }


def certificate_report(
    pair: Pair, facts: SessionFacts, prompts: Sequence[Prompt], plan: Plan, seed: int, certificate: Certificate
) -> dict[str, Any]:
    """The certificate to hand in; ``prompts`` are those whose ids stand in the plan."""
    looks, ids_of = certificate.positions, zip(prompts, plan.prompts, strict=True)
    return finite(
        {
            **header("dflash certify", pair, facts),
            "verdict": certificate.verdict,
            "statement": statement(certificate, facts.dtype),
            "strength": _strength(certificate, facts),
            "promise": PROMISE,
            "failure": failure(certificate)[0] if certificate.verdict == "BUG" else None,
            "seed": seed,
            "drafts": "planted" if plan.planted else "drafter",
            "block_sizes": list(plan.block_sizes),
            "max_new_tokens": plan.max_new_tokens,
            "cases": [{"name": case.name, **asdict(case.sampling)} for case in plan.cases],
            "prompts": [{"kind": prompt.kind, "ids": list(ids)} for prompt, ids in ids_of],
            "strict": {"promised": certificate.exact, "positions": looks, "same_bits": certificate.same_bits},
            "noise": {**asdict(certificate.noise), "enough_positions": certificate.noise.enough},
            "runs": [asdict(run) for run in certificate.runs],
            "plain_transformers": asdict(certificate.plain),
        }
    )


def _strength(certificate: Certificate, facts: SessionFacts) -> str | None:
    """Which of the promises holds; none after a bug. Equal ids in 16 bits are luck, not a promise."""
    if certificate.verdict == "BUG":
        return None
    if certificate.exact:
        return "strict"
    return "identical" if certificate.verdict == "identical" and facts.dtype == "float32" else "fast"


def certificate_lines(pair: Pair, facts: SessionFacts, plan: Plan, seed: int, certificate: Certificate) -> list[str]:
    """The certificate as a short table and what it means."""
    other = "compared with itself, not with the plain weights (dflash bench --fidelity)"
    rounded = [f"target: {facts.weights}; {other}"] if facts.load.quantize is not None else []
    lines = [
        f"{pair.label}: {facts.engine} engine, {facts.formats} on {facts.device}, seed {seed}",
        *rounded,
        "",
        *table(TITLES, [_cells(run) for run in certificate.runs]),
        "",
        *([PLANTED] if plan.planted else []),
        noise_line(certificate),
        plain_line(certificate),
    ]
    lines += [f"notice: {notice}" for notice in sorted({n for run in certificate.runs for n in run.notices})]
    lines += [f"verdict: {statement(certificate, facts.dtype)}"]
    return [*lines, f"({TOY})"] if pair.toy else lines


def noise_line(certificate: Certificate) -> str:
    """How the threshold came about."""
    noise = certificate.noise
    few = "" if noise.enough else f", fewer than {ENOUGH_POSITIONS:,}"
    capped = f", over the cap: {noise.cap:g} holds" if noise.measured > noise.cap else ""
    return (
        f"noise of one row against a block: {noise.measured:.3g} "
        f"(99.9th percentile over {noise.positions:,} positions{few}{capped})"
    )


def plain_line(certificate: Certificate) -> str:
    """What plain transformers says of the greedy replies."""
    check = certificate.plain
    if not check.positions:
        return f"plain transformers: not checked, {check.skipped}"
    line = f"plain transformers, teacher-forced: {check.positions - check.other_choice} of {check.positions} tokens"
    line += " are its argmax"
    if check.other_choice:
        line += f", the largest margin of the others is {check.max_margin:.3g}"
        line += f", {check.unexplained} beyond the noise" if check.unexplained else ", all within the noise"
    return f"{line}; partly skipped: {check.skipped}" if check.skipped else line


def _cells(run: Run) -> tuple[str, ...]:
    verdict = run.verdict if run.divergence is None else f"{run.verdict}: {_divergence(run.divergence)}"
    length = number(run.mean_acceptance_length, 2)
    return (str(run.prompt + 1), run.case, str(run.block_size), str(run.tokens), length, verdict)


def _divergence(divergence: Divergence) -> str:
    sides = []
    for token, text in ((divergence.ar_id, divergence.ar_text), (divergence.dflash_id, divergence.dflash_text)):
        shown = "the end" if token is None else str(token)
        sides.append(f"{shown} {text!r}" if text is not None else shown)
    margin = "at a filter's border" if divergence.border else f"margin {number(divergence.margin, 4)}"
    return f"token {divergence.index} is {sides[0]} without, {sides[1]} with drafting; {margin}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns of any width; numbers to the right."""
    columns = [tables.Column(title, all(_NUMBER.fullmatch(row[i]) for row in rows)) for i, title in enumerate(titles)]
    return tables.table(columns, rows, sys.maxsize)


def by_kind(
    items: Sequence[Item], kind_of: Callable[[Item], str], row: Callable[[str, Sequence[Item]], Figures]
) -> list[Figures]:
    """A row of the items of each kind in order of appearance, and one of all when there are several kinds."""
    kinds = list(dict.fromkeys(map(kind_of, items)))
    rows = [row(kind, [one for one in items if kind_of(one) == kind]) for kind in kinds]
    return [*rows, row(TOTAL, items)] if len(kinds) > 1 else rows


def number(value: float | None, digits: int) -> str:
    """The value with so many decimals, a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def finite(value: Any) -> Any:
    """The value with infinities and NaN as null, which is all that JSON has for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
