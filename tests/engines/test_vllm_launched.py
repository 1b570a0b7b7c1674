"""Race and certificate launch a real vLLM of the demo pair on the CPU, with its drafter and then without."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli
from tests.engines.test_vllm import NEEDS_VLLM

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900), NEEDS_VLLM]


def test_a_race(cli: Cli, launching: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = cli("race", "demo", "Count from 3 to 7.", *launching)
    assert found.code == 0 and "identical: yes\n" in found.out, found.err
    assert found.out.index("(dflash):") < found.out.index("(ar):") and found.out.count("3, 4, 5, 6, 7") == 2
    with capsys.disabled():
        print(f"\n{found.out}")


def test_a_certificate(cli: Cli, launching: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    found = cli("certify", "demo", *launching)
    assert found.code == 0 and "verdict: 6 of 6 greedy replies equal, token by token\n" in found.out, found.err
    with capsys.disabled():
        print(f"\n{found.out}")
