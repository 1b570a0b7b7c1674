"""TabbyAPI: ``/v1/model``, https://theroyallab.github.io/tabbyAPI. Written after these pages, not run.

Its models are loaded with a draft model or without. It names tokens by their texts alone.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram, text_of, whole_of


def _report(get: Get) -> SelfReport | None:
    found = (get("/v1/model") or {}).get("parameters")
    if not isinstance(found, dict) or "max_seq_len" not in found:
        return None
    draft = found.get("draft")
    drafter = text_of(draft.get("id")) if isinstance(draft, dict) else ""
    return SelfReport(drafts=bool(draft), drafter=drafter, context=whole_of(found["max_seq_len"], 2**31))


PROGRAM = ServerProgram(name="tabbyapi", title="TabbyAPI", report=_report)
