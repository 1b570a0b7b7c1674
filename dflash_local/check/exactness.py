"""Are the texts the target's own: a short certificate, plain against drafted ids."""

from __future__ import annotations

from dflash_local.bench.certificate import failure, statement
from dflash_local.bench.certify import Plan, cases, certify
from dflash_local.bench.prompts import a_few
from dflash_local.bench.trial import prompt_ids
from dflash_local.catalog.bundled import Pair
from dflash_local.check.findings import Finding
from dflash_local.check.text import prompts_of
from dflash_local.engine.session import Session

PROMPTS, TOKENS, SEED = 2, 32, 0


def check_exactness(session: Session, pair: Pair) -> Finding:
    """The finding on what drafting changes: nothing, or near-ties outside of strict mode.

    Raises:
        DFlashError: a request failed. UsageError: the target is in another process.
    """
    if session.runner.proposer is None:
        return Finding("exactness", "skipped", "loaded without a drafter: nothing to compare")
    if session.tokenizer is None:
        return Finding("exactness", "skipped", "the target has no tokenizer: dflash certify takes prompts as ids")
    greedy, sampled, _ = cases(SEED)
    plan = Plan(
        prompts=tuple(prompt_ids(session, each, thinking=False) for each in a_few(prompts_of(pair), PROMPTS)),
        cases=(greedy, sampled),
        block_sizes=(session.facts.block_size,),
        max_new_tokens=TOKENS,
    )
    found = certify(session, plan)
    figures = {"verdict": found.verdict, "tokens": found.positions, "same_bits": found.same_bits}
    if found.verdict == "BUG":
        text, remedy = failure(found)
        return Finding("exactness", "failed", text, f"{remedy}: dflash certify MODEL", figures)
    return Finding("exactness", "ok", statement(found, session.facts.dtype), "", figures)
