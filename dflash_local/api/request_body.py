"""A JSON body to the record that a dialect declares, and the fields that all of OpenAI's kind share.

Strict: duplicate keys, NaN, wrong types and what would change the text and cannot be done are errors that name the
field. Other fields are taken, and named in the log and in the reply. A field that is absent or null takes the model's
own default, as in vLLM.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from msgspec import Meta

from dflash_local.api.constraint_fields import ConstraintFields, read_constraint
from dflash_local.api.log import LOGGER
from dflash_local.api.refusals import FieldError, check_field
from dflash_local.chat.tool_prompt import in_format
from dflash_local.errors import UsageError
from dflash_local.events import Mode
from dflash_local.request import (
    MAX_BLOCK_SIZE,
    MAX_NEW_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Limits,
    Message,
    Request,
    SamplingParams,
)
from dflash_local.schema import MAX_SHOWN, InvalidValue, OpenRecord, Record, convert, quoted, undeclared
from dflash_local.service.backend import Model

MAX_ITEMS = 10_000  # of a list
MAX_BRACKETS = 200_000  # texts of half a million tokens have fewer; reading millions holds up everybody for seconds
_PARSING = threading.Lock()  # one body at a time: the more threads read at once, the later the event loop has its turn
MAX_NAMED = 20  # fields that one reply names
# Fields that are taken without effect: name -> why, as the log has it. So are those that nobody here knows.
TAKEN = {
    "user": "not kept",
    "metadata": "not kept",
    "store": "nothing is stored",
    "safety_identifier": "not kept",
    "prompt_cache_key": "the last prompts are cached anyway",
    "prompt_cache_retention": "the last prompts are cached anyway",
    "service_tier": "there is one tier",
    "parallel_tool_calls": "the model decides how many calls it makes",
    "prediction": "the drafter predicts",
    "verbosity": "the model is not told",
    "include_obfuscation": "chunks are sent as they are",
    "strict": "formats and forced calls are held to, other calls are not",
    "cache_control": "the last prompts are cached anyway",
    "client_metadata": "not kept",
    "include": "nothing is sent besides",
    "context_management": "the conversation is taken as it is sent",
    "betas": "there are none here",
    "defer_loading": "all tools are offered",
    "budget_tokens": "thoughts have no budget of their own",
    "top_logprobs": "chats and completions tell them",
}
Refused = Mapping[str, tuple[str, tuple[object, ...]]]
# field -> (why, values that ask for nothing): named by OpenAI or vLLM, not done here
REFUSED: Refused = {
    "logit_bias": ("leave it out", ({},)),
    "n": ("one reply is made; send the request again for more", (1,)),
    "best_of": ("one reply is made; leave it out", (1,)),
    "min_tokens": ("leave it out", (0,)),
    "ignore_eos": ("leave it out", (False,)),
    "skip_special_tokens": ("they are always skipped", (True,)),
    "grammar": ("use structured_outputs", ("",)),
    "json_schema": ("use response_format", ({},)),
    "regex": ("use structured_outputs", ()),
    "ebnf": ("use structured_outputs", ()),
    "repeat_penalty": ("use repetition_penalty", (1,)),
    "typical_p": ("leave it out", (1,)),
    "mirostat": ("leave it out", (0,)),
    "dry_multiplier": ("leave it out", (0,)),
    "xtc_probability": ("leave it out", (0,)),
    "use_beam_search": ("leave it out", (False,)),
    "bad_words": ("leave it out", ([],)),
    "allowed_token_ids": ("leave it out", ([],)),
    "stop_token_ids": ("use stop", ([],)),
    "n_predict": ("use max_tokens", (-1,)),
    "include_stop_str_in_output": ("leave it out", (False,)),
}
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
Count = Annotated[int, Meta(ge=0, le=MAX_NEW_TOKENS)]
ToolName = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="a tool's name: letters, digits, _ . - and 128 at most"),
]
TEXT_ONLY = "text: the model reads no pictures, sound or files"
# What the page of the endpoint shows of a conversation and a prompt, for people and for programs that make requests.
QUESTION = "Count from 3 to 7."
CONVERSATION = [{"role": "user", "content": QUESTION}]
TextOnly = Annotated[Literal["text"], Meta(description=TEXT_ONLY)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]


class TextPart(OpenRecord, frozen=True):
    """A part of a content that is text."""

    type: TextOnly
    text: str


Texts = str | Annotated[list[TextPart], Meta(max_length=MAX_ITEMS)]


class StreamOptions(OpenRecord, frozen=True):
    """What a stream holds besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool, Meta(description="false: figures come at the end")] | None = None


