"""What a prompt given as ids says about thinking."""

from __future__ import annotations

import pytest

from dflash_local.chat.channels import Span, ThinkTokenParser, prompt_opens_thinking
from dflash_local.chat.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>a</think>b<think>", True),
        ("hello", False),
    ],
)
def test_prompt_ids_tell_whether_thinking_is_open(chatml: Tokenizer, prompt: str, opens: bool) -> None:
    assert prompt_opens_thinking(chatml, chatml.encode(chatml.with_controls(prompt))) is opens


def test_text_beside_a_tag_is_markup_only_as_far_as_newlines_go() -> None:
    parser = ThinkTokenParser(opens_thinking=False)
    parser.token("<think>")
    assert parser.text("\n\n  deep") == [Span("\n\n", "thinking", False), Span("  deep", "thinking")]
    assert parser.text("\nnext") == [Span("\nnext", "thinking")]
