"""What the file of a server program tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_local import terminal
from dflash_local.settings import LAUNCHED

Program = Literal["vllm", "sglang", "llama.cpp", "dflash", "lm-studio", "ollama", "tabbyapi", "mistral.rs", "mlx-lm"]
Answer = dict[str, Any] | None
Get = Callable[[str], Answer]  # ``ServerEndpoint.get_object``
Post = Callable[[str, Mapping[str, Any]], Answer]
MAX_NAME = 200  # characters


@dataclass(frozen=True, slots=True)
class SelfReport:
    """What a server says of itself.

    Attributes:
        drafts: whether it drafts; None where it does not say. method, drafter: its own names for how it drafts.
        block_size: anchor and drafts; None where it does not say. context: in tokens, where ``/v1/models`` lacks it.
    """

    version: str = ""
    drafts: bool | None = None
    method: str = ""
    drafter: str = ""
    block_size: int | None = None
    context: int | None = None


@dataclass(frozen=True, slots=True)
class Launching:
    """How a program is started on this machine.

    Attributes:
        on_path: what is looked for on PATH. beside: what is run instead, in the folder of that; empty for that itself.
        wanted: what a setting names, in words. install: how it comes here, as a hint.
        name_option: takes the name that requests call the model by. key_variable: takes the token; empty where it
            stands on the command line.
        stages: what it writes while it starts, in this order; which of them has come says how far a start is.
    """

    on_path: str
    wanted: str
    install: str
    stages: tuple[str, ...]
    beside: str = ""
    name_option: str = "--served-model-name"
    key_variable: str = ""


@dataclass(frozen=True, slots=True)
class ServerProgram:
    """A server program.

    Attributes:
        title: as people write it.
        report: what a server says of itself; None where it is another program. Paths that it does not have are None.
        token_ids: replies name their tokens, where that is asked for. logprobs: and the likeliest tokens beside them.
        fields: of every request. logprob_fields: of one for log-probabilities, besides OpenAI's own.
        own_request: path and body, in the program's own dialect, of a request whose tokens are to be named; None where
            OpenAI's names them. own_event: an event of the answer, in the words of OpenAI's.
        tells_drafts: a server says whether it drafts.
        off: of a request that is not to be drafted for; empty where the program has no such field.
        proves_off: whether a server takes ``off``, found by a request of one token.
        all_tokens: sampling from all tokens, in the program's own words: its defaults may leave some out.
        renamed: sampling fields that have another name there.
        constrains: replies can be held to a schema or grammar as in vLLM. continues: a field that vLLM wants beside
            ``continue_final_message``.
        launching: None where it is only attached to.
    """

    name: Program
    title: str
    report: Callable[[Get], SelfReport | None]
    token_ids: bool = False
    logprobs: bool = False
    tells_drafts: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)
    own_request: Callable[[Post, Mapping[str, Any]], tuple[str, dict[str, Any]]] | None = None
    own_event: Callable[[dict[str, Any]], dict[str, Any]] = lambda event: event
    logprob_fields: Mapping[str, Any] = field(default_factory=dict)
    off: Mapping[str, Any] = field(default_factory=dict)
    proves_off: Callable[[Post], bool] = lambda _post: True
    all_tokens: Mapping[str, Any] = field(default_factory=lambda: {"top_k": -1, "top_p": 1.0, "min_p": 0.0})
    renamed: Mapping[str, str] = field(default_factory=dict)
    constrains: bool = False
    continues: Mapping[str, Any] = field(default_factory=dict)
    launching: Launching | None = None


# Counts of tokens with every event, in vLLM's words.
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def variable_of(program: Program) -> str:
    """The environment variable that names the program to launch."""
    return f"DFLASH_{LAUNCHED[program].upper()}"


def text_of(value: Any) -> str:
    """A short text of a server, safe to show; empty for anything else."""
    return terminal.safe_line(value)[:MAX_NAME] if isinstance(value, str) else ""


def whole_of(value: Any, most: int) -> int | None:
    """A whole number from 1 to ``most`` that a server sent; None for anything else."""
    return value if type(value) is int and 0 < value <= most else None
