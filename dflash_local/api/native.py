"""Our own requests as JSON, for other dflash commands: the fields of ``Request`` as ``asdict`` writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dflash_local.api.fields import Fields, naming, parse, quoted
from dflash_local.api.refusals import FieldError
from dflash_local.api.request_fields import NUMBERS
from dflash_local.events import Mode
from dflash_local.request import (
    MAX_MESSAGES,
    MAX_PROMPT_IDS,
    MAX_TOOLS,
    Limits,
    Message,
    Request,
    Role,
    SamplingParams,
    ToolCall,
    check_json,
    read_arguments,
)

ID = re.compile(r"[A-Za-z0-9]{8,64}")


@dataclass(frozen=True, slots=True)
class Native:
    """A request, the model it is meant for and the name under which it can be cancelled, where given."""

    request: Request
    model: str | None = None
    id: str | None = None


def read(body: bytes) -> Native:
    """A request from its JSON form, with ``Request``'s defaults; FieldError or UsageError for a wrong field."""
    fields = Fields(parse(body))
    model, name = fields.text("model"), fields.text("id")
    if name is not None and not ID.fullmatch(name):
        raise FieldError("id", "id must be 8 to 64 letters and digits")
    tools = fields.items("tools", MAX_TOOLS) or []
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise FieldError(f"tools[{index}]", f"tools[{index}] must be an object, got {quoted(tool)}")
        with naming(f"tools[{index}]"):
            check_json(f"tools[{index}]", tool)
    request = Request(
        messages=tuple(
            _message(Fields(item, f"messages[{index}]"))
            for index, item in enumerate(fields.items("messages", MAX_MESSAGES) or ())
        ),
        prompt_ids=tuple(fields.items("prompt_ids", MAX_PROMPT_IDS) or ()),
        prompt=fields.text("prompt") or "",
        sampling=_sampling(fields.part("sampling")),
        limits=_limits(fields.part("limits")),
        mode=cast(Mode, fields.text("mode") or "dflash"),
        block_size=fields.take("block_size"),
        thinking=bool(fields.flag("thinking")),
        tools=tuple(tools),
        reasoning_effort=fields.take("reasoning_effort"),
        logprobs=fields.take("logprobs"),
        return_token_ids=bool(fields.flag("return_token_ids")),
    )
    fields.finish()
    return Native(request, model, name)


def _message(fields: Fields) -> Message:
    calls = []
    for index, item in enumerate(fields.items("tool_calls") or ()):
        call = Fields(item, f"{fields.name('tool_calls')}[{index}]")
        made = ToolCall(call.needed_text("id"), call.needed_text("name"), call.needed_text("arguments"))
        with naming(call.name("arguments")):
            read_arguments(made)
        calls.append(made)
        call.finish()
    message = Message(
        role=cast(Role, fields.needed_text("role")),
        content=fields.needed_text("content"),
        thinking=fields.text("thinking") or "",
        tool_calls=tuple(calls),
        tool_call_id=fields.text("tool_call_id") or "",
        name=fields.text("name") or "",
    )
    fields.finish()
    return message


def _sampling(fields: Fields) -> SamplingParams:
    given: dict[str, Any] = {name: fields.number(name) for name in NUMBERS}
    given |= {name: fields.take(name) for name in ("top_k", "seed")}
    fields.finish()
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _limits(fields: Fields) -> Limits:
    count, stop = fields.take("max_new_tokens"), fields.items("stop") or []
    fields.finish()
    return Limits(stop=tuple(stop)) if count is None else Limits(count, tuple(stop))
