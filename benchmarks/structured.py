"""Replies held to JSON schemas: valid, drafted as plain, what drafts and masks bring and cost.

    PYTHONPATH=. python benchmarks/structured.py demo|smollm2 [--limit 20] [--tokens 256] [--device cpu] [--out FILE]

Schemas are made from a fixed seed: objects, arrays, enums, nested ones, numbers with bounds, patterns, oneOf. Each is
told to the model and held to, greedy and sampled, drafted and plain; drafted once more with drafts that are not allowed
left as they are, and all rows verified (*unforced*), and once without the mask (*free*). A reply that ``--tokens`` cut
off is counted apart.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from dflash_local import settings
from dflash_local.app.loading import open_session
from dflash_local.app.resolve import resolve
from dflash_local.bench import provenance
from dflash_local.bench.trial import Written, write
from dflash_local.chat.tool_prompt import in_format
from dflash_local.engine.grammar import Grammar
from dflash_local.engine.session import Session
from dflash_local.load_config import LoadConfig
from dflash_local.request import Constraint, Limits, Message, Request, SamplingParams

SCHEMAS, SEED = 200, 1
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(temperature=0.8, seed=SEED)}
KEYS = ("name", "id", "color", "count", "price", "tags", "active", "address", "items", "kind", "note", "first_name")
PATTERNS = ("^[a-z]{2,5}$", "^[A-Z]{2}-[0-9]{3}$", "^20[0-9]{2}-(0[1-9]|1[0-2])$", "^#[0-9a-f]{6}$")
SCALARS = ("string", "enum", "integer", "number", "boolean", "pattern")
BESIDE, WAITED = ("begin", "prepare", "apply"), ("forced", "accept")  # host work of a cycle: while a pass runs, or not
KINDS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


def make_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that short texts meet; the outermost is of an object."""
    containers = ("object", "array", "oneOf") if depth < 3 else ()
    kind = "object" if depth == 0 else rng.choice((*containers, *SCALARS))
    if kind == "object":
        keys = rng.sample(KEYS, rng.randint(1, 4))
        properties = {key: make_schema(rng, depth + 1) for key in keys}
        required = keys[: rng.randint(1, len(keys))]
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randint(0, 2)
        return {
            "type": kind,
            "items": make_schema(rng, depth + 1),
            "minItems": low,
            "maxItems": low + rng.randint(1, 2),
        }
    if kind == "oneOf":
        return {
            "oneOf": [{"type": "boolean"}, make_schema(rng, 3) | {"type": "string"}, {"type": "integer", "maximum": 9}]
        }
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 500)}
    others = {
        "enum": {"enum": rng.sample(["red", "green", "blue", 3, 2.5, None, True], 3)},
        "pattern": {"type": "string", "pattern": rng.choice(PATTERNS)},
        "boolean": {"type": "boolean"},
    }
    return others.get(kind, {"type": "string", "maxLength": rng.randint(3, 16)})


def meets(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of ``make_schema``, by nothing of what held the reply to it."""
    if "oneOf" in schema:
        return sum(meets(value, each) for each in schema["oneOf"]) == 1
    if "enum" in schema:
        return any(type(value) is type(each) and value == each for each in schema["enum"])
    kind = schema["type"]
    if not isinstance(value, KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if isinstance(value, dict):
        known = schema["properties"]
        named = set(schema["required"]) <= set(value) <= set(known)
        return named and all(meets(each, known[key]) for key, each in value.items())
    if isinstance(value, list):
        counted = schema["minItems"] <= len(value) <= schema["maxItems"]
        return counted and all(meets(each, schema["items"]) for each in value)
    if isinstance(value, str):
        short = len(value) <= schema.get("maxLength", len(value))
        return short and re.search(schema.get("pattern", ""), value) is not None
    return bool(schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf))


@contextmanager
def watched(waited: list[float], beside: list[float]) -> Iterator[None]:
    """Within, the milliseconds that a grammar takes of each cycle are noted."""

    def timed(name: str, spent: list[float]) -> Callable[..., Any]:
        call = getattr(Grammar, name)

        def run(*args: Any) -> Any:
            begun = time.perf_counter()
            result = call(*args)
            spent[-1] += 1e3 * (time.perf_counter() - begun)
            if name == "accept":
                waited.append(0.0)
                beside.append(0.0)
            return result

        return run

    works = {name: timed(name, spent) for names, spent in ((WAITED, waited), (BESIDE, beside)) for name in names}
    with mock.patch.multiple(Grammar, **works):
        yield


def per_cycle(replies: list[Written]) -> float:
    """Tokens that a cycle emitted; the first token of a reply belongs to none."""
    cycles = [cycle.emitted for reply in replies for cycle in reply.cycles]
    return sum(cycles) / max(len(cycles), 1)


def measure(session: Session, schemas: list[dict[str, Any]], sampling: SamplingParams, tokens: int) -> dict[str, Any]:
    """Figures of one way of sampling."""
    drafted, unforced, free = list[Written](), list[Written](), list[Written]()
    waited, beside, wrong, differ, cut = [0.0], [0.0], list[str](), 0, 0
    for schema in schemas:
        messages = in_format((Message("user", "Make something up."),), schema)
        held = Request(
            messages=messages,
            sampling=sampling,
            limits=Limits(tokens),
            constraint=Constraint("json_schema", json.dumps(schema)),
        )
        plain = write(session, replace(held, mode="ar"))
        with watched(waited, beside):
            drafted.append(write(session, held))
        with mock.patch.object(Grammar, "forced", lambda _grammar, drafts: drafts):
            unforced.append(write(session, held))
        free.append(write(session, Request(messages=messages, sampling=sampling, limits=Limits(tokens))))
        differ += len({plain.ids, drafted[-1].ids, unforced[-1].ids}) > 1
        cut += plain.reason == "length"
        if plain.reason == "stop" and not meets(json.loads(plain.text), schema):
            wrong.append(plain.text)
    return {
        "schemas": len(schemas),
        "cut off": cut,
        "invalid": len(wrong),
        "drafted differs from plain": differ,
        "tokens per cycle": per_cycle(drafted),
        "the same, unforced": per_cycle(unforced),
        "the same, free": per_cycle(free),
        "host ms of the grammar in a cycle, median": statistics.median(waited),
        "the same, 95th percentile": statistics.quantiles(waited, n=20)[-1],
        "host ms beside the passes, median": statistics.median(beside),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--limit", type=int, default=SCHEMAS, help="schemas")
    parser.add_argument("--tokens", type=int, default=256, help="of a reply at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--out", type=Path, help="file of the JSON record")
    args = parser.parse_args()
    rng = random.Random(SEED)
    schemas = [make_schema(rng) for _ in range(SCHEMAS)][: args.limit]
    pair = resolve(args.model, None, settings.load(), lambda _event: None)
    session = open_session(pair, LoadConfig(device=args.device, engine=args.engine))
    record = {"pair": args.model, "engine": session.facts.engine, "machine": provenance.machine()}
    for name, sampling in SAMPLINGS.items():
        record[name] = measure(session, schemas, sampling, args.tokens)
        print("\n".join([name, *(f"  {key}: {value:.4g}" for key, value in record[name].items())]), flush=True)
    session.close()
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
