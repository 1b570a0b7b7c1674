"""A request: messages, sampling parameters and limits, checked here and nowhere below."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dflash_local.errors import ContextError, UsageError
from dflash_local.events import Mode

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
MAX_TEMPERATURE = 5.0
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
MAX_NEW_TOKENS = 1_000_000
MAX_STOPS = 128
MAX_STOP_CHARS = 1_000
MAX_MESSAGE_CHARS = 8_000_000
MAX_PROMPT_IDS = 4_000_000
MAX_CHARS = 4 * 2**20  # of all messages and tools together
MAX_BLOCK_SIZE = 64
MAX_TOP_LOGPROBS = 20
MAX_CONSTRAINT_CHARS = 2**18
MAX_TOOLS = 512
MAX_MESSAGES = 10_000
MAX_DEPTH = 64  # of tool schemas and arguments: templates and JSON libraries go through them by recursion

ConstraintKind = Literal["json_schema", "json_object", "regex", "lark"]
Role = Literal["system", "user", "assistant", "tool"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Refuse a value that is not a finite number within ``low..high``, naming it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, got {value!r}")
    # Compared before anything else: an integer too large for a float cannot even be asked whether it is finite.
    if not low <= value <= high:
        raise UsageError(f"{name} {str(value)[:40]} is outside {low:g}..{high:g}")


def check_integer(name: str, value: int, low: int, high: int) -> None:
    """Refuse a value that is not an integer within ``low..high``, naming it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise UsageError(f"{name} {value} is outside {low}..{high}")


