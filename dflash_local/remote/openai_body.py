"""A ``Request`` as the body of an OpenAI-compatible request to a server of another program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_local.errors import UsageError
from dflash_local.remote.programs import PROGRAMS
from dflash_local.remote.server_checks import ServerFacts
from dflash_local.request import Constraint, Message, Request

MAX_SEED = 2**63 - 1  # both programs take a signed integer
LOGPROBS = " or ".join(program.title for program in PROGRAMS.values() if program.logprobs)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def body_of(request: Request, facts: ServerFacts, seed: int, all_tokens: bool = False) -> tuple[str, dict[str, Any]]:
    """The path and body of a streamed request.

    What is off in a ``SamplingParams`` is left out of the body, so that the server's own default holds.

    Args:
        all_tokens: the server's own defaults must leave no token out: only what the request itself says does.

    Raises:
        UsageError: the server cannot do what is asked, or decides it itself.
    """
    _check(request, facts, seed)
    limit = request.limits.max_new_tokens
    body: dict[str, Any] = {
        "model": facts.served,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": None if facts.context and limit >= facts.context else limit,
        "seed": seed,
        **(facts.server.all_tokens if all_tokens else {}),
        **_sampling(request, facts.server.renamed),
        **facts.server.fields,
    }
    if request.limits.stop:
        body["stop"] = list(request.limits.stop)
    if request.mode == "ar" and facts.drafts is not False:
        body |= facts.server.off
    logprobs = request.logprobs
    if logprobs is not None:
        body |= facts.server.logprob_fields
    if request.constraint is not None:
        body["structured_outputs"] = _structured_outputs(request.constraint)
    if not request.messages:
        body |= {} if logprobs is None else {"logprobs": logprobs}
        return COMPLETIONS, body | {"prompt": list(request.prompt_ids) or request.prompt}
    if logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": logprobs}
    body["messages"] = [_message(message) for message in request.messages]
    body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    if request.continues:
        body["continue_final_message"] = True
        body |= facts.server.continues
    if request.reasoning_effort is not None:
        body["reasoning_effort"] = request.reasoning_effort
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if request.must_call:
        one = {"type": "function", "function": {"name": request.must_call[0]}}
        body["tool_choice"] = "required" if len(request.must_call) > 1 else one
    return CHAT, body


def uncounted() -> UsageError:
    """Return the error for a prompt whose tokens are to be counted alone."""
    return UsageError(
        "tokens cannot be counted: a server applies the chat template", "replies tell the prompt's tokens"
    )


def _check(request: Request, facts: ServerFacts, seed: int) -> None:
    server = facts.server
    drafts = facts.drafts or facts.drafts is None and server.tells_drafts  # of one that never tells, the user knows it
    if request.mode == "ar" and drafts and not facts.switches:
        raise UsageError(
            f"{facts.title} drafts for every request, as it was started: no request can switch that off",
            "a second server without --speculative-config writes plain ones: --plain-url of race, certify and web",
        )
    if request.block_size is not None and request.block_size != facts.block_size:
        raise UsageError(f"{facts.title} drafts as it was started: no request can set the block size")
    if request.logprobs is not None and not (server.logprobs and (facts.drafts is False or request.mode == "ar")):
        raise UsageError(f"log-probabilities come without drafts only, from {LOGPROBS}")
    if request.return_token_ids and not server.token_ids:
        raise UsageError(f"{facts.title} names no tokens: return_token_ids cannot be had")
    if request.constraint is not None and not server.constrains:
        raise UsageError(f"replies of {facts.title} cannot be constrained from here", "leave out the format or grammar")
    if request.continues and not request.messages[-1].content:
        raise UsageError("a reply that was cut off while the model thought cannot go on at a server", "make it again")
    if seed > MAX_SEED:
        raise UsageError(f"seed {seed} is above {MAX_SEED}, the largest that servers take")


def _sampling(request: Request, renamed: Mapping[str, str]) -> dict[str, Any]:
    given = request.sampling
    if given.greedy:
        found: dict[str, Any] = {"temperature": 0.0}
    elif given.top_p == 0:  # the best token alone; servers refuse the number
        found = {"temperature": given.temperature, "top_k": 1}
    else:
        found = {"temperature": given.temperature, "top_p": given.top_p, "top_k": given.top_k, "min_p": given.min_p}
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    found |= {name: getattr(given, name) for name in penalties}
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, **dict.fromkeys(penalties[1:], 0.0)}
    return {renamed.get(name, name): value for name, value in found.items() if name not in off or value != off[name]}


def _structured_outputs(given: Constraint) -> dict[str, Any]:
    """Return vLLM's field, https://docs.vllm.ai/en/latest/features/structured_outputs.html."""
    if given.kind == "json_object":
        return {"json_object": True}
    return {{"json_schema": "json", "lark": "grammar"}.get(given.kind, given.kind): given.text}


def _message(message: Message) -> Mapping[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.name:
        found["name"] = message.name
    return found
