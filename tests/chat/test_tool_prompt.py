"""Tools told in words, for templates without a place for them: the prompt, and what cannot be lost in it or faked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dflash_local.chat.template import Rendered, render
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import format_of
from dflash_local.errors import UsageError
from dflash_local.request import Message, ToolCall

WithTemplate = Callable[[str], Tokenizer]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add é",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
SCHEMA = (
    '{"type": "function", "function": {"name": "add", "description": "Add é", '
    '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}'
)
CALL = ToolCall("c1", "add", '{"a":1}')
EVERY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As Gemma and Mistral write it: users and models take turns, and nobody else speaks.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def text(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> str:
    return tokenizer.decode(render(tokenizer, messages, thinking=False, **options).ids, skip_special=False)


def test_the_system_message_tells_the_schemas_and_the_form_of_a_call(with_template: WithTemplate) -> None:
    tokenizer = with_template(EVERY_ROLE)
    assert format_of(tokenizer.template) is None
    told = text(tokenizer, [Message("user", "hi")], tools=[TOOL, TOOL])
    assert told.startswith("[system]# Tools\n") and told.endswith("\n</tool_call>[user]hi")
    assert f"<tools>\n{SCHEMA}\n{SCHEMA}\n</tools>" in told
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in told


def test_a_reply_alone_can_be_gone_on_with(with_template: WithTemplate) -> None:
    told = text(with_template(EVERY_ROLE), [Message("assistant", "Once")], tools=[TOOL], continues=True)
    assert told.startswith("[system]# Tools\n") and told.endswith("</tool_call>Once")


def test_it_follows_a_system_message_that_is_there(with_template: WithTemplate) -> None:
    told = text(with_template(EVERY_ROLE), [Message("system", "Be brief."), Message("user", "hi")], tools=[TOOL])
    assert told.startswith("[system]Be brief.\n\n# Tools\n") and told.count("[system]") == 1


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM, ALTERNATING])
def test_a_template_without_a_system_role_has_it_in_the_first_user_message(
    with_template: WithTemplate, template: str
) -> None:
    told = text(with_template(template), [Message("user", "hi")], tools=[TOOL])
    assert told.startswith("[user]# Tools\n") and SCHEMA in told and told.endswith("</tool_call>\n\nhi")


def test_a_system_message_of_the_client_is_refused_as_without_tools(with_template: WithTemplate) -> None:
    with pytest.raises(UsageError, match="System role not supported"):
        text(with_template(NO_SYSTEM), [Message("system", "s"), Message("user", "x")], tools=[TOOL])


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_calls_and_results_of_earlier_turns_are_text(with_template: WithTemplate, tools: list[Any] | None) -> None:
    messages = [
        Message("user", "hi"),
        Message("assistant", "Sure.", tool_calls=(CALL, ToolCall("c2", "now", ""))),
        Message("tool", "2", tool_call_id="c1"),
        Message("tool", "noon", tool_call_id="c2"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "2", tool_call_id="c1"),
    ]
    told = text(with_template(ALTERNATING), messages, tools=tools)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert told.endswith(
        f'hi[assistant]Sure.\n{call}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
        "[user]<tool_response>\n2\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        f"[assistant]{call}[user]<tool_response>\n2\n</tool_response>"
    )


def test_tools_that_would_take_more_than_half_of_the_context_are_left_out_and_told_of(
    with_template: WithTemplate,
) -> None:
    tokenizer = with_template(EVERY_ROLE)
    messages = [Message("user", "hi")]

    def rendered(context: int) -> Rendered:
        return render(tokenizer, messages, thinking=False, tools=[TOOL] * 3, context=context)

    whole = render(tokenizer, messages, thinking=False, tools=[TOOL] * 3)
    bare = render(tokenizer, messages, thinking=False)
    count = len(whole.ids) - len(bare.ids) - len(tokenizer.encode("[system]"))
    assert rendered(2 * count).ids == whole.ids and not rendered(2 * count).notices
    assert rendered(2 * count - 1).ids == bare.ids
    (notice,) = rendered(2 * count - 1).notices
    assert "tools were left out" in notice and f"half of the context of {2 * count - 1} tokens" in notice


def test_schemas_nested_too_deep_are_a_usage_error(with_template: WithTemplate) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="nested too deep"):
        text(with_template(EVERY_ROLE), [Message("user", "hi")], tools=[deep])
