"""ollama: ``/api/version``, https://docs.ollama.com/openapi.yaml. Written after these pages, not run.

It names tokens by their texts alone, which two tokens may share, and does not say whether it drafts.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram, text_of


def _report(get: Get) -> SelfReport | None:
    version = text_of((get("/api/version") or {}).get("version"))
    return SelfReport(version) if version else None


PROGRAM = ServerProgram(name="ollama", title="ollama", report=_report, tells_drafts=False)
