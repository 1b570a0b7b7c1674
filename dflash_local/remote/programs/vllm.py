"""vLLM: ``/version``. Its speculative config is told nowhere: the counters of ``/metrics`` say whether it drafts."""

from __future__ import annotations

from dflash_local.remote.programs.server_program import COUNTED, Get, Launching, SelfReport, ServerProgram, text_of


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
    launching=Launching(
        on_path="vllm",
        wanted="the program vllm",
        install="python3 -m venv ENV, ENV/bin/pip install vllm, then DFLASH_VLLM=ENV/bin/vllm",
        stages=(
            *("non-default args", "Initializing a V1 LLM engine", "Starting to load model", "Loading weights took"),
            *("Model loading took", "KV cache size: ", "Capturing CUDA graphs"),
            *("init engine", "Started server process"),
        ),
        key_variable="VLLM_API_KEY",
    ),
)
