"""Patterns over names of modules: what ``re`` says of those that are read, and an end for every one."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_local.config.module_pattern import PatternError, compiled

LAYER = "model.language_model.layers.13"
NAMES = (
    *(f"{LAYER}.{below}" for below in ("self_attn.q_proj", "self_attn.o_proj", "linear_attn.in_proj_a", "mlp.gate")),
    *(f"{LAYER}.mlp.{below}" for below in ("up_proj", "experts.7.down_proj", "shared_expert.up_proj", "experts")),
    *(
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.1.block_sparse_moe.gate",
        "model.layers.1.shared_experts.up",
    ),
    *("model.layers.3.mlp.experts.12.gate_proj", "model.visual.blocks.0.attn.qkv", "mtp.fc", "lm_head", ""),
)
PUBLISHED = (
    *(".*attn.*", ".*mtp.*", ".*shared_expert.*", ".*visual.*", ".*mlp.gate$", ".*shared_expert_gate$", ".*lm_head"),
    *(r".*linear_attn[.].*", ".*linear_attn.in_proj_[ab]$", ".*[qk]_proj", ".*(v|down)_proj$", ".*self_attn.o_proj*"),
    *(r"model\.layers\.([2-9]\d*|[1-9]\d+)\..*", r".*\.1\..*", r"^model\.layers\.0\.", r".*block_sparse_moe\.gate"),
    *("^(?!.*experts)", "^(?!.*experts).*$", "^(?!.*mlp.experts).*", "^(?!.*shared_experts).*$", "^(?!.*(up|down)).*$"),
    *(r"^(?!.*\.mlp\.experts(?:\.|$)).*$", r"^(?!.*self_attn\.(?:q_proj|k_proj)$).*$", r"(?!.*mlp)(?:.*)[(.]q_.*"),
    *(r".*layers\.[0-9]+\.mlp\.gate$", r".*layers\.(3|[4-9]|1[0-3])\.mlp.*", r"(model\.)?layers\.\d{1,2}\.mlp\..*"),
    *(r".*[.]experts[.]\d+[.](gate|up|down)_proj$", r"(?=.*experts)(?!.*down).*", "lm_head|.*mtp", ".*?proj$"),
)
REFUSED = {
    "(": "a group that is not closed",
    "a)": "a parenthesis that was not opened",
    "*a": "'*' where nothing can repeat",
    "a**": "'*' where nothing can repeat",
    "a{2": "'{' that is no quantifier",
    "[a": "'[', of which re says",
    "\\": "the escape",
    r"(a)\1": "the escape",
    r"a\b": "the escape",
    "(a+)+$": "a group that repeats",
    "((a+))+": "a group that repeats",
    "((a+)b?)*": "a group that repeats",
    "(a|a)*": "a group that repeats",
    r"(?:[)\]]+)+": "a group that repeats",
    "(a{1,9}){1,9}": "a group that repeats",
    "([a-z.]+)(?#)+!": "a group other than",
    r"(?x)(?:[\w.]+) +!": "a group other than",
    "(?i)a": "a group other than",
    "(?<!a)b": "a group other than",
    "(?P<a>b)": "a group other than",
    "(?!(?!a))": "a look-ahead that is not at its beginning",
    ".*(?!a)": "a look-ahead that is not at its beginning",
    "a{10}": "'{' that is no quantifier",
    "(?!a)*": "a group that repeats",
    "(" * 21 + ")" * 21: "groups nested more than 20 deep",
    "(" * 1000: "groups nested more than 20 deep",
}


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_shapes_match_what_re_matches(pattern: str) -> None:
    step = compiled(pattern)
    matched = [name for name in NAMES if step(name, 1)]
    assert matched == [name for name in NAMES if re.match(pattern, name)] and 0 < len(matched) < len(NAMES)


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_is_not_read_is_named(pattern: str) -> None:
    with pytest.raises(PatternError, match=re.escape(REFUSED[pattern])):
        compiled(pattern)


def invented(rng: random.Random, depth: int = 0) -> str:
    looks = rng.choices(["(?=", "(?!"], k=rng.randint(0, 2)) if depth == 0 else []
    parts = [f"{look}{invented(rng, 1)}|{invented(rng, 1)})" for look in looks]
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        if kind < 0.7 or depth == 3:
            unit = rng.choice(["a", "b", "aba", ".", "[ab]", "[^a]", r"\w", r"\.", r"\d", "^", "$"])
            repeats = ["", "*", "+", "?", "*?", "{2}", "{1,3}", "{1,}"]
            parts.append(unit + ("" if unit in ("^", "$") else rng.choice(repeats)))
        else:
            inside = "|".join(invented(rng, depth + 1) for _ in range(rng.randint(1, 3)))
            parts.append(f"{rng.choice(['(', '(?:'])}{inside}){rng.choice(['', '?'])}")
    return "".join(parts)


def test_invented_patterns_match_what_re_matches() -> None:
    rng, matched = random.Random(0), 0
    for _ in range(3000):
        pattern = invented(rng)
        step, expected = compiled.__wrapped__(pattern), re.compile(pattern)
        for name in ("".join(rng.choices("ab.1", k=rng.randint(0, 8))) for _ in range(4)):
            assert bool(step(name, 1)) == bool(expected.match(name)), (pattern, name)
            matched += bool(step(name, 1))
    assert 2000 < matched < 10_000


def test_a_pattern_that_re_would_not_finish_ends() -> None:
    """In a child, since ``re`` can't be interrupted."""
    code = f"""
from dflash_local.config.module_pattern import compiled
for pattern in ({".*" * 40 + "!"!r}, {"[a-z.]*" * 40 + "!"!r}, {"(a?|.?|.)" * 40 + "!"!r}):
    assert not compiled(pattern)({f"{LAYER}.mlp.experts.127.gate_proj"!r}, 1)
"""
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
