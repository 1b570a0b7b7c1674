"""mistral.rs: its OpenAPI document, https://github.com/EricLBuehler/mistral.rs/blob/master/docs/HTTP.md. Not run here.

``/re_isq`` is a path that no other server has. It does not say whether it drafts.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram, text_of


def _report(get: Get) -> SelfReport | None:
    found = get("/api-doc/openapi.json") or {}
    paths, info = found.get("paths"), found.get("info")
    if not isinstance(paths, dict) or "/re_isq" not in paths:
        return None
    return SelfReport(text_of(info.get("version")) if isinstance(info, dict) else "")


PROGRAM = ServerProgram(name="mistral.rs", title="mistral.rs", report=_report, tells_drafts=False)
