"""Messages to ids through the checkpoint's chat template, rendered in a process that can be killed.

A base model has no template: its prompt is the contents, joined by an empty line, after BOS where the tokenizer
adds one; roles and thinking are dropped.
"""

from __future__ import annotations

import json
import os.path
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from dflash_local.chat.channels import END_THINK, THINK
from dflash_local.chat.stop_ids import HARMONY_TAGS
from dflash_local.chat.tokenizer import Tokenizer
from dflash_local.chat.tokenizer_files import takes_effort
from dflash_local.chat.tool_calls import format_of
from dflash_local.chat.tool_prompt import SHARE, as_text, has_prompt, in_system, tool_prompt, with_prompt
from dflash_local.errors import ContextError, TemplateError, UsageError
from dflash_local.request import MAX_CHARS, Effort, Message, ToolCall, read_arguments
from dflash_local.worker.process import ChildLimits, WorkerError, WorkerProcess

ANALYSIS, FINAL = ("<|channel|>" + name + "<|message|>" for name in ("analysis", "final"))  # harmony's messages
END_ANALYSIS = "<|end|><|start|>assistant"
PROCESS = WorkerProcess(Path(__file__).with_name("template_worker.py"), ("jinja2", "markupsafe"))
ONE_CALL = ("harmony", "llama")  # whose templates take one call a message, and lose or refuse more
LIMITS = ChildLimits(seconds=20.0, mebibytes=512, processor_seconds=2.0)  # a busy machine is no fault of a template
SMALL_CHARS, SMALL_MESSAGES = 2**16, 256  # what a template must cope with: where it does not, it is to blame


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
        """Return ``value`` (JSON-like) with every string in it made harmless."""
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
        """Return ``text`` with every marker replaced by what it hides."""
        if not self._hidden:
            return text
        return re.sub(f"{self._nonce}[0-9a-f]{{8}}", lambda match: self._hidden.get(match[0], ""), text)


def _shared(left: str, right: str) -> int:
    """Return the length of the longest proper end of ``left`` that begins ``right``."""
    limit = min(len(left), len(right))
    return next((n for n in range(limit, 0, -1) if left.endswith(right[:n])), 0)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    effort: Effort | None = None,
    continues: bool = False,
    now: datetime | None = None,
    context: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Rendered:
    """Return the ids of a conversation, ready for the reply.

    Where the template takes no tools they, their calls and their results are written as text (``tool_prompt``).

    Args:
        thinking: passed as ``enable_thinking``, always.
        tools: JSON schemas of functions that the model may call.
        effort: passed as ``reasoning_effort`` where the template reads it; elsewhere a notice says that it does not.
        continues: the last message is a reply that was cut off: it is not ended, and nothing begins behind it.
        now: what ``strftime_now`` returns in the template; the present by default.
        context: ids that the session holds. Tools in words that would take more than half of them are left out,
            with a notice.
        cancelled: polled all the while; True ends it.

    Raises:
        UsageError: the template refuses the conversation (its own words are given), or nothing is left.
        ContextError: more ids than ``context``, or a large conversation that takes the template over 2 s or 4 M
            characters.
        TemplateError: it fails, tries to leave the sandbox, or takes that for a small one.
        TokenizerError: see ``Tokenizer.encode``. Interrupted: cancelled.
    """
    now = now or datetime.now()
    prompt, notices = "", tuple[str, ...]()
    if effort is not None and not takes_effort(tokenizer.template):
        notices = (f"reasoning_effort {effort} changes nothing: the chat template has no such setting",)
        effort = None
    if format_of(tokenizer.template) is None:
        messages = as_text(messages, lambda call: _call(call)["function"])
        prompt, left_out = _fitting(tokenizer, tool_prompt(tools or ()), context, cancelled)
        notices += left_out
        tools = None
    if tokenizer.template is None:
        shown = in_system(messages, prompt) if prompt else messages
        text = "\n\n".join(message.content for message in shown)
        ids = [*tokenizer.begin, *tokenizer.encode(text, context, cancelled)]
        return _not_empty(Rendered(tuple(ids), len(ids), False, notices))
    begun = messages[-1] if continues else None
    messages, tools = _as_taken(tokenizer.template, messages[:-1] if continues else messages, tools or ())
    concealer = Concealer(tokenizer.control_pattern, tokenizer.control_texts)
    given = {"bos_token": tokenizer.bos_text, "eos_token": tokenizer.eos_text, "reasoning_effort": effort}
    arguments: dict[str, Any] = {
        "tools": concealer.conceal(list(tools)) if tools else None,
        "enable_thinking": thinking,
        **{name: text for name, text in given.items() if text},
    }
    places = with_prompt(messages, prompt)
    for conversation in places:
        arguments["messages"] = [_as_dict(message, concealer) for message in conversation]
        try:
            texts = _render_texts(tokenizer.template, arguments, now, conversation, cancelled)
        except UsageError:
            if conversation is places[-1] or any(message.role == "system" for message in messages[:1]):
                raise
            continue
        if not prompt or has_prompt(texts[0]):
            break
    full, *history = (concealer.reveal(tokenizer.with_controls(text)) for text in texts)
    opens_thinking = _opens_thinking(texts)
    if begun is not None:
        full += _beginning(tokenizer, begun, opens_thinking)
        opens_thinking = not begun.content and (opens_thinking or bool(begun.thinking))
    ids = tokenizer.encode(full, context, cancelled)
    before_reply = tokenizer.encode(history[0], None, cancelled) if history else []
    stable = len(os.path.commonprefix([ids, before_reply]))  # type: ignore[type-var]
    return _not_empty(Rendered(tuple(ids), stable, opens_thinking, notices))


