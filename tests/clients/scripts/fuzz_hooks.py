"""What schemathesis is told of the endpoint: a name that is served, and replies short enough for thousands."""

from __future__ import annotations

from itertools import count
from typing import Any

import schemathesis

MOST = 8  # tokens of a reply
NEEDED = ("model", "messages", "prompt", "input")
KEPT = 3  # further fields of most bodies: of those with all of them hardly one is right in every field
NUMBERS = count()


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Name the served model, leave out some fields in turn, and cap a limit that the endpoint would take."""
    body = case.body
    if not isinstance(body, dict):
        return
    number = next(NUMBERS)
    more = [name for name in body if name not in NEEDED]
    if number % 4:
        for at in range(len(more) - KEPT):
            del body[more[(number + at) % len(more)]]
    if isinstance(body.get("model"), str):
        body["model"] = "demo"
    limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
    given = body.get(limit)
    if given is None or (type(given) is int and MOST < given <= 1_000_000):
        body[limit] = MOST
    if type(body.get("max_completion_tokens")) is int:
        body["max_completion_tokens"] = body[limit]
