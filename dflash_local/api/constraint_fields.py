"""The fields that say what the text of a reply must be: OpenAI's formats, and vLLM's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from dflash_local.api.refusals import FieldError, check_field, naming
from dflash_local.json_text import parse_json
from dflash_local.request import Constraint, ConstraintKind
from dflash_local.schema import OpenRecord, Record

MAX_CHOICES = 10_000
JsonSchema = str | dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Record, frozen=True):
    """vLLM's field of all kinds, one of which is given."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class ConstraintFields(OpenRecord, frozen=True, kw_only=True):
    """vLLM's fields, which bodies of all dialects may have."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


class ResponseFormat(OpenRecord, frozen=True):
    """The form that a reply is asked to have."""

    class Schema(OpenRecord, frozen=True):
        """A JSON schema, by name."""

        name: str
        description: str | None = None
        schema: dict[str, Any] | None = None

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError(".json_schema is missing")


def format_schema(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Return the schema of the JSON that is asked for, an empty one for any object; None where text is."""
    if form is None or form.type == "text":
        return None
    schema = None if form.json_schema is None else form.json_schema.schema
    return checked_schema("response_format.json_schema.schema", schema)


def checked_schema(path: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a schema, an empty one for none. FieldError: it is too large or too deep."""
    check_field(path, schema)
    return schema or {}


def read_constraint(record: ConstraintFields, schema: Mapping[str, Any] | None) -> Constraint | None:
    """Return what is asked for. FieldError: two different things are, or one cannot be read.

    Args:
        schema: of the dialect's own format, see ``format_schema``.
    """
    given = record.structured_outputs or StructuredOutputs()
    asked: dict[str, tuple[ConstraintKind, Any]] = {
        "format": ("json_schema", schema),
        "structured_outputs.json": ("json_schema", given.json),
        "structured_outputs.json_object": ("json_object", given.json_object or None),
        "structured_outputs.regex": ("regex", given.regex),
        "structured_outputs.choice": ("lark", given.choice),
        "structured_outputs.grammar": ("lark", given.grammar),
        "guided_json": ("json_schema", record.guided_json),
        "guided_regex": ("regex", record.guided_regex),
        "guided_choice": ("lark", record.guided_choice),
        "guided_grammar": ("lark", record.guided_grammar),
    }
    found = [(path, kind, value) for path, (kind, value) in asked.items() if value is not None]
    if len(found) > 1:
        raise FieldError(found[1][0], f"{found[0][0]} and {found[1][0]} are both given", "send one of them")
    return _constraint(*found[0]) if found else None


def _constraint(path: str, kind: ConstraintKind, value: Any) -> Constraint:
    """Return one of a field; a list is of choices."""
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise FieldError(path, f"{path} is not JSON: {error}") from error
    if kind == "json_schema":
        check_field(path, value)
        kind = kind if value else "json_object"
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        value = f"start: {' | '.join(map(json.dumps, value))}"
    with naming(path):
        return Constraint(kind, "" if kind == "json_object" else value)