def _as_taken(
    template: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
    """Return a conversation and its tools in a way that templates of a format do not refuse."""
    form = format_of(template)
    if form in ONE_CALL:
        messages = _one_call_each(messages)
    if form == "harmony":
        return list(map(_for_harmony, messages)), list(map(_described, tools))
    return messages, tools


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with a message for each call, its results behind it."""
    written: list[Message] = []
    left = deque(messages)
    while left:
        message = left.popleft()
        if len(message.tool_calls) < 2:
            written.append(message)
            continue
        results: dict[str, list[Message]] = {}  # by the call that they answer
        while left and left[0].role == "tool":
            results.setdefault(left[0].tool_call_id, []).append(left.popleft())
        for call in message.tool_calls:
            written += [replace(message, tool_calls=(call,)), *results.pop(call.id, ())]
            message = Message("assistant", "")
        written += chain.from_iterable(results.values())
    return written


def _for_harmony(message: Message) -> Message:
    """Return a message with its words before a call as part of its thinking: gpt-oss's template refuses both, and has
    no other place for them.
    """
    if not (message.tool_calls and message.content and message.thinking):
        return message
    return replace(message, content="", thinking=f"{message.thinking}\n\n{message.content}")


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool that has a description, without which gpt-oss's template fails."""
    function = tool.get("function")
    return {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else tool


def _beginning(tokenizer: Tokenizer, message: Message, opens_thinking: bool) -> str:
    """Return a reply that was cut off as the model wrote it, behind a prompt that opens its thinking or does not; in
    harmony behind one that ends with ``<|start|>assistant``.
    """
    if all(tokenizer.is_added(tag) for tag in HARMONY_TAGS):
        analysis, final, end = (tokenizer.with_controls(text) for text in (ANALYSIS, FINAL, END_ANALYSIS))
        thought = f"{analysis}{message.thinking}" if message.thinking else ""
        return f"{thought}{end if thought else ''}{final}{message.content}" if message.content else thought
    opening, closing = (tokenizer.with_controls(tag) for tag in (THINK, END_THINK))
    thought = message.thinking if opens_thinking or not message.thinking else f"{opening}\n{message.thinking}"
    if not message.content:
        return thought
    return f"{thought}\n{closing}\n\n{message.content}" if thought or opens_thinking else message.content


def _fitting(
    tokenizer: Tokenizer, prompt: str, context: int | None, cancelled: Callable[[], bool]
) -> tuple[str, tuple[str, ...]]:
    """Return the tools in words, or nothing and why: by them alone, so that it stays as the conversation grows."""
    if not prompt or context is None:
        return prompt, ()
    try:
        tokenizer.encode(prompt, context // SHARE, cancelled)
    except ContextError:
        return "", (f"the tools were left out of the prompt: more than half of the context of {context} tokens",)
    return prompt, ()


def _not_empty(rendered: Rendered) -> Rendered:
    if not rendered.ids:
        raise UsageError("the prompt is empty: the messages come to no token", "type something to answer")
    return rendered


def _as_dict(message: Message, concealer: Concealer) -> dict[str, Any]:
    """Return a message as templates expect it; ``thinking`` under both names in use (gpt-oss reads the second)."""
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
    """Return a call as templates expect it: with its arguments as an object, which they write in their own way."""
    arguments = read_arguments(call)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _render_texts(
    template: str, arguments: dict[str, Any], now: datetime, messages: Sequence[Message], cancelled: Callable[[], bool]
) -> list[str]:
    """Return the renderings with and, where the template can, without the generation prompt."""
    flags = {"generation_prompt": [True, False], "max_chars": MAX_CHARS, "now": now.isoformat()}
    request = json.dumps({"template": template, "arguments": arguments, **flags}).encode()
    try:
        answer: dict[str, Any] = json.loads(PROCESS.request(request, LIMITS, cancelled))
    except WorkerError:
        needs = f"needs more than {LIMITS.processor_seconds:g} s, too much memory, or breaks its process"
        answer = {"error": "worker", "message": needs}
    texts = answer.get("texts", answer.get("done"))
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return texts
    kind, message = answer.get("error"), str(answer.get("message", ""))
    size = len(request) - len(template)
    if kind in ("worker", "size") and (size > SMALL_CHARS or len(messages) > SMALL_MESSAGES):
        raise ContextError(
            f"the conversation is too large for the chat template: {len(messages)} messages, {size} characters",
            "shorten it",
        )
    if kind == "refused":
        roles = ", ".join(dict.fromkeys(m.role for m in messages))
        raise UsageError(f"the chat template refuses the conversation: {message}", f"the roles sent are {roles}")
    if kind == "security":
        raise TemplateError(f"the chat template tries to leave its sandbox: {message}", "do not use this checkpoint")
    if kind == "worker":
        hint = "the template of this checkpoint is faulty or hostile; use a checkpoint you trust"
        raise TemplateError(f"the chat template {message}", hint)
    if kind == "size":
        raise TemplateError(f"the chat template makes too much text: {message}", "the template is faulty or hostile")
    raise TemplateError(f"the chat template fails: {message}", "the template does not fit this conversation")


def _opens_thinking(texts: Sequence[str]) -> bool:
    """Return whether the generation prompt opens ``<think>`` and leaves it open (contents are concealed here)."""
    full = texts[0]
    history = os.path.commonprefix([full, texts[1]]) if len(texts) > 1 else ""
    prompt = full[len(history) :]
    return prompt.rfind(THINK) > prompt.rfind(END_THINK) or full.rstrip().endswith(THINK)
