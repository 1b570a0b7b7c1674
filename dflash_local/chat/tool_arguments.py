"""Arguments of tool calls by the schemas that the tools came with. Knows JSON schemas as far as types go."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

MAX_NESTING = 32  # alternatives within alternatives that a schema is read for
# A JSON schema's type -> ours; a bool is not an int here.
KINDS: dict[str, frozenset[type]] = {
    "string": frozenset((str,)),
    "integer": frozenset((int,)),
    "number": frozenset((int, float)),
    "boolean": frozenset((bool,)),
    "null": frozenset((type(None),)),
    "object": frozenset((dict,)),
    "array": frozenset((list,)),
}
ANY = frozenset[type]().union(*KINDS.values())


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


# NaN and numbers that overflow are no JSON, and could not be written back as any. Line breaks in strings can.
DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, strict=False)


def unwrapped(text: str) -> str:
    """Return the value without the one line break on either side that the format puts there."""
    return text.removeprefix("\n").removesuffix("\n")


class ArgumentTypes:
    """What a function's parameters may be, by its schema.

    Every part of the schema is read once, so cycles and references that multiply cost no more than its size.
    """

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._root = function.get("parameters")
        self._known: dict[int, frozenset[type]] = {}  # of the parts that were read, by their id
        self.properties: dict[str, Any] = {}
        self.required: set[str] = set()
        for part in self._together(self._root):
            properties, required = part.get("properties"), part.get("required")
            self.properties |= properties if isinstance(properties, Mapping) else {}
            self.required |= {name for name in _items(required) if isinstance(name, str)}

    def fit(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether these are all arguments that the function needs and none that it does not know."""
        return self.required <= set(arguments) <= set(self.properties)

    def whole(self, name: str) -> dict[str, Any]:
        """Return all that a parameter's schema says of the value itself, in one."""
        return {key: value for part in self._together(self.properties.get(name)) for key, value in part.items()}

    def may_be_text(self, name: str) -> bool:
        """Return whether a parameter's text can be its value as it is, see ``typed``."""
        return str in self._kinds(self.properties.get(name))

    def typed(self, name: str, text: str) -> Any:
        """Return the value that a parameter's text means; the text itself where its schema allows no such value."""
        kinds = self._kinds(self.properties.get(name))
        if kinds in (ANY, KINDS["string"]):
            return text
        word = text.strip()
        try:
            value = DECODER.decode({"True": "true", "False": "false", "None": "null"}.get(word, word))
        except (ValueError, RecursionError):
            return text
        if isinstance(value, float) and float not in kinds and value.is_integer():
            value = int(value)
        return value if type(value) in kinds else text

    def fitted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments whose texts, where none is allowed, have the types that are: models write ``"5"`` for 5."""
        return {
            name: self.typed(name, value) if isinstance(value, str) and not self.may_be_text(name) else value
            for name, value in arguments.items()
        }

    def _kinds(self, schema: object, depth: int = 0) -> frozenset[type]:
        """Return the types of the values that a schema allows."""
        if not isinstance(schema, Mapping) or depth > MAX_NESTING:
            return ANY
        if id(schema) not in self._known:
            self._known[id(schema)] = frozenset()  # a schema within itself allows nothing more
            kinds = ANY
            for part in self._together(schema):
                kinds &= _own_kinds(part)
                for key in ("anyOf", "oneOf"):
                    if alternatives := _items(part.get(key)):
                        kinds &= frozenset().union(*(self._kinds(one, depth + 1) for one in alternatives))
            self._known[id(schema)] = kinds
        return self._known[id(schema)]

    def _together(self, schema: object) -> Iterable[Mapping[str, Any]]:
        """Return the schema and all that hold with it: those of its ``$ref`` and of its ``allOf``."""
        found: dict[int, Mapping[str, Any]] = {}
        left = [schema]
        while left:
            part = left.pop()
            if isinstance(part, Mapping) and id(part) not in found:
                found[id(part)] = part
                left += [self._target(part.get("$ref")), *_items(part.get("allOf"))]
        return found.values()

    def _target(self, reference: object) -> object:
        """Return what a JSON pointer into the function's own schema means; None where it leads nowhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place: object = self._root
        for key in unquote(reference[1:]).split("/")[1:]:
            place = place.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        return place


def _own_kinds(schema: Mapping[str, Any]) -> frozenset[type]:
    """Return the types by ``type``, ``enum`` and ``const`` of this schema alone; what no schema can say stays text."""
    kinds, named = ANY, schema.get("type")
    if names := [one for one in (_items(named) or [named]) if isinstance(one, str)]:
        kinds = frozenset[type]().union(*(KINDS.get(name, KINDS["string"]) for name in names))
    if values := _items(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
        kinds &= frozenset(map(type, values)) | (KINDS["number"] if float in map(type, values) else frozenset())
    return kinds


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
