"""Another ``dflash serve``: ``/dflash/v1/status``. A request names its own mode."""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram, text_of, whole_of
from dflash_local.remote.server_metrics import MAX_POSITIONS


def _report(get: Get) -> SelfReport | None:
    status = get("/dflash/v1/status")
    if status is None or not isinstance(status.get("model"), str) or not isinstance(status.get("state"), str):
        return None
    facts = status.get("facts")
    facts = facts if isinstance(facts, dict) else {}  # before the first load
    drafts = status.get("mode") != "ar" and bool(facts.get("drafter") or not facts)
    block = whole_of(facts.get("block_size"), MAX_POSITIONS) if drafts else None
    return SelfReport(text_of(status.get("version")), drafts, block_size=block)


PROGRAM = ServerProgram(
    name="dflash",
    title="dflash",
    report=_report,
    token_ids=True,
    logprobs=True,
    logprob_fields={"return_tokens_as_token_ids": True},
    fields={"return_token_ids": True},
    off={"mode": "ar"},
    all_tokens={"top_k": 0, "top_p": 1.0, "min_p": 0.0},
)
