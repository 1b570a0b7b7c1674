"""Blocks of GGUF files on a card: the bits that the CPU gives."""

from __future__ import annotations

import pytest
import torch

from dflash_local.checkpoint_files.tensor_info import BLOCKS
from dflash_local.kernels import gguf_blocks
from dflash_local.kernels.gguf_blocks import DECODERS, decode_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DECODERS)
def test_a_card_decodes_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, size = BLOCKS[dtype]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (64, 4096 // weights * size), generator=generator, dtype=torch.uint8)
    monkeypatch.setattr(gguf_blocks, "CARD_CHUNK", 5 * 256)  # of which no row is a multiple
    here, there = decode_blocks(data, dtype), decode_blocks(data.cuda(), dtype).cpu()
    assert torch.equal(here.isnan(), there.isnan()) and here.isfinite().any()
    here, there = (values.masked_fill(values.isnan(), 0).view(torch.int32) for values in (here, there))
    assert torch.equal(here, there)
