"""The page that describes the endpoint: every path, and what is read there."""

from __future__ import annotations

from dflash_local.api import openapi
from dflash_local.api.app import DIALECTS
from tests.api.conftest import Running


def test_the_page_names_every_path_and_the_fields_of_its_bodies(server: Running) -> None:
    page = server.get(openapi.PATH).json
    assert page["openapi"] == "3.1.0"
    assert {path for path in page["paths"] if path.startswith("/v1")} == {
        "/v1/models", "/v1/models/{name}", "/v1/messages/count_tokens", *(dialect.path for dialect in DIALECTS),
    }  # fmt: skip
    schemas = page["components"]["schemas"]
    assert "temperature" in schemas["MessagesBody"]["properties"] and schemas["ChatBody"]["required"] == [
        "model", "messages",
    ]  # fmt: skip
    for operations in page["paths"].values():
        assert all(operation["summary"] for operation in operations.values())
