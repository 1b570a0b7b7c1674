"""The body of Open WebUI's first message, as version 0.12.4 sent it: it offers its 36 tools with every message."""

from __future__ import annotations

from pathlib import Path

from dflash_local.api import chat_completions
from dflash_local.catalog.bundled import find
from dflash_local.chat.template import render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.checkpoint_files.source import open_source
from dflash_local.request import Message
from dflash_local.service.backend import Backend as Session
from dflash_local.service.backend import Model

BODY = Path(__file__).with_name("open_webui_request.json")
TOY_CONTEXT, LARGE_CONTEXT = 2048, 40_000


def _no_load(_progress: object) -> Session:
    raise AssertionError("nothing is to be loaded")


def test_the_first_message_of_open_webui_is_answered_by_a_template_without_tools() -> None:
    parsed = chat_completions.read(BODY.read_bytes(), lambda name: Model(name, _no_load))
    assert parsed.stream and parsed.request.messages == (Message("user", "Count from 3 to 7."),)
    tools = parsed.request.tools
    assert len(tools) == 36
    tokenizer = Tokenizer.load(open_source(find("demo").target))
    assert tokenizer is not None
    without = render(tokenizer, parsed.request.messages, thinking=False)
    small = render(tokenizer, parsed.request.messages, thinking=False, tools=tools, context=TOY_CONTEXT)
    assert small.ids == without.ids and len(small.notices) == 1
    large = render(tokenizer, parsed.request.messages, thinking=False, tools=tools, context=LARGE_CONTEXT)
    told = tokenizer.decode(large.ids)
    assert all(tool["function"]["name"] in told for tool in tools) and not large.notices
