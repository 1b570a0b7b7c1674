"""SGLang: ``/server_info``, which was ``/get_server_info`` (sgl-project/sglang PR 21463).

It holds the start options of the server, and among them its keys, so that only named ones are read.
"""

from __future__ import annotations

from dflash_local.remote.programs.server_program import (
    COUNTED,
    Get,
    Launching,
    SelfReport,
    ServerProgram,
    text_of,
    whole_of,
)
from dflash_local.remote.server_metrics import MAX_POSITIONS


def _report(get: Get) -> SelfReport | None:
    for path in ("/server_info", "/get_server_info"):
        info = get(path)
        if info is None or not {"model_path", "internal_states"} & set(info):
            continue
        method = text_of(info.get("speculative_algorithm"))
        return SelfReport(
            text_of(info.get("version")),
            bool(method),
            method,
            text_of(info.get("speculative_draft_model_path")),
            whole_of(info.get("speculative_num_draft_tokens"), MAX_POSITIONS) if method else None,
        )
    return None


PROGRAM = ServerProgram(
    name="sglang",
    title="SGLang",
    report=_report,
    # It streams no token ids (noonghunna/club-3090 PR 1257), and reports its drafts instead.
    fields={"return_spec_tokens_details": True, **COUNTED},
    launching=Launching(
        on_path="sglang",
        wanted="the Python that has SGLang",
        install="python3 -m venv ENV, ENV/bin/pip install sglang, then DFLASH_SGLANG=ENV/bin/python",
        stages=(
            *("server_args=", "Load weight begin", "Load weight end", "KV Cache is allocated"),
            *("Capture cuda graph begin", "Capture cuda graph end", "Uvicorn running on"),
        ),
        beside="python",
    ),
)
