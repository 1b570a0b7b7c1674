"""Renders chat templates in a process of its own, to be killed when one hangs.

Run by path with ``python -I``: imports the standard library and jinja2 only, nothing of the package.
Reads and writes frames (4 bytes big-endian length, JSON). Arguments: folders to find jinja2 in.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path += sys.argv[1:]  # before jinja2 is looked for

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MEMORY_BYTES = 512 * 2**20
ALARM_S = 10  # only reached when the parent died and cannot kill this process
FRAME = struct.Struct(">I")


def limit_resources() -> None:
    """Cap memory, forbid files to grow and core dumps, where the system can."""
    try:
        import resource
    except ImportError:  # Windows: the parent's time cap is what remains
        return
    for name, value in (("RLIMIT_AS", MEMORY_BYTES), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (OSError, ValueError):  # macOS refuses some of them
                continue


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's own sandbox answers a forbidden attribute with an undefined value; this one stops there."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse the access."""
        raise jinja2.sandbox.SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


class Refused(jinja2.TemplateError):
    """The template itself refuses the conversation."""


class Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks training targets; its body renders as it stands."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tags."""
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
    """``dict()`` as a function, not the type: nothing to climb from."""
    return dict(*args, **entries)


def raise_exception(message: object) -> NoReturn:
    """How a template refuses a conversation."""
    raise Refused(str(message))


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models were trained on; jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def build_environment(now: datetime) -> Sandbox:
    """The sandbox with what published templates expect; the names are those of transformers."""

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
    except Refused as error:
        return {"error": "refused", "message": str(error), "done": texts}
    except jinja2.sandbox.SecurityError as error:
        return {"error": "security", "message": str(error)}
    except (MemoryError, RecursionError) as error:
        return {"error": "size", "message": type(error).__name__}
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return {"error": "failed", "message": f"{type(error).__name__}: {error}", "done": texts}
    return {"texts": texts}


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next request, None when the parent has gone."""
    head = stream.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    frame: dict[str, Any] = json.loads(stream.read(FRAME.unpack(head)[0]))
    return frame


def write_frame(stream: BinaryIO, answer: dict[str, Any]) -> None:
    """Send one answer."""
    data = json.dumps(answer).encode()
    stream.write(FRAME.pack(len(data)) + data)
    stream.flush()


def serve() -> None:
    """Announce readiness, then answer requests until standard input ends."""
    limit_resources()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    write_frame(answers, {"ready": jinja2.__version__})
    while (request := read_frame(requests)) is not None:
        if hasattr(signal, "alarm"):
            signal.alarm(ALARM_S)
        write_frame(answers, render(request))
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    serve()
