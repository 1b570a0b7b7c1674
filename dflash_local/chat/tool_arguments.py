"""Arguments of tool calls by the schemas that the tools came with. Knows JSON schemas as far as types go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

MAX_NESTING = 4  # alternatives within alternatives that a schema is read for
# a JSON schema's type -> ours; bool is not an int here
KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


# Strict: NaN and numbers that overflow are no JSON, and could not be written back as any.
DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def unwrapped(text: str) -> str:
    """The value without the one line break on either side that the format puts there."""
    return text.removeprefix("\n").removesuffix("\n")


def properties_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters by name; none where it has no such schema."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def typed(text: str, schema: object) -> Any:
    """The value that a parameter's text means by its schema; the text itself where it means none."""
    types = set(_types(schema))
    if not types or types == {"string"}:
        return text
    word = text.strip()
    try:
        value = DECODER.decode({"True": "true", "False": "false", "None": "null"}.get(word, word))
    except (ValueError, RecursionError):
        return text
    return value if any(type(value) in KINDS.get(kind, ()) for kind in types) else text


def _types(schema: object, depth: int = 0) -> Iterator[str]:
    """Type names that a schema allows, also those of its alternatives."""
    if not isinstance(schema, Mapping) or depth > MAX_NESTING:
        return
    kind = schema.get("type")
    yield from (one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str))
    for key in ("anyOf", "oneOf"):
        alternatives = schema.get(key)
        for alternative in alternatives if isinstance(alternatives, list) else ():
            yield from _types(alternative, depth + 1)


def fits(arguments: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    """True when a tool takes these arguments: all that it needs and none that it does not know."""
    parameters = function.get("parameters")
    needed = parameters.get("required") if isinstance(parameters, Mapping) else None
    known = properties_of(function)
    needs = {name for name in (needed if isinstance(needed, list) else ()) if isinstance(name, str)}
    return needs <= set(arguments) <= set(known)
