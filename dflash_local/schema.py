"""Values of files, variables and requests as declared records, and one line on what is wrong with one, where and why.

The types of a record's fields are the rules: ``Annotated`` with ``Meta`` holds ranges and patterns, whose
``description`` is what an error says is allowed. A ``__post_init__`` refuses by a ``ValueError``, which may begin with
a field, as ``.name is missing``.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

MAX_SHOWN = 80  # characters of a value or key in an error
CUTOFF = 0.7  # a key that is less like another one does not stand for it
Kind = TypeVar("Kind")
_CONVERTING = threading.RLock()  # msgspec crashes where two threads meet a type for the first time
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_ABOUT_TYPE = ("Expected ", "Invalid ", "Number ", "Integer ", "Value ")


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record that takes the fields that it declares and no others."""


class OpenRecord(msgspec.Struct, frozen=True):
    """A record that leaves out what it does not declare, which ``undeclared`` names."""


class InvalidValue(ValueError):
    """A value that a record does not take.

    Attributes:
        path: of the field, as ``messages[0].role``; empty for the whole. problem: goes on after its name.
        unknown: the key that no record there has; empty where something else is wrong.
    """

    def __init__(self, path: str, problem: str, hint: str = "", unknown: str = "") -> None:
        super().__init__(f"{path} {problem}".strip())
        self.path, self.problem, self.hint, self.unknown = path, problem, hint, unknown


def convert(value: Any, kind: type[Kind], *, strict: bool = True) -> Kind:
    """Return a value of JSON or YAML as the type ``kind``.

    Args:
        strict: False also takes numbers and flags that are spelled as text, as in variables.

    Raises:
        InvalidValue: it is something else, or not allowed.
    """
    try:
        with _CONVERTING:
            return msgspec.convert(value, kind, strict=strict, str_keys=True)
    except UnicodeEncodeError:  # of a key, or of a text where words are expected
        raise InvalidValue("", "holds a key or word that is no valid Unicode: half of a surrogate pair") from None
    except msgspec.ValidationError as error:
        text, _, place = str(error).rpartition(" - at `")
        raise _explained(text or place, place.rstrip("`") if text else "", value, kind) from None


def json_schemas(kinds: Sequence[type], template: str) -> tuple[dict[type, Any], dict[str, Any]]:
    """Return references to the JSON schemas of types, by ``template`` with its ``{name}``, and the schemas by name."""
    with _CONVERTING:
        references, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    return dict(zip(kinds, references, strict=True)), schemas


def undeclared(value: Any, kind: type) -> Iterator[tuple[str, str]]:
    """Find the keys that hold something and that the open records of a type do not declare.

    Yields:
        the path of each, as ``messages[].content[].name``, once, and the nearest key that is declared there; empty
        where none is like it.
    """
    return _undeclared(value, _type_info(kind), "", set())


