"""Which cases of other projects' suites a test stands for; ``python -m tests.api.conformance.table`` lists them."""

from __future__ import annotations

from typing import Literal

import pytest

# openresponses/openresponses src/lib/compliance-tests.ts; ggml-org/llama.cpp tools/server/tests/unit/
# test_compat_anthropic.py; vllm-project/vllm tests/entrypoints/anthropic and tests/entrypoints/openai/responses.
Suite = Literal["openresponses", "llama.cpp", "vllm anthropic", "vllm responses"]


def conforms(suite: Suite, cases: str) -> pytest.MarkDecorator:
    """Mark a test, or a row of one, with the names of cases, between blanks, that it is written after."""
    return pytest.mark.conformance(suite, *cases.split())
