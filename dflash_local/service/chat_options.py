"""What a user of a chat changed from the model's own defaults, and how ``name value`` changes it further."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.request import Limits, SamplingParams
from dflash_local.settings import FullContext

MAX_NEW_TOKENS = 1024
SAMPLING = tuple(item.name for item in fields(SamplingParams))
SETTABLE = (*SAMPLING, "max_new_tokens", "stop", "block_size", "thinking", "full_context")


@dataclass(slots=True)
class ChatOptions:
    """What the user changed; all else is the model's own default.

    ``sampling`` holds only the fields that were set, so that they outlive a change of model.
    """

    sampling: dict[str, float | int] = field(default_factory=dict)
    limits: Limits = field(default_factory=lambda: Limits(MAX_NEW_TOKENS))
    mode: Mode = "dflash"
    block_size: int | None = None
    thinking: bool = False
    system: str = ""
    full_context: FullContext = "drop"


def merged(defaults: SamplingParams, changed: Mapping[str, float | int]) -> SamplingParams:
    """The defaults with what was changed in their place; UsageError where a value is out of range."""
    return replace(defaults, **changed)  # type: ignore[arg-type]  # SamplingParams checks its fields


def parse_setting(options: ChatOptions, name: str, value: str) -> Mapping[str, Any]:
    """What ``/set name value`` changes: fields of ``ChatOptions``; UsageError where the value is not allowed."""
    if name == "thinking":
        return {"thinking": _switch(value)}
    if name == "full_context":
        if value not in (allowed := get_args(FullContext)):
            raise UsageError(f"full_context must be one of {', '.join(allowed)}, got {value!r}")
        return {"full_context": value}
    if name == "max_new_tokens":
        return {"limits": replace(options.limits, max_new_tokens=_number(name, value, int))}
    if name == "stop":
        return {"limits": replace(options.limits, stop=() if value == "off" else (*options.limits.stop, value))}
    if name == "block_size":
        return {"block_size": None if value == "auto" else _number(name, value, int)}
    if name == "seed" and value == "random":
        return {"sampling": {key: old for key, old in options.sampling.items() if key != "seed"}}
    kind = int if name in ("seed", "top_k") else float
    changed = {**options.sampling, name: _number(name, value, kind)}
    merged(SamplingParams(), changed)  # refuses what is out of range
    return {"sampling": changed}


def _number(name: str, value: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, got {value!r}") from error


def _switch(value: str) -> bool:
    words = {"on": True, "true": True, "off": False, "false": False}
    if value.lower() not in words:
        raise UsageError(f"thinking must be on or off, got {value!r}")
    return words[value.lower()]
