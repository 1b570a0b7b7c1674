"""Messages to ids through the checkpoint's chat template, rendered in a process that can be killed.

A target without a template is a base model: its prompt is the contents, joined by an empty line, after
BOS where the tokenizer adds one; roles and thinking are dropped.
"""

from __future__ import annotations

import json
import os.path
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dflash_local.chat.channels import END_THINK, THINK
from dflash_local.chat.template_process import MAX_CHARS, TemplateProcess
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tool_calls import format_of
from dflash_local.chat.tool_prompt import SHARE, as_text, in_system, rendered_with, tool_prompt
from dflash_local.errors import ContextError, TemplateError, UsageError
from dflash_local.request import Message, ToolCall

PROCESS = TemplateProcess()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as ids.

    Attributes:
        stable: leading ids that stay when the conversation goes on: those of the rendering without
            the generation prompt, as far as they agree.
        opens_thinking: the prompt ends inside an open ``<think>``.
        notices: what the user should know of it.
    """

    ids: tuple[int, ...]
    stable: int
    opens_thinking: bool
    notices: tuple[str, ...] = ()


class Concealer:
    """Hides control texts in a conversation behind random markers while a template handles it.

    What a user writes can then neither steer the template nor be taken for its tags. The beginning of
    a control text at the end of a content (and the end of one at its beginning) is hidden as well, so
    that contents a template puts side by side cannot make a tag together.
    """

    def __init__(self, pattern: re.Pattern[str] | None, controls: Sequence[str]) -> None:
        self._pattern = pattern
        self._controls = controls
        self._nonce = secrets.token_hex(8)
        self._markers: dict[str, str] = {}
        self._hidden: dict[str, str] = {}

    def conceal(self, value: Any) -> Any:
        """``value`` (JSON-like) with every string in it made harmless."""
        if isinstance(value, str):
            return self._conceal_text(value)
        if isinstance(value, Mapping):
            return {self.conceal(key): self.conceal(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.conceal(item) for item in value]
        return value

    def _conceal_text(self, text: str) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub(lambda match: self._marker(match[0]), text)
        body = text.strip()
        head = max((_shared(control, body) for control in self._controls), default=0)
        tail = max((_shared(body, control) for control in self._controls), default=0)
        if head + tail > len(body):
            head = 0
        start = len(text) - len(text.lstrip())
        end = start + len(body)
        parts = [text[:start], self._marker(body[:head]), text[start + head : end - tail]]
        return "".join([*parts, self._marker(body[len(body) - tail :]), text[end:]])

    def _marker(self, text: str) -> str:
        if not text:
            return ""
        if text not in self._markers:
            marker = f"{self._nonce}{len(self._hidden):08x}"
            self._markers[text], self._hidden[marker] = marker, text
        return self._markers[text]

    def reveal(self, text: str) -> str:
        """``text`` with every marker replaced by what it hides."""
        if not self._hidden:
            return text
        return re.sub(f"{self._nonce}[0-9a-f]{{8}}", lambda match: self._hidden.get(match[0], ""), text)


def _shared(left: str, right: str) -> int:
    """Length of the longest proper end of ``left`` that begins ``right``."""
    limit = min(len(left), len(right))
    return next((n for n in range(limit, 0, -1) if left.endswith(right[:n])), 0)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    now: datetime | None = None,
    context: int | None = None,
) -> Rendered:
    """Ids of a conversation, ready for the reply.

    Where the template takes no tools they, their calls and their results are told in words (``tool_prompt``).

    Args:
        thinking: passed as ``enable_thinking``, always.
        tools: JSON schemas of functions that the model may call.
        context: tokens that the session holds. Tools in words that would take more than half of them are left
            out, with a notice.
        now: what ``strftime_now`` tells the template; the present by default.

    Raises:
        UsageError: the template refuses the conversation (its own words are given), or nothing is left.
        TemplateError: it fails, tries to leave the sandbox, or takes over 2 s or 4 M characters.
    """
    if sum(len(message.content) + len(message.thinking) for message in messages) > MAX_CHARS:
        raise ContextError(f"the conversation is longer than {MAX_CHARS} characters", "shorten it")
    now = now or datetime.now()
    prompt, notices = "", tuple[str, ...]()
    if format_of(tokenizer.template) is None:
        messages = as_text(messages, lambda call: _call(call)["function"])
        prompt, notices = _fitting(tokenizer, tool_prompt(tools or ()), context)
        tools = None
    if tokenizer.template is None:
        return _not_empty(_render_plain(tokenizer, in_system(messages, prompt) if prompt else messages, notices))
    concealer = Concealer(tokenizer.control_pattern, tokenizer.control_texts)
    arguments: dict[str, Any] = {
        "tools": concealer.conceal(list(tools)) if tools else None,
        "enable_thinking": thinking,
        **{name: text for name, text in _special_texts(tokenizer) if text},
    }

    def ask(conversation: Sequence[Message]) -> list[str]:
        entries = [_as_dict(message, concealer) for message in conversation]
        return _ask(tokenizer.template or "", {**arguments, "messages": entries}, now, conversation)

    texts = rendered_with(ask, messages, prompt)
    ids = tokenizer.encode_rendering(texts[0], concealer.reveal)
    history = tokenizer.encode_rendering(texts[1], concealer.reveal) if len(texts) > 1 else []
    stable = len(os.path.commonprefix([ids, history]))  # type: ignore[type-var]
    return _not_empty(Rendered(tuple(ids), stable, _opens_thinking(texts), notices))


def _fitting(tokenizer: Tokenizer, prompt: str, context: int | None) -> tuple[str, tuple[str, ...]]:
    """The tools in words, or nothing and why. Decided by them alone, so that it stays as the conversation grows."""
    if not prompt or context is None:
        return prompt, ()
    count = len(tokenizer.encode(prompt)) if len(prompt) <= MAX_CHARS else None
    if count is not None and count <= context // SHARE:
        return prompt, ()
    size = f"{count} tokens" if count is not None else f"over {MAX_CHARS} characters"
    return "", (f"the tools were left out of the prompt: {size}, more than half of the context of {context}",)


def _not_empty(rendered: Rendered) -> Rendered:
    if not rendered.ids:
        raise UsageError("the prompt is empty: the messages come to no token", "type something to answer")
    return rendered


def _special_texts(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    yield "bos_token", tokenizer.bos_text
    yield "eos_token", tokenizer.eos_text


def _as_dict(message: Message, concealer: Concealer) -> dict[str, Any]:
    """A message as templates expect it; ``thinking`` under both names in use (gpt-oss reads the second)."""
    entry: dict[str, Any] = {"role": message.role, "content": concealer.conceal(message.content)}
    if message.name:
        entry["name"] = concealer.conceal(message.name)
    if message.tool_call_id:
        entry["tool_call_id"] = concealer.conceal(message.tool_call_id)
    if message.tool_calls:
        entry["tool_calls"] = [concealer.conceal(_call(call)) for call in message.tool_calls]
    if message.thinking:
        thought = concealer.conceal(message.thinking)
        entry |= {"reasoning_content": thought, "thinking": thought}
    return entry


def _call(call: ToolCall) -> dict[str, Any]:
    """A call as templates expect it: with its arguments as an object, which they write in their own way.

    Raises:
        UsageError: the arguments are not the JSON text of one object.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"the arguments of tool call {call.name!r} are not a JSON object", "send one JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _render_plain(tokenizer: Tokenizer, messages: Sequence[Message], notices: tuple[str, ...]) -> Rendered:
    ids = (*tokenizer.begin, *tokenizer.encode("\n\n".join(message.content for message in messages)))
    return Rendered(ids, len(ids), False, notices)


