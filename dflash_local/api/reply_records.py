"""What the endpoint's answers hold, for the page that describes it; all may hold more than is told here."""

from __future__ import annotations

from typing import Any, Literal

from dflash_local.schema import OpenRecord


class OpenAIError(OpenRecord, frozen=True):
    """An error, as OpenAI's clients read it."""

    class Told(OpenRecord, frozen=True):
        """What is wrong, and the field that is."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Told


class AnthropicError(OpenRecord, frozen=True):
    """An error, as Anthropic's clients read it."""

    class Said(OpenRecord, frozen=True):
        """What is wrong."""

        type: str
        message: str

    type: Literal["error"]
    error: Said


class CompletionUsage(OpenRecord, frozen=True):
    """Tokens of the prompt and the reply."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(OpenRecord, frozen=True):
    """A whole chat completion."""

    class Choice(OpenRecord, frozen=True):
        """The reply."""

        index: int
        message: dict[str, Any]
        logprobs: dict[str, Any] | None
        finish_reason: Literal["stop", "length", "tool_calls"]

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage | None
    metrics: dict[str, Any]


class Completion(OpenRecord, frozen=True):
    """A whole text completion."""

    class TextChoice(OpenRecord, frozen=True):
        """The reply."""

        index: int
        text: str
        logprobs: dict[str, Any] | None
        finish_reason: Literal["stop", "length"]

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage | None
    metrics: dict[str, Any]


class AssistantMessage(OpenRecord, frozen=True):
    """A whole message of Anthropic's API."""

    class BlockUsage(OpenRecord, frozen=True):
        """Tokens of the prompt, those found in the cache apart, and of the reply."""

        input_tokens: int
        cache_creation_input_tokens: int
        cache_read_input_tokens: int
        output_tokens: int

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: BlockUsage
    metrics: dict[str, Any]


class TokenCount(OpenRecord, frozen=True):
    """How long a prompt is."""

    input_tokens: int


class WholeResponse(OpenRecord, frozen=True):
    """A whole response of OpenAI's: https://www.openresponses.org/specification."""

    class ResponseUsage(OpenRecord, frozen=True):
        """Tokens of the prompt and the reply."""

        input_tokens: int
        output_tokens: int
        total_tokens: int
        input_tokens_details: dict[str, int]
        output_tokens_details: dict[str, int]

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    incomplete_details: dict[str, str] | None
    model: str
    previous_response_id: None
    instructions: str | None
    output: list[dict[str, Any]]
    error: None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    truncation: Literal["disabled"]
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: dict[str, str | None]
    usage: ResponseUsage
    max_output_tokens: int | None
    max_tool_calls: int | None
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    metrics: dict[str, Any]


class ListedModels(OpenRecord, frozen=True):
    """The served model, in a list."""

    data: list[dict[str, Any]]


class OneModel(OpenRecord, frozen=True):
    """The served model."""

    id: str


class Health(OpenRecord, frozen=True):
    """Whether requests are taken."""

    status: Literal["ok", "error"]
    state: str
    running: int
    waiting: int
    last_progress_s: float | None
    load: dict[str, Any] | None


class ServerStatus(OpenRecord, frozen=True):
    """What is loaded, and how."""

    version: str
    pid: int
    model: str
    state: str
    running: int
    waiting: int
    sampling: dict[str, Any]
    facts: dict[str, Any] | None
    models: list[str]
