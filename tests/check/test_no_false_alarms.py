"""Every sound pair of the suite is found good in every line: goldens and toys, in all formats, by both engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from dflash_local.catalog.bundled import BUNDLED, Pair, find
from dflash_local.check.run import check
from dflash_local.engine.load_pair import load
from dflash_local.load_config import LoadConfig
from tests.bench.sessions import GOLDEN, golden_pair
from tests.check.faults import put_in
from tests.expert_pairs import write_expert_pair
from tests.golden_experts import FAMILIES
from tests.quantized_checkpoints import DIALECTS

DTYPES = ("float32", "bfloat16")
GOLDENS = tuple(sorted(each.name for each in GOLDEN.iterdir() if (each / "drafter").is_dir()))
PAIRS = (*GOLDENS, *FAMILIES, *BUNDLED)
AT_LOAD = ("int4", "int8", "fp8")
REFUSED = {("qwen3_next", "fp8"), *(("gpt_oss", each) for each in AT_LOAD)}  # at load, and said so
IN_WORDS = {"target", "drafter", "template", "exactness"}  # goldens have no tokenizer


@dataclass(frozen=True)
class Case:
    """A pair as it is loaded.

    Attributes:
        quantize: at load. stored: a dialect of ``DIALECTS`` that a toy's target is put in.
    """

    pair: str
    engine: str
    dtype: str
    quantize: str = ""
    stored: str = ""

    def __str__(self) -> str:
        return " ".join(each for each in (self.pair, self.engine, self.dtype, self.quantize, self.stored) if each)


def _grid() -> Iterator[Case]:
    for pair, dtype in product(PAIRS, DTYPES):
        yield Case(pair, "reference", dtype)
        formats = (each for each in ("", *AT_LOAD) if (pair, each) not in REFUSED)
        yield from (Case(pair, "fused", dtype, quantize) for quantize in formats)
    for number, (pair, stored) in enumerate(product(BUNDLED, DIALECTS)):
        yield Case(pair, "fused", DTYPES[number % 2], stored=stored)


# Every kind of pair, and every engine, dtype and format at load; a toy, whose replies take seconds, once.
COVERING = (
    *(Case(pair, "fused", dtype, how) for pair, dtype, how in zip(GOLDENS, DTYPES * 3, ("", *AT_LOAD) * 2)),
    Case("qwen3_5_moe", "fused", "bfloat16", "fp8"),
    Case("gpt_oss", "fused", "float32"),
    Case(GOLDENS[0], "reference", "bfloat16"),
    Case("qwen3-dflash2-b8", "reference", "float32"),
    Case("gpt_oss", "reference", "float32"),
    Case("demo-hybrid", "fused", "bfloat16", "int8"),
)
CASES = (*COVERING, *(pytest.param(case, marks=pytest.mark.slow) for case in _grid() if case not in COVERING))


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Pairs of mixtures by family, written when one is asked for."""

    class Written(dict[str, Pair]):
        def __missing__(self, family: str) -> Pair:
            self[family] = write_expert_pair(family, "", tmp_path_factory.mktemp(family), width=64)
            return self[family]

    return Written()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_sound_pair_raises_no_alarm(
    case: Case, mixtures: dict[str, Pair], own_toys: Path, request: pytest.FixtureRequest
) -> None:
    if case in COVERING:
        request.getfixturevalue("short")
    if case.stored:
        put_in(case.stored, own_toys / case.pair / "target")
    toy = case.pair in BUNDLED
    pair = find(case.pair) if toy else golden_pair(case.pair) if case.pair in GOLDENS else mixtures[case.pair]
    quantize = case.quantize or None
    session = load(pair, LoadConfig(device="cpu", engine=case.engine, dtype=case.dtype, quantize=quantize, context=640))
    found = check(session, pair, None, lambda text, part: None)
    session.close()
    alarms = [each for each in found if each.state not in ("ok", "skipped")]
    assert not alarms, [(each.subject, each.text) for each in alarms]
    judged = {each.subject for each in found if each.state == "ok"}
    of_engine = set() if case.engine == "reference" else {"format", "layers"}
    assert judged == of_engine | (IN_WORDS if toy else set()), "nothing was left out"