def _ask(template: str, arguments: dict[str, Any], now: datetime, messages: Sequence[Message]) -> list[str]:
    """Renderings with and, where the template can, without the generation prompt."""
    answer = PROCESS.request(
        {"template": template, "arguments": arguments, "generation_prompt": [True, False], "now": now.isoformat()}
    )
    texts = answer.get("texts", answer.get("done"))
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return texts
    kind, message = answer.get("error"), str(answer.get("message", ""))
    if kind == "refused":
        roles = ", ".join(dict.fromkeys(m.role for m in messages))
        raise UsageError(f"the chat template refuses the conversation: {message}", f"the roles sent are {roles}")
    if kind == "security":
        raise TemplateError(f"the chat template tries to leave its sandbox: {message}", "do not use this checkpoint")
    if kind == "size":
        raise TemplateError(f"the chat template makes too much text: {message}", "the template is faulty or hostile")
    raise TemplateError(f"the chat template fails: {message}", "the template does not fit this conversation")


def _opens_thinking(texts: Sequence[str]) -> bool:
    """True when the generation prompt opens ``<think>`` and leaves it open (contents are concealed here)."""
    full = texts[0]
    history = os.path.commonprefix([full, texts[1]]) if len(texts) > 1 else ""
    prompt = full[len(history) :]
    return prompt.rfind(THINK) > prompt.rfind(END_THINK) or full.rstrip().endswith(THINK)
