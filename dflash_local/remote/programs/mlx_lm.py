"""mlx-lm's server, https://github.com/ml-explore/mlx-lm/blob/main/mlx_lm/SERVER.md. Written after this page, not run.

It has no path of its own but ``/health``, which others have as well: it is asked last. It names tokens by their ids in
replies that are not streamed, and does not say whether it drafts.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import Get, SelfReport, ServerProgram

FIELDS = {"id", "object", "created"}  # of a model


def _report(get: Get) -> SelfReport | None:
    if get("/health") != {"status": "ok"}:
        return None
    entries = (get("/v1/models") or {}).get("data")
    known = isinstance(entries, list) and all(isinstance(one, dict) and set(one) <= FIELDS for one in entries)
    return SelfReport() if known else None


PROGRAM = ServerProgram(
    name="mlx-lm",
    title="mlx-lm",
    report=_report,
    tells_drafts=False,
    all_tokens={"top_k": 0, "top_p": 1.0, "min_p": 0.0},
)