def check_json(name: str, value: object) -> int:
    """Return the size of a JSON value: how many values it holds, and the characters of its texts and keys.

    Raises:
        UsageError: it is nested more than ``MAX_DEPTH`` deep or larger than ``MAX_CHARS``.
    """
    size, level = 0, [value]
    for _ in range(MAX_DEPTH + 1):
        size += len(level) + sum(len(one) for one in level if isinstance(one, str))
        if size > MAX_CHARS:
            raise UsageError(f"{name} is larger than {MAX_CHARS} characters", "send less")
        parts = [one for one in level if isinstance(one, (Mapping, list, tuple))]
        if not parts:
            return size
        level = [one for part in parts for one in ((*part, *part.values()) if isinstance(part, Mapping) else part)]
    raise UsageError(f"{name} is nested more than {MAX_DEPTH} deep", "send it flatter")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's token is chosen. Temperature 0 (or under 1e-5) is greedy.

    Filters act in the order penalties, temperature, top-k, top-p, min-p. ``top_k`` 0 is off, ``top_p`` 0 keeps the best
    token alone; a ``seed`` of None draws a fresh 64-bit number when the request starts. A negative seed becomes the
    unsigned number of the same 64 bits (two's complement).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_integer("top_k", self.top_k, 0, 2**31)
        check_number("top_p", self.top_p, 0.0, 1.0)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            check_integer("seed", self.seed, MIN_SEED, MAX_SEED)
            object.__setattr__(self, "seed", self.seed % 2**64)

    @property
    def greedy(self) -> bool:
        """Return whether no noise is drawn."""
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Return whether sampling leaves out unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        """Return whether any penalty changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a reply ends: at this many tokens, or before any of these strings."""

    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integer("max_new_tokens", self.max_new_tokens, 0, MAX_NEW_TOKENS)
        if len(self.stop) > MAX_STOPS:
            raise UsageError(f"{len(self.stop)} stop strings given, {MAX_STOPS} allowed")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UsageError(f"a stop string must be non-empty text, got {text!r}")
            if len(text) > MAX_STOP_CHARS:
                raise UsageError(f"a stop string of {len(text)} characters is longer than {MAX_STOP_CHARS}")


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the reply's text must be; its thinking is free. A model's engine refuses what it cannot hold it to.

    ``text``: a JSON schema, a regular expression of the whole text (Rust's syntax), a grammar (Lark's, or GBNF); of
    ``json_object``, which is any object, nothing.
    """

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise UsageError(f"unknown constraint {self.kind!r}", f"use one of {', '.join(get_args(ConstraintKind))}")
        if len(self.text) > MAX_CONSTRAINT_CHARS:
            raise UsageError(
                f"the {self.kind} has {len(self.text)} characters, {MAX_CONSTRAINT_CHARS} allowed", "make it smaller"
            )
        if self.kind != "json_object" and not self.text.strip():
            raise UsageError(f"the {self.kind} is empty", "leave it out")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote: ``arguments`` is the JSON text of one object."""

    id: str
    name: str
    arguments: str


def read_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call. UsageError: no JSON object, or nested more than ``MAX_DEPTH`` deep."""
    name = f"the arguments of tool call {call.name!r}"
    try:
        arguments = json.loads(call.arguments or "{}")
    except RecursionError:
        raise UsageError(f"{name} are nested more than {MAX_DEPTH} deep", "send them flatter") from None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise UsageError(f"{name} are not a JSON object", "send one JSON object")
    check_json(name, arguments)
    return arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. Templates may drop ``thinking``. ``tool_call_id``, ``name``: what it answers."""

    role: Role
    content: str
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise UsageError(f"unknown role {self.role!r}", f"use one of {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise UsageError(f"the content of a {self.role} message must be text, got {self.content!r}")

    @property
    def size(self) -> int:
        """Return how many characters all its texts have."""
        calls = (text for call in self.tool_calls for text in (call.id, call.name, call.arguments))
        return sum(map(len, (self.content, self.thinking, self.tool_call_id, self.name, *calls)))


@dataclass(frozen=True, slots=True)
class Request:
    """One reply to produce.

    Exactly one of ``messages`` (rendered through the chat template), ``prompt`` (text to go on with)
    and ``prompt_ids`` (used as they are) is given.

    Attributes:
        block_size: None means the drafter's trained one; 1 proposes nothing.
        tools: JSON schemas of functions, for templates that take them.
        reasoning_effort: for templates that take one; None leaves it to the template.
        logprobs: likeliest tokens to report beside each emitted one, 0 for that one alone; None for no report.
        return_token_ids: report the prompt's ids as well (those of the reply always are).
        constraint: what the reply's text must be.
        must_call: names of tools: the answer is a call of one of them. Where there are several, calls may be several.
        continues: the last message is a reply that was cut off, and this one goes on where it ended.
    """

    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits = field(default_factory=Limits)
    mode: Mode = "dflash"
    block_size: int | None = None
    thinking: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    reasoning_effort: Effort | None = None
    logprobs: int | None = None
    return_token_ids: bool = False
    constraint: Constraint | None = None
    must_call: tuple[str, ...] = ()
    continues: bool = False

    def __post_init__(self) -> None:
        if [bool(self.messages), bool(self.prompt), bool(self.prompt_ids)].count(True) != 1:
            raise UsageError("give either messages, a prompt or prompt ids", "an empty prompt is not a request")
        if len(self.messages) > MAX_MESSAGES:
            raise UsageError(f"{len(self.messages)} messages given, {MAX_MESSAGES} allowed", "send fewer")
        if self.messages and not any(m.content.strip() or m.tool_calls for m in self.messages if m.role != "system"):
            raise UsageError("the prompt is empty", "type something to answer")
        if len(self.prompt_ids) > MAX_PROMPT_IDS:
            raise ContextError(f"{len(self.prompt_ids)} prompt ids given, {MAX_PROMPT_IDS} allowed", "send fewer")
        for token_id in self.prompt_ids:
            check_integer("prompt id", token_id, 0, 2**31)
        if self.mode not in ("dflash", "ar"):
            raise UsageError(f"unknown mode {self.mode!r}", "use dflash or ar")
        if self.block_size is not None:
            check_integer("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if len(self.prompt) > MAX_MESSAGE_CHARS:
            raise UsageError(f"the prompt has {len(self.prompt)} characters, {MAX_MESSAGE_CHARS} allowed")
        if len(self.tools) > MAX_TOOLS:
            raise UsageError(f"{len(self.tools)} tools given, {MAX_TOOLS} allowed")
        if self.reasoning_effort not in (None, *EFFORTS):
            raise UsageError(f"unknown reasoning_effort {self.reasoning_effort!r}", f"use one of {', '.join(EFFORTS)}")
        if self.continues and (not self.messages or self.messages[-1].role != "assistant"):
            raise UsageError("there is no reply to go on with", "the last message must be the assistant's")
        if self.must_call and self.constraint is not None:
            raise UsageError("a call is forced and a format is asked for as well", "send one of them")
        size = sum(check_json(f"tools[{index}]", tool) for index, tool in enumerate(self.tools))
        size += sum(message.size for message in self.messages)
        if size > MAX_CHARS:
            raise ContextError(f"messages and tools have {size} characters, {MAX_CHARS} allowed", "shorten them")


def user_request(prompt: str, system: str = "", **fields: object) -> Request:
    """Return a single-turn request from one prompt text and an optional system text."""
    head: Iterable[Message] = (Message("system", system),) if system else ()
    return Request(messages=(*head, Message("user", prompt)), **fields)  # type: ignore[arg-type]


def fresh_seed() -> int:
    """Return 64 random bits."""
    return secrets.randbits(64)
