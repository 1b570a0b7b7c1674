"""The served model as ``GET /v1/models`` tells it: to OpenAI's clients, to Codex and to Anthropic's.

Codex's fields: ``ModelInfo`` in https://github.com/openai/codex/blob/main/codex-rs/protocol/src/openai_models.rs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from dflash_local.request import MAX_NEW_TOKENS
from dflash_local.service.backend import Model

EFFORTS = ("low", "medium", "high")  # which templates that take one know
# Codex takes no model without instructions, and sends them as the first turn. Its own for models that it does not know
# have four thousand tokens.
INSTRUCTIONS = (
    "You are Codex, a coding agent that works in the user's folder through the tools you are given. Read the files "
    "that matter before you change them, and obey an AGENTS.md that you find. Make the smallest change that does what "
    "was asked, in the style of the code around it; change nothing else. Run the tests or the program to see that it "
    "works. Go on until the task is done, then say in a few sentences what you did, and name what you could not do."
)
OUTPUT_TOKENS = 10_000  # of a tool that Codex lets into the conversation, at most, as for OpenAI's models
OUTPUT_SHARE = 8  # and of a small context this part


@dataclass(frozen=True, slots=True)
class ListedModel:
    """What the lists tell.

    Attributes:
        context: tokens; None where only the load knows. created: in seconds since 1970.
    """

    model: Model
    context: int | None
    created: int

    def for_openai(self) -> dict[str, Any]:
        """Return OpenAI's object, with vLLM's ``max_model_len``."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "dflash-local",
            "max_model_len": self.context,
            "aliases": list(self.model.aliases),
        }

    def for_anthropic(self) -> dict[str, Any]:
        """Return Anthropic's object."""
        return {
            "type": "model",
            "id": self.model.name,
            "display_name": self.model.name,
            "created_at": datetime.fromtimestamp(self.created, timezone.utc).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self.context,
            "max_tokens": min(self.context or MAX_NEW_TOKENS, MAX_NEW_TOKENS),
        }

    def for_codex(self) -> dict[str, Any]:
        """Return Codex's object. It tells no patch tool and no search: commands are how files are changed."""
        limit = OUTPUT_TOKENS if self.context is None else min(OUTPUT_TOKENS, self.context // OUTPUT_SHARE)
        levels = [{"effort": effort, "description": effort} for effort in EFFORTS if self.model.takes_effort]
        return {
            "slug": self.model.name,
            "display_name": self.model.name,
            "description": "served by dflash-local",
            "default_reasoning_level": "medium" if levels else None,
            "supported_reasoning_levels": levels,
            "shell_type": "shell_command",
            "visibility": "list",
            "supported_in_api": True,
            "priority": 0,
            "base_instructions": INSTRUCTIONS,
            "supports_reasoning_summaries": False,
            "supports_reasoning_summary_parameter": False,
            "support_verbosity": False,
            "truncation_policy": {"mode": "tokens", "limit": limit},
            "supports_parallel_tool_calls": True,
            "context_window": self.context,
            "max_context_window": self.context,
            "experimental_supported_tools": [],
            "input_modalities": ["text"],
        }
