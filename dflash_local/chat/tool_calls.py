"""Tool calls in the text of a reply, in the ways that models write them. What is no whole call stays text.

Knows formats only, those with tags from ``tool_formats``. Nothing is evaluated; a call longer than
``MAX_CALL_CHARS`` is text. What comes out depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dflash_local.chat.channels import overlap
from dflash_local.chat.tool_arguments import DECODER, ArgumentTypes
from dflash_local.chat.tool_formats import FORMS, NAME, Body, Form, Schemas, named_call, tool_call
from dflash_local.request import ToolCall

MAX_CALL_CHARS = 2**20
SLICE = 2**12  # characters; every call copies what is left of the text it is fed with
MAX_SPACE = 1024  # before a call; what is more is text
PYTHON_TAG = "<|python_tag|>"

CallFormat = Literal["hermes", "xml", "glm", "kimi", "kimi-k3", "minimax", "gemma", "llama", "harmony", "server"]
GENERAL_FORM: CallFormat = "hermes"  # where the tools are told in words (``chat.tool_prompt``)
Part = str | ToolCall
Tools = Sequence[Mapping[str, Any]]

RECIPIENT = "to=functions."


def format_of(template: str | None) -> CallFormat | None:
    """Return how a model with this chat template writes calls; None when it takes no tools, or in no way known here.

    Those of ``tool_formats.FORMS``, and ``llama``: a reply that is a JSON object (Llama 3.1); ``harmony``: a
    commentary message (gpt-oss). Not of a template: ``server``, where a server of another program finds them itself.
    """
    if not template or "tools" not in template:
        return None
    if "<|channel|>" in template and "functions" in template:
        return "harmony"
    for name, form in FORMS.items():
        if all(text in template for text in form.template):
            return name  # type: ignore[return-value]
    return "llama" if "parameters" in template and "<|start_header_id|>" in template else None


class TaggedParser:
    """Calls between the tags of a format. Space beside a call belongs to the markup and is dropped.

    Attributes:
        broken: texts that began as a call and were none.
    """

    def __init__(self, form: Form, schemas: Schemas) -> None:
        self._form, self._schemas = form, schemas
        self.broken = 0
        self._lenient = False  # the reply has ended: every closing tag counts
        self._held = ""  # text that was not looked at to its end
        self._called = False
        self._stray = False  # a closing tag may follow a call that had no opening one
        self._enter("", "")

    def _enter(self, opened: str, close: str) -> None:
        """Begin a call, or with empty tags the text outside."""
        self._opened, self._close = opened, close
        self._hidden = opened == self._form.pairs[0][0]  # the opening tag is no part of the body
        self._parts: list[str] = []  # of the call's body, each up to a closing tag
        self._part: list[str] = []  # what came of the next one
        self._count = 0  # characters of both
        self._body: Body | None = None
        self._due = 0  # length from which the body is looked at again whether it can still be a call

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        while self._held:
            before = (len(self._held), self._opened)
            parts += self._read_call() if self._opened else self._read_text()
            if (len(self._held), self._opened) == before:
                break
        return parts

    def finish(self) -> list[Part]:
        """Return a last call whose closing tag never came, or the text that looked like one."""
        self._lenient = True
        parts: list[Part] = []
        while self._parts:  # what was taken for an argument's text has no end
            first, *rest = self._parts
            left = "".join([*rest, *self._part, self._held])
            left = left.removeprefix(self._close) if self._hidden else left
            self._parts, self._part, self._held = [], [], ""
            parts += self._at_close(first)
            for at in range(0, len(left), SLICE):
                parts += self.feed(left[at : at + SLICE])
        held, opened = "".join([*self._part, self._held]), self._opened
        self._held = ""
        if not opened:
            return parts if self._called and not held.strip() else parts + self._shown(held)
        body = self._body_of(held)
        if body is not None:
            body.add(held)
        calls = body.calls(held) if body is not None and body.ended(held) else []
        return parts + (list[Part](calls) or self._broken(held, ended=False))

    def _read_text(self) -> list[Part]:
        if self._stray:
            close = self._form.pairs[0][1]
            bare = self._held.lstrip()
            if close.startswith(bare) and bare != close:
                return []  # it may still come
            self._stray = False
            if bare.startswith(close):
                self._held = bare[len(close) :]
        starts = [(at, *pair) for pair in self._form.pairs if (at := self._held.find(pair[0])) >= 0]
        if starts:
            at, opened, close = min(starts)
            text = _without_space(self._held[:at])
            self._enter(opened, close)
            self._held = self._held[at + (len(opened) if self._hidden else 0) :]
            return self._shown(text)
        keep = max(overlap(self._held, opened) for opened, _ in self._form.pairs)
        sure = _without_space(self._held[: len(self._held) - keep])  # the space may stand before a call
        self._held = self._held[len(sure) :]
        return self._shown(sure)

    def _shown(self, text: str) -> list[Part]:
        if self._called:
            text = text.lstrip()
        if text:
            self._called = False
        return _texts(text)

    def _read_call(self) -> list[Part]:
        """Return the calls, once their end is there; text, once they cannot be any."""
        at = self._held.find(self._close)
        end = at if at >= 0 else len(self._held) - overlap(self._held, self._close)
        if self._count + end > MAX_CALL_CHARS:
            text = "".join([*self._parts, *self._part, self._held])
            self._held = text[MAX_CALL_CHARS:]
            return self._broken(text[:MAX_CALL_CHARS], ended=False)
        if at >= 0 and not self._hidden:
            end += len(self._close)
        self._part.append(self._held[:end])
        self._count += end
        self._held = self._held[at + len(self._close) if at >= 0 else end :]
        return self._at_close("".join(self._part)) if at >= 0 else []

    def _at_close(self, part: str) -> list[Part]:
        """Decide about a closing tag: it ends the call, stands inside an argument or shows that this is no call."""
        close = self._close if self._hidden else ""  # elsewhere it is part of the body
        if not self._parts:
            self._body = self._body_of(part)
            self._due = 2 * self._count
        self._parts.append(part)
        if self._body is None:
            return self._broken(part + close, ended=True)
        self._body.add(part)
        if self._body.inside and not self._lenient:
            looked = self._count >= self._due
            if not looked or not self._body.hopeless("".join(self._parts)):
                self._due = 2 * self._count if looked else self._due
                self._part = [close]
                self._count += len(close)
                return []
        text = "".join(self._parts)
        calls = self._body.calls(text)
        if not calls:
            return self._broken(text + close, ended=True)
        self._stray, self._called = not self._hidden, True
        self._enter("", "")
        return list(calls)

    def _body_of(self, part: str) -> Body | None:
        """Return what reads a body that begins like this; None where no such text is a call."""
        bodies = (make(self._schemas, self._lenient) for make in self._form.bodies)
        return next((body for body in bodies if not body.hopeless(part)), None)

    def _broken(self, text: str, *, ended: bool) -> list[Part]:
        """Leave the call: it is text. Where another one was opened in it before its end, that is tried."""
        self.broken += 1
        whole = self._opened + text if self._hidden else text
        again = whole.rfind(self._form.pairs[0][0], 1) if ended else -1
        self._enter("", "")
        if again < 0:
            return self._shown(whole)
        self._held = whole[again:] + self._held
        return self._shown(whole[:again])


class JsonParser:
    """A text that is nothing but JSON: ``{"name": ..., "parameters": ...}``, or, for harmony, the arguments alone.

    Harmony names the recipient in the message's header. Where the text does not begin with it
    (``to=functions.name {``) the one tool offered is meant, or the one whose parameters fit.
    """

    written = '{"name": "{name}", "parameters": {arguments}}'  # see ``Body``
    _recipient = re.compile(r"\s*to=(?:functions\.)?([A-Za-z0-9_.-]{1,128})\s+(?=\{)")

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self.broken = 0
        self._held: list[str] = []
        self._count = 0
        self._kind: Literal["unknown", "json", "plain"] = "unknown"

    def feed(self, text: str) -> list[Part]:
        """Return nothing until the text is whole or cannot be a call."""
        if self._kind == "plain":
            return _texts(text)
        self._held.append(text)
        self._count += len(text)
        if self._kind == "unknown":
            text = "".join(self._held)
            start = text.lstrip()
            if len(text) - len(start) > MAX_SPACE:
                return self._give_up()
            start = start.removeprefix(PYTHON_TAG).lstrip()
            if start.startswith(("{", "to=")):
                self._kind = "json"
            elif not ("to=".startswith(start) or PYTHON_TAG.startswith(start)):
                return self._give_up()
        return self._give_up() if self._count > MAX_CALL_CHARS else []

    def finish(self) -> list[Part]:
        calls = self._calls("".join(self._held)) if self._held else None
        if not calls:
            return self._give_up()
        self._held.clear()
        return list(calls)

    def _give_up(self) -> list[Part]:
        text, self._kind = "".join(self._held), "plain"
        self._held.clear()
        self.broken += text.lstrip().startswith(("to=", PYTHON_TAG))
        return _texts(text)

    def _calls(self, text: str) -> list[ToolCall] | None:
        """Return all calls of the text, parted by ``;`` or space; None when anything else stands there."""
        rest, calls = text.strip().removeprefix(PYTHON_TAG), []
        while rest := rest.strip("; \n\t\r"):
            named = self._recipient.match(rest)
            rest = rest[named.end() :] if named else rest
            try:
                content, end = DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            call = self._of(content, named[1] if named else None)
            if call is None:
                return None
            calls.append(call)
            rest = rest[end:]
        return calls

    def _of(self, content: object, recipient: str | None) -> ToolCall | None:
        if not isinstance(content, dict):
            return None
        if recipient is not None:
            return tool_call(self._schemas, recipient, content)
        whole = named_call(self._schemas, content, ("parameters", "arguments"))
        if whole is not None:
            return whole if whole.name in self._schemas else None
        fitting = [name for name, function in self._schemas.items() if ArgumentTypes(function).fit(content)]
        return tool_call(self._schemas, fitting[0], content) if len(fitting) == 1 else None


class ServerParser(JsonParser):
    """Calls that a vLLM or SGLang server found in the text itself: ``name {arguments}``, a line each."""

    _recipient = re.compile(rf"({NAME.pattern})\s+(?=\{{)")

    def feed(self, text: str) -> list[Part]:
        """Return nothing until the text is whole."""
        self._kind = "json"
        return super().feed(text)


class CommentaryParser(JsonParser):
    """Calls of harmony, which may stand behind a few words to the user in the same channel.

    Attributes:
        written: a call's whole message, header and all. thought: a message that may stand before it; ``{text}`` is any.
    """

    written = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"
    thought = "<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._words = ""

    def feed(self, text: str) -> list[Part]:
        """Return words as they come, a call at the end."""
        if self._kind == "plain":
            return self._after_words(text, 0)
        given_up = "".join(part for part in super().feed(text) if isinstance(part, str))
        # Where it began with a recipient, that one was no call.
        return self._after_words(given_up, len(given_up) - len(given_up.lstrip()) + 1) if given_up else []

    def finish(self) -> list[Part]:
        words, self._words = self._words, ""
        return _texts(words) + super().finish()

    def _after_words(self, text: str, start: int) -> list[Part]:
        """Return the words before a recipient, looked for from ``start`` on, which begins a call."""
        text, self._words = self._words + text, ""
        at = text.find(RECIPIENT, start)
        if at < 0:
            keep = overlap(text, RECIPIENT)
            self._words = text[len(text) - keep :]
            return _texts(text[: len(text) - keep])
        self._kind, self._count = "unknown", 0
        return _texts(text[:at]) + self.feed(text[at:])


CallParser = TaggedParser | JsonParser


def call_parser(form: CallFormat, tools: Tools) -> CallParser:
    """Return the parser for a reply in this format. ``tools`` are the schemas that were offered."""
    functions = [function for tool in tools if isinstance(function := tool.get("function"), Mapping)]
    schemas = {function["name"]: function for function in functions if isinstance(function.get("name"), str)}
    if form in FORMS:
        return TaggedParser(FORMS[form], schemas)
    return {"server": ServerParser, "harmony": CommentaryParser}.get(form, JsonParser)(schemas)


def _texts(text: str) -> list[Part]:
    return [text] if text else []


def _without_space(text: str) -> str:
    """Return the text without the space at its end, of which not more than ``MAX_SPACE`` is taken off."""
    return text[: max(len(text.rstrip()), len(text) - MAX_SPACE)]
