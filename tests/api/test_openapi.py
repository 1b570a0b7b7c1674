"""The page that describes the endpoint: what it says is what is served."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_local.api import openapi
from dflash_local.api.app import DIALECTS, Dialect
from dflash_local.schema import convert
from tests.api.conftest import Running

MESSAGES = [{"role": "user", "content": "hi"}]
SENT: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}


def test_the_page_names_every_path_and_where_its_errors_are_anthropics(server: Running) -> None:
    page = server.get(openapi.PATH).json
    assert page["openapi"] == "3.1.0"
    assert {path for path in page["paths"] if path.startswith("/v1")} == {
        "/v1/models", "/v1/models/{name}", "/v1/messages/count_tokens", *(dialect.path for dialect in DIALECTS),
    }  # fmt: skip
    schemas = page["components"]["schemas"]
    assert "temperature" in schemas["MessagesBody"]["properties"] and schemas["ChatBody"]["required"] == [
        "model", "messages",
    ]  # fmt: skip
    for path, operations in page["paths"].items():
        for operation in operations.values():
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
            assert error.endswith("AnthropicError" if path.startswith("/v1/messages") else "OpenAIError")
            assert error.rpartition("/")[2] in schemas and operation["summary"]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_reply_is_what_the_page_says(server: Running, dialect: Dialect) -> None:
    answer = server.call("POST", dialect.path, {"model": "scripted", **SENT.get(dialect.path, {"messages": MESSAGES})})
    assert answer.status == 200
    convert(answer.json, dialect.whole)