def _undeclared(value: Any, declared: Any, path: str, met: set[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        item = getattr(_plain(declared, "item_type"), "item_type", None)
        for one in value if item is not None else ():
            yield from _undeclared(one, item, f"{path}[]", met)
    record = _plain(declared, "fields")
    if not isinstance(value, dict) or not isinstance(record, inspect.StructType) or record.forbid_unknown_fields:
        return
    fields = {field.encode_name: field.type for field in record.fields}
    for key, one in value.items():
        shown = f"{path}.{key}" if path else key
        if key in fields:
            yield from _undeclared(one, fields[key], shown, met)
        elif one not in (None, "", [], {}) and shown not in met:
            met.add(shown)
            yield shown, nearest(key, fields)


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def nearest(word: str, names: Iterable[str]) -> str:
    """Return the name that ``word`` may have meant; empty where none is like it, or where it is too long for one."""
    close = difflib.get_close_matches(word, list(names), 1, CUTOFF) if len(word) <= MAX_SHOWN else []
    return close[0] if close else ""


def quoted(value: object) -> str:
    """Return a value as errors show it: escaped and short."""
    text = repr(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def keys_of(kind: type) -> tuple[str, ...]:
    """Return the keys of a record in a file or request, in the order of its fields."""
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


class _Place(NamedTuple):
    """A declared type, the path to it, and the values there, if they are known: at most one."""

    declared: Any
    path: str
    found: tuple[Any, ...]


def _explained(text: str, where: str, value: Any, kind: type) -> InvalidValue:
    in_key = where.startswith("key` in ")
    place = _place(_type_info(kind), value, where.removeprefix("key` in `").removeprefix("$"), in_key)
    key = text.partition("`")[2].rstrip("`")
    name = key if key.isidentifier() and len(key) <= MAX_SHOWN else quoted(key)
    path = f"{place.path}.{name}" if place.path else name
    if text.startswith("Object missing"):
        return InvalidValue(path, "is missing")
    if text.startswith("Object contains unknown"):
        return InvalidValue(path, "is unknown", _suggestion(key, _plain(place.declared)), key)
    if not text.startswith(_ABOUT_TYPE):  # of a ``__post_init__``, which may name a field with a dot before it
        field, _, problem = text.partition(" ") if text.startswith(".") else ("", "", text)
        return InvalidValue(f"{place.path}{field}".lstrip("."), problem)
    problem = f"{'has a key that is not' if in_key else 'must be'} {allowed(place.declared)}"
    got = "".join(f", got {quoted(one)}" for one in place.found)
    words = getattr(_plain(place.declared), "values", ())
    meant = nearest(str(place.found[0]), map(str, words)) if place.found else ""
    hint = f"did you mean {meant!r}?" if meant else ""
    if text.startswith("Expected `str") and ", got" in text and not text.endswith(("`array`", "`object`", "`null`")):
        hint = "put it in quotes"
    return InvalidValue(place.path, problem + got, hint)


def _place(declared: Any, value: Any, steps: str, in_key: bool) -> _Place:
    """Return what is declared and found at the end of msgspec's path, in which the keys of a dict are unknown."""
    start = _Place(declared, "", (value,))
    path, found = "", tuple[Any, ...]((value,))
    try:
        for name, item in _STEP.findall(steps):
            declared = _plain(declared, "fields" if name else "value_type" if item == "..." else "item_type")
            if name:
                declared = next(field.type for field in declared.fields if field.encode_name == name)
                path, found = f"{path}.{name}" if path else name, tuple(one[name] for one in found)
            elif item == "...":
                declared, path, found = declared.value_type, f"{path}[...]", ()
            else:
                items = getattr(declared, "item_types", None)
                declared = items[int(item)] if items else declared.item_type
                path, found = f"{path}[{item}]", tuple(one[int(item)] for one in found)
        return _Place(_plain(declared).key_type, path, ()) if in_key else _Place(declared, path, found)
    except (LookupError, AttributeError, TypeError, StopIteration):
        return start  # an unknown key may be spelled like the end of an error: there is no such place


def _plain(declared: Any, attribute: str = "") -> Any:
    """Return a type without its metadata; of several that it may be the first, or the one with an attribute."""
    if isinstance(declared, inspect.Metadata):
        return _plain(declared.type, attribute)
    if not isinstance(declared, inspect.UnionType):
        return declared
    kinds = [_plain(one) for one in declared.types if not isinstance(one, inspect.NoneType)]
    return next((kind for kind in kinds if hasattr(kind, attribute)), kinds[0])


def allowed(declared: Any) -> str:
    """Return what a type of ``msgspec.inspect`` takes, in words."""
    if isinstance(declared, inspect.Metadata):
        schema: Mapping[str, Any] = declared.extra_json_schema or {}
        return cast(str, schema.get("description")) or allowed(declared.type)
    if isinstance(declared, inspect.UnionType):
        kinds = [one for one in declared.types if not isinstance(one, inspect.NoneType)]
        return " or ".join(dict.fromkeys(map(allowed, kinds)))
    if isinstance(declared, (inspect.IntType, inspect.FloatType)):
        noun = "a whole number" if isinstance(declared, inspect.IntType) else "a number"
        if declared.ge is None:
            return noun
        return f"{noun} from {declared.ge:g} to {declared.le:,}".removesuffix(".0")
    if isinstance(declared, inspect.LiteralType):
        return f"one of {', '.join(map(str, declared.values))}"
    if isinstance(declared, inspect.ListType):
        return f"a list of {declared.min_length or 0} to {declared.max_length:,}" if declared.max_length else "a list"
    if isinstance(declared, inspect.StrType) and declared.max_length:
        return f"text of {declared.min_length or 0} to {declared.max_length:,} characters"
    words: dict[type, str] = {inspect.StrType: "text", inspect.BoolType: "true or false", inspect.NoneType: "null"}
    lists = (inspect.VarTupleType, inspect.TupleType)
    return words.get(type(declared), "a list" if isinstance(declared, lists) else "an object")


def _suggestion(key: str, declared: Any) -> str:
    """Return the hint for an unknown key: the nearest one of here or of a record within, or all of here."""
    fields = getattr(declared, "fields", ())  # none where the place is spelled by the key itself
    here = [field.encode_name for field in fields]
    within = {name: field.encode_name for field in fields for name in _names_within(field.type)}
    for pool in (here, within):
        if close := nearest(key, pool):
            return f"did you mean {close!r}{'' if close in here else f' of {within[close]}'}?"
    return f"allowed: {', '.join(here)}"


def _names_within(declared: Any) -> list[str]:
    declared = _plain(declared)
    if isinstance(declared, (inspect.StructType, inspect.DataclassType)):
        inside = [name for field in declared.fields for name in _names_within(field.type)]
        return [*(field.encode_name for field in declared.fields), *inside]
    item = getattr(declared, "item_type", None) or getattr(declared, "value_type", None)
    return _names_within(item) if item is not None else []