class GenerationBody(ConstraintFields, frozen=True, kw_only=True):
    """The fields that chat and completion bodies share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    mode: Mode | None = None
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class TemplateArguments(Record, frozen=True):
    """The one argument of a chat template that may be set."""

    enable_thinking: bool | None = None


Body = TypeVar("Body", bound=Record | OpenRecord)
Generation = TypeVar("Generation", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A body, read.

    Attributes:
        record: as sent. include_usage: the figures come in a last chunk of a stream. taken: fields without effect, with
            why.
    """

    request: Request
    record: GenerationBody
    include_usage: bool
    taken: tuple[str, ...]

    @property
    def model(self) -> str:
        return self.record.model

    @property
    def stream(self) -> bool:
        return bool(self.record.stream)


def parse(body: bytes) -> Any:
    """Return the value of a JSON text. FieldError: not UTF-8 or JSON, a key twice, NaN, too deep or too many."""
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise FieldError("body", f"the body has more than {MAX_BRACKETS:,} opening brackets", "send less")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FieldError("body", f"the body is not UTF-8: byte {error.start}") from error
    try:
        with _PARSING:
            return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise FieldError("body", "the body is nested too deep") from error
    except ValueError as error:
        raise FieldError("body", f"the body is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FieldError(twice[:MAX_SHOWN], f"the key {quoted(twice)} stands twice in one object")
    return content


def _constant(word: str) -> NoReturn:
    raise FieldError("body", f"{word} is not a JSON number")


def forced_tools(asked: str | None, name: str | None, offered: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of tools of which one must be called, see ``Request.must_call``.

    Args:
        asked: "required" where any may be. name: of the one that is named.

    Raises:
        FieldError: there is no such tool.
    """
    if asked != "required" and name is None:
        return ()
    names = tuple(tool["function"]["name"] for tool in offered)
    if name is not None and name not in names:
        raise FieldError("tool_choice", f"tool_choice names {quoted(name)}, which is not among the tools")
    if not names:
        raise FieldError("tool_choice", "tool_choice asks for a call, and there are no tools", "send tools")
    return names if name is None else (name,)


def function_schema(path: str, name: str, description: str | None, parameters: Any) -> Mapping[str, Any]:
    """Return the schema of a tool as chat templates take it. ``path``: of its parameters, for errors."""
    check_field(path, parameters)
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def read_record(kind: type[Body], value: Any) -> Body:
    """Return a parsed body as a record. FieldError: a field is wrong, missing or unknown."""
    try:
        return convert(value, kind)
    except InvalidValue as error:
        code = "unknown_parameter" if error.unknown else None
        path = error.path.replace("'", "")[:MAX_SHOWN]
        raise FieldError(
            path or "body", str(error) if path else f"the body {error.problem}", error.hint, code
        ) from None


def read_generation(kind: type[Generation], body: bytes, refused: Refused) -> tuple[Generation, dict[str, Any]]:
    """Return a body as a record and as it came.

    Args:
        refused: fields that the dialect knows and does not support, besides ``REFUSED``.

    Raises:
        FieldError: a field is wrong or not supported.
    """
    sent = parse(body)
    if not isinstance(sent, dict):
        raise FieldError("body", f"the body must be a JSON object, got {quoted(sent)}")
    # JSON makes no difference between 5 and 5.0.
    sent = {key: int(one) if type(one) is float and one.is_integer() else one for key, one in sent.items()}
    for key, (why, harmless) in {**refused, **REFUSED}.items():
        value = sent.pop(key, None)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise FieldError(key, f"unsupported: {key}", why, "unsupported_parameter")
    return read_record(kind, sent), sent


def _taken(sent: dict[str, Any], kind: type[GenerationBody], left_out: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each field without effect, at most ``MAX_NAMED``, and those of what is left out; write down
    those that are new.
    """
    lines = []
    for path, close in islice(undeclared(sent, kind), MAX_NAMED):
        unknown = f"not known here; did you mean {close!r}?" if close else "not known here"
        lines.append(f"{path[:MAX_SHOWN]}: {TAKEN.get(path.rpartition('.')[2], unknown)}")
    lines += left_out
    for line in lines:
        _write_once(line)
    return tuple(lines)


@lru_cache(maxsize=1024)
def _write_once(line: str) -> None:
    LOGGER.info("taken without effect: %s", line)


def parsed_request(
    record: GenerationBody,
    sent: dict[str, Any],
    model: Model,
    max_new_tokens: int = MAX_NEW_TOKENS,
    left_out: Iterable[str] = (),
    schema: Mapping[str, Any] | None = None,
    **own: Any,
) -> ParsedRequest:
    """Return what a record of a model asks for.

    Args:
        sent: as it came. max_new_tokens: where the body does not say. left_out: lines of what has no effect, though its
            field has. schema: of the JSON that the dialect's own format asks for; messages tell the model, too. own:
            further fields of ``Request``.

    Raises:
        FieldError: fields contradict each other, or a number is outside of its range.
    """
    stream, options = bool(record.stream), record.stream_options
    if options is not None and not stream:
        raise FieldError("stream_options", "stream_options without stream", "set stream to true")
    if options is not None and options.continuous_usage_stats:
        raise FieldError("stream_options.continuous_usage_stats", "figures come at the end", "leave it out")
    counts = {count for count in (record.max_tokens, record.max_completion_tokens) if count is not None}
    if len(counts) > 1:
        raise FieldError("max_tokens", "max_tokens and max_completion_tokens differ", "send one of them")
    stop = record.stop or ()
    if "messages" in own:
        own["messages"] = _turns(own["messages"])
        if schema is not None:
            own["messages"] = in_format(own["messages"], schema)
    request = Request(
        sampling=_sampling(record, model),
        limits=Limits(counts.pop() if counts else max_new_tokens, (stop,) if isinstance(stop, str) else tuple(stop)),
        mode=record.mode or model.mode,
        block_size=record.block_size,
        return_token_ids=bool(record.return_token_ids),
        constraint=read_constraint(record, schema),
        **own,
    )
    include_usage = bool(options and options.include_usage)
    return ParsedRequest(request, record, include_usage, _taken(sent, type(record), left_out))


def _turns(sent: Iterable[Message]) -> tuple[Message, ...]:
    """Return turns with the system's first ones in one; a later one is the user's: chat templates refuse it there."""
    turns = list(sent)
    head = list(takewhile(lambda turn: turn.role == "system", turns))
    rest = (replace(turn, role="user") if turn.role == "system" else turn for turn in turns[len(head) :])
    system = "\n\n".join(turn.content for turn in head if turn.content)
    return (*(replace(turn, content=system) for turn in head[:1]), *rest)


def _sampling(record: GenerationBody, model: Model) -> SamplingParams:
    """Return the model's own sampling with the body's fields in it."""
    given = {name: getattr(record, name) for name in NUMBERS}
    given["top_k"] = 0 if record.top_k == -1 else record.top_k  # vLLM writes "off" so
    try:
        return replace(model.sampling, **{name: value for name, value in given.items() if value is not None})
    except UsageError as error:
        raise FieldError(error.message.split(" ", 1)[0], error.message, error.hint) from error
