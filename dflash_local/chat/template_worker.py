"""Renders chat templates in a process of its own, to be killed when one hangs.

A handler of ``worker.child``: imports the standard library and jinja2 only, nothing of the package.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's own sandbox answers a forbidden attribute with an undefined value; this one stops there."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise jinja2.sandbox.SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


class TemplateRefused(jinja2.TemplateError):
    """The template itself refuses the conversation."""


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks training targets; its body renders as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Names(jinja2.utils.Namespace):
    """``namespace()`` that takes no underscore names, the way to Python's own attributes."""

    def __init__(*args: Any, **attributes: Any) -> None:
        given = dict(*args[1:], **attributes)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace may not hold {name!r}")


def plain_dict(*args: Any, **entries: Any) -> dict[Any, Any]:
    """Make a dict: a function, where the type would be something to climb from."""
    return dict(*args, **entries)


def raise_exception(message: object) -> NoReturn:
    """Refuse a conversation, as a template asks for it."""
    raise TemplateRefused(str(message))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON as models were trained on; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment(now: datetime) -> Sandbox:
    """Return the sandbox with what published templates expect; the names are those of transformers."""

    def strftime_now(layout: str) -> str:
        return now.strftime(layout)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=Names, dict=plain_dict
    )
    return environment


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Render once for each value of ``add_generation_prompt``; an answer names the kind of a failure."""
    environment = build_environment(datetime.fromisoformat(request["now"]))
    texts: list[str] = []
    try:
        template = environment.from_string(request["template"])
        for flag in request["generation_prompt"]:
            parts, size = [], 0
            for part in template.generate(**request["arguments"], add_generation_prompt=flag):
                size += len(part)
                if size > request["max_chars"]:
                    return {"error": "size", "message": f"more than {request['max_chars']} characters"}
                parts.append(part)
            texts.append("".join(parts))
    except TemplateRefused as error:
        return {"error": "refused", "message": str(error), "done": texts}
    except jinja2.sandbox.SecurityError as error:
        return {"error": "security", "message": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"error": "size", "message": type(error).__name__}
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}", "done": texts}
    return {"texts": texts}


def answer(request: bytes) -> bytes:
    """Answer a request of ``worker.child``: JSON in, JSON out."""
    return json.dumps(render(json.loads(request))).encode()
