"""vLLM: ``/version``. Its speculative config is told nowhere: the counters of ``/metrics`` say whether it drafts."""

from __future__ import annotations

from dflash_local.remote.programs.server_program import COUNTED, Get, SelfReport, ServerProgram, text_of


def _report(get: Get) -> SelfReport | None:
    version = text_of((get("/version") or {}).get("version"))
    return SelfReport(version) if version else None


PROGRAM = ServerProgram(
    name="vllm",
    title="vLLM",
    report=_report,
    token_ids=True,
    logprobs=True,
    fields={"return_token_ids": True, **COUNTED},
    logprob_fields={"return_tokens_as_token_ids": True},
    constrains=True,
    continues={"add_generation_prompt": False},  # it refuses both together, and the other is its default
)
