"""The noise generator: published test vectors, dependence on seed and position only."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_local.kernels.noise import gumbel, philox

CPU = torch.device("cpu")
VECTORS = [  # key, counter, output: known answers published with the Random123 library
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "output"), VECTORS)
def test_philox_gives_the_published_answers(
    key: tuple[int, int], counter: tuple[int, ...], output: tuple[int, ...]
) -> None:
    words = philox([torch.tensor([c]) for c in counter], key)
    assert [int(w) for w in words] == list(output)


def test_noise_depends_on_seed_and_absolute_position_only() -> None:
    whole = gumbel(7, 100, 6, 50, CPU)
    assert torch.equal(whole[2:4], gumbel(7, 102, 2, 50, CPU))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, gumbel(8, 100, 6, 50, CPU))
    assert torch.equal(whole[:, :13], gumbel(7, 100, 6, 13, CPU)), "a narrower vocabulary is a prefix"


@pytest.mark.parametrize(("seed", "position", "token"), [(7, 0, 0), (2**63 + 5, 17, 6), (2**40 + 1, 2**32 + 3, 49)])
def test_noise_is_laid_out_as_documented(seed: int, position: int, token: int) -> None:
    """What other engines and kernels must draw: nothing here may move by a position, a token or a word."""
    counter = (token // 4, position % 2**32, position >> 32, 0)
    words = philox([torch.tensor([c]) for c in counter], (seed % 2**32, seed >> 32))
    uniform = (int(words[token % 4]) + 0.5) / 2**32
    expected = -math.log(-math.log1p(-uniform))
    assert gumbel(seed, position, 1, 50, CPU)[0, token].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(1, 0, 200, 1000, CPU).double()
    # mean: Euler's constant; variance: pi^2 / 6; standard errors at 200,000 draws are 0.003 and 0.008
    assert abs(noise.mean().item() - 0.5772) < 0.015
    assert abs(noise.var().item() - 1.6449) < 0.04
    assert torch.isfinite(noise).all()
