"""From an empty machine: a pair whose own weights do not fit is chatted with in a published quantised form, no option
typed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
from dflash_local.app import download, fitting, recommending  # noqa: E402
from dflash_local.app.resolve import Missing, choose  # noqa: E402
from dflash_local.catalog import shapes  # noqa: E402
from dflash_local.cli import fetch  # noqa: E402
from dflash_local.cli.console import Console  # noqa: E402
from dflash_local.errors import Interrupted  # noqa: E402
from dflash_local.planner import cpu_probe, hardware  # noqa: E402
from dflash_local.planner.machine import named  # noqa: E402
from dflash_local.settings import Settings  # noqa: E402
from dflash_local.settings import load as load_settings  # noqa: E402
from tests.cli.conftest import Cli  # noqa: E402
from tests.fake_hub import FakeHub  # noqa: E402
from tests.toy_variant import CARD_GIB, STANDS_FOR, TARGET, VARIANT, publish_variant  # noqa: E402


@pytest.fixture
def variant(toy_hub: FakeHub, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the toy's target, on a machine of which the plans see a small card."""
    publish_variant(toy_hub, own_home, tmp_path)
    real, card = shapes.shape, named(None, CARD_GIB)
    monkeypatch.setattr(shapes, "shape", lambda repo: real(STANDS_FOR.get(str(repo), str(repo))))
    for room in (recommending, download):
        monkeypatch.setattr(room, "machine", lambda user, **_more: card)


def test_a_pair_that_fits_only_quantised_is_chatted_with_and_no_option_typed(
    cli: Cli, variant: None, answers: Callable[..., list[str]]
) -> None:
    asked = answers(True, True)
    found = cli("chat", "toy-9b", "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert found.code == 0 and found.out.strip(), found.err
    assert f"{VARIANT} (published in 4 bits) is taken: toys/Toy-9B in bfloat16 needs" in " ".join(found.err.split())
    assert f"talking to {VARIANT}" in found.err and asked and VARIANT in asked[0]
    assert "licence       unknown" in found.err and "free for" in found.err
    again = cli("chat", "toy-9b", "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert again.code == 0 and again.out == found.out and len(asked) == 1, "nothing is downloaded twice"


def test_pull_fetches_the_variant_that_fits_and_its_last_line_chats(cli: Cli, variant: None) -> None:
    pulled = cli("pull", "toy-9b", "--yes")
    assert pulled.code == 0 and f"{VARIANT} (published in 4 bits, KV cache in 8 bits) is taken" in " ".join(
        pulled.err.split()
    )
    assert f"{VARIANT}: " in pulled.out and f"{TARGET}: " not in pulled.out
    command = pulled.out.strip().splitlines()[-1].removeprefix("next: dflash ").split()
    found = cli(*command, "--context", "256", "--max-new-tokens", "8", stdin="one two three\n")
    assert found.code == 0 and found.out.strip() and "Download" not in found.err


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, own_home: Path) -> Callable[[float, float], Settings]:
    """``user = cpu(GIB, RATE)``: the user of a machine without a GPU, whose CPU was found to read so many bytes/s."""

    def machine(gib: float, rate: float) -> Settings:
        user = load_settings()
        monkeypatch.setattr(hardware, "memory", lambda: hardware.Memory(round(gib * 2**30), 2**40, limited=False))
        monkeypatch.setattr(
            cpu_probe, "probe", lambda cpu: cpu_probe.CpuRates(cpu, {1: rate, 8: 0.4 * rate, 16: 0.3 * rate})
        )
        monkeypatch.setattr(cpu_probe, "is_quiet", lambda: True)
        monkeypatch.setattr(hardware, "computes_bfloat16", lambda: False)
        return user

    return machine


def test_what_fits_a_cpu_in_half_the_bytes_alone_is_told_so(cpu: Callable[[float, float], Settings]) -> None:
    for gib, word in ((24, "fits"), (16, "fits in bfloat16")):
        user = cpu(gib, 20e9)
        choice = choose("qwen3-4b", None, user)
        known = fitting.shapes(choice, None)
        assert recommending.summary(choice, known, fitting.machine(user), user).fits == word


@pytest.mark.parametrize(
    ("model", "gib", "rate", "words"),
    [
        ("qwen3-4b", 24, 10e9, "tokens/s here, below the 3 that a chat needs; usable here: smollm2 ("),
        ("qwen3-4b", 24, 0.4e9, "tokens/s here, below the 3 that a chat needs; no pair of the registry reaches"),
        ("qwen3.5-27b", 256, 100e9, "below the 3 that a chat needs; usable here: "),
        ("qwen3-4b", 256, 100e9, ""),
    ],
)
def test_a_download_that_would_be_too_slow_here_is_not_the_default(
    cpu: Callable[[float, float], Settings],
    model: str,
    gib: float,
    rate: float,
    words: str,
    answers: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user, asked, fetched = cpu(gib, rate), answers(), []
    monkeypatch.setattr(fetch, "fetch", lambda needs, *_, **__: fetched.extend(needs))
    missing = Missing(choose(model, None, user), "it is not here", ("target", "drafter"))
    obtain = fetch.obtain(user, Console({}), False)
    if not words:
        assert obtain(missing) and fetched and "tokens/s" not in asked[0]
        return
    with pytest.raises(Interrupted):
        obtain(missing)
    assert words in asked[0]


def test_a_pull_of_what_is_too_slow_here_is_asked_about(
    cli: Cli, toy_hub: FakeHub, answers: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "slow_here", lambda *_: "it would write 0.5 tokens/s here")
    asked = answers()
    assert cli("pull", TARGET).code == 130 and "0.5 tokens/s here. Download it all the same?" in asked[0]
    assert not toy_hub.gets() and cli("pull", TARGET, "--yes").code == 0 and len(asked) == 1


def test_a_cpu_is_probed_once_and_only_by_plans_for_it(
    cli: Cli, cpu: Callable[[float, float], Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu(24, 20e9)
    made = []
    real = cpu_probe.probe
    monkeypatch.setattr(cpu_probe, "probe", lambda cpu: made.append(cpu) or real(cpu))
    for words in (("plan", "qwen3-4b", "--gpu", "RTX 4090"), ("models",), ("show", "qwen3-4b")):
        assert cli(*words).code == 0 and not made, words
    first, again = cli("plan", "qwen3-4b"), cli("plan", "qwen3-4b")
    assert len(made) == 1 and "once" in first.err and not again.err
    assert first.out == again.out and "0.85 tok/s" in first.out, first.out
    watched = iter([True, False, False])  # busy at the end of the first probe, and before the second
    monkeypatch.setattr(cpu_probe, "is_quiet", lambda: next(watched))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # another machine, as far as its speed goes
    assert "measures again" in cli("plan", "qwen3-4b").err and "measures again" in cli("plan", "qwen3-4b").err
