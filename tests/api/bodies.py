"""Bodies read in-process, for a model that is never loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dflash_local.api import chat_completions, completions
from dflash_local.api.refusals import error_object
from dflash_local.api.request_body import ParsedRequest
from dflash_local.errors import UnknownModelError, UsageError
from dflash_local.request import SamplingParams
from dflash_local.service.backend import Model
from tests.api.conftest import body

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.8, top_k=20)


def never(_progress: object) -> Any:
    raise AssertionError("nothing is loaded here")


MODEL = Model("scripted", never, sampling=DEFAULTS, call_format="hermes")


def find(name: str) -> Model:
    if name != MODEL.name:
        raise UnknownModelError(f"unknown model {name!r}")
    return MODEL


def chat(**fields: Any) -> ParsedRequest:
    return chat_completions.read(json.dumps(body(**fields)).encode(), find)


def text(**fields: Any) -> ParsedRequest:
    return completions.read(json.dumps({"model": "scripted", "prompt": "hi", **fields}).encode(), find)


def refusal(read: Callable[..., ParsedRequest], **fields: Any) -> dict[str, Any]:
    with pytest.raises(UsageError) as caught:
        read(**fields)
    assert caught.value.http_status == 400
    return error_object(caught.value)["error"]
