"""Where answers begin by ids agrees with what a reply shows as its answer."""

from __future__ import annotations

import pytest

from dflash_local.chat.answer_ids import answer_ids
from dflash_local.chat.channels import prompt_opens_thinking
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.errors import UsageError


def held(tokenizer: Tokenizer, prompt: str, reply: str, with_tools: bool = False) -> str:
    """What of a reply a constraint holds for."""
    prompt_ids, ids = (tokenizer.encode(tokenizer.with_controls(text)) for text in (prompt, reply))
    answers = answer_ids(tokenizer, with_tools)
    place, found = answers.begin(prompt_ids, prompt_opens_thinking(tokenizer, prompt_ids)), []
    for token_id in ids:
        if place.answers and token_id not in place.free:
            found.append(token_id)
        place = answers.after(place, token_id)
    return tokenizer.decode(found, skip_special=False)


@pytest.mark.parametrize(
    ("prompt", "reply", "answer"),
    [
        ("hi", '{"a": 1}', '{"a": 1}'),
        ("hi<think>\n", "so {</think>\n{}", "{}"),
        ("hi<think></think>", "{}", "{}"),
        ("hi", "<think>so</think>\n{}\n", "{}\n"),
        ("hi", "{<think>", "{<think>"),
        ("hi<think>", "so<tool_call>", ""),
    ],
    ids=["plain", "opened", "closed", "begun", "too late", "never closed"],
)
def test_thinking_is_free_and_newlines_behind_it_are_its_own(
    chatml: Tokenizer, prompt: str, reply: str, answer: str
) -> None:
    assert held(chatml, prompt, reply) == answer


def test_a_call_of_a_tool_may_stand_in_place_of_the_answer(chatml: Tokenizer, plain: Tokenizer) -> None:
    call = "<tool_call>{}</tool_call>"
    assert held(chatml, "hi", call, with_tools=True) == "" == held(chatml, "hi<think>", f"so</think>\n{call}", True)
    assert held(chatml, "hi", call) == call and held(chatml, "hi", f"x{call}", with_tools=True) == f"x{call}"
    with pytest.raises(UsageError, match="where tools are offered"):
        answer_ids(plain, with_tools=True)


def test_thinking_that_closes_with_plain_text_cannot_be_told_from_ids(plain: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no token of this model"):
        answer_ids(plain, with_tools=False).begin([], opens_thinking=True)
    assert held(plain, "hi", "{}") == "{}"


ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("prompt", "reply", "answer"),
    [
        (ASKED, "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>{}", "{}"),
        (ASKED, "<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        (ASKED, "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", ""),
        (ASKED + "<|channel|>final<|message|>", "{}", "{}"),
        ("hi", "{}", "{}"),
    ],
    ids=["thought", "constrained", "call", "begun", "no markup"],
)
def test_of_harmony_the_final_message_is_held(harmony: Tokenizer, prompt: str, reply: str, answer: str) -> None:
    assert held(harmony, prompt, reply) == answer
