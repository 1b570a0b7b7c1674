"""llama.cpp's server: ``/props``, https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md.

Its own dialect names every token. In OpenAI's it names them beside log-probabilities alone, which accepted drafts come
without. Of several tokens that make one character it names the last one, in either. Servers of 2025 took
``speculative.n_max`` of a request; those of 2026 leave it unread, so that it is tried before it is relied on. The
settings of ``/props`` may say that nothing is drafted where ``/slots`` say that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.remote.programs.server_program import (
    Answer,
    Get,
    Launching,
    Post,
    SelfReport,
    ServerProgram,
    text_of,
    whole_of,
)

OFF = {"speculative.n_max": 0}
NONE = ("", "none")
REASONS = {"limit": "length"}  # why a reply ended; all others are stops


def _report(get: Get) -> SelfReport | None:
    props = get("/props")
    settings = (props or {}).get("default_generation_settings")
    if props is None or not isinstance(settings, dict):
        return None
    return SelfReport(
        text_of(props.get("build_info")),
        *_drafting(settings, get("/slots") if props.get("endpoint_slots") is True else None),
        context=whole_of(settings.get("n_ctx"), 2**31),
    )


def _drafting(settings: Mapping[str, Any], slots: Answer) -> tuple[bool | None, str]:
    """Whether it drafts, and its word for how, where it has one."""
    inner = settings.get("params")
    method = text_of(inner.get("speculative.types")) if isinstance(inner, dict) else ""
    if method not in NONE:
        return True, method
    entries = (slots or {}).get("entries")  # one for each request that it answers at a time
    told = [one.get("speculative") if isinstance(one, dict) else None for one in entries or [settings]]
    return (True in told if all(isinstance(one, bool) for one in told) else None), ""


def _proves_off(post: Post) -> bool:
    reply = post("/completion", {"prompt": "a", "n_predict": 1, **OFF}) or {}
    settings = reply.get("generation_settings")
    return isinstance(settings, dict) and settings.get("speculative.n_max") == 0


def _own_request(post: Post, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "tools" in body:
        raise UsageError("llama.cpp names the tokens of replies without tools only", "leave return_token_ids out")
    found = dict(body)
    dropped = ("model", "stream_options", "messages", "chat_template_kwargs", "continue_final_message", "max_tokens")
    taken = {name: found.pop(name, None) for name in (*dropped, "logprobs", "top_logprobs")}
    if taken["messages"] is not None:
        names = ("messages", "chat_template_kwargs")
        found["prompt"] = (post("/apply-template", {name: taken[name] for name in names}) or {}).get("prompt")
        if not isinstance(found["prompt"], str):
            raise UsageError("the server does not apply its chat template: /apply-template has no prompt")
    shown = taken["top_logprobs"] if taken["top_logprobs"] is not None else taken["logprobs"]
    own = {"n_predict": taken["max_tokens"] or -1, "n_probs": shown or 0, "return_tokens": True}
    if body.get("temperature") == 0:
        # What a prompt's cache restores may be rounded otherwise than what is computed: replies would not repeat.
        own["cache_prompt"] = False
    return "/completion", found | own


def _own_event(event: dict[str, Any]) -> dict[str, Any]:
    if "content" not in event or "choices" in event:
        return event
    done = event.get("stop") is True
    choice = {
        "text": event["content"],
        "token_ids": event.get("tokens"),
        "logprobs": {"content": event.get("completion_probabilities") or []},
        "finish_reason": REASONS.get(str(event.get("stop_type")), "stop") if done else None,
    }
    counts = {"prompt_tokens": event.get("tokens_evaluated"), "completion_tokens": event.get("tokens_predicted")}
    return {"choices": [choice], "usage": counts, **({"timings": event.get("timings")} if done else {})}


PROGRAM = ServerProgram(
    name="llama.cpp",
    title="llama.cpp",
    report=_report,
    token_ids=True,
    logprobs=True,
    own_request=_own_request,
    own_event=_own_event,
    off=OFF,
    proves_off=_proves_off,
    renamed={"repetition_penalty": "repeat_penalty"},
    launching=Launching(
        on_path="llama-server",
        wanted="the program llama-server",
        install="build it or take a release of it, then DFLASH_LLAMA_CPP=FILE",
        stages=("loading model", "initializing, n_slots", "model loaded", "listening on"),
        name_option="--alias",
        key_variable="LLAMA_API_KEY",
    ),
)
