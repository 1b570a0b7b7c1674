"""What whole replies hold, as the published descriptions of two APIs have them; they may hold more."""

from __future__ import annotations

from typing import Any, Literal

from dflash_local.schema import OpenRecord


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
