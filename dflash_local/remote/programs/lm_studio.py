"""LM Studio: ``/api/v0/models``, https://lmstudio.ai/docs/developer/rest/endpoints. Written after these pages, not run.

An unknown path is answered with status 200 and an error. Its OpenAI dialect has no log-probabilities, and a draft model
is chosen for a model or by ``draft_model`` of a request; nothing says whether one is.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram, whole_of


def _report(get: Get) -> SelfReport | None:
    entries = (get("/api/v0/models") or {}).get("data")
    if not isinstance(entries, list):
        return None
    loaded = [entry for entry in entries if isinstance(entry, dict) and entry.get("state") == "loaded"]
    return SelfReport(context=whole_of(loaded[0].get("loaded_context_length"), 2**31) if len(loaded) == 1 else None)


PROGRAM = ServerProgram(name="lm-studio", title="LM Studio", report=_report, tells_drafts=False)
