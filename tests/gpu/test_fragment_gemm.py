"""Few-row products with quantized weights on a GPU: equal to what the weight stands for, row by row, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels import fragment_decode, fragment_gemm
from dflash_local.kernels.fragment_decode import LaunchConfig
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference
from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from tests.both_engines import facts_of
from tests.families import save_model
from tests.kernels import few_rows
from tests.kernels.few_rows import off
from tests.quantized_checkpoints import quantize_checkpoint
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4

pytestmark = pytest.mark.gpu

ROWS = (1, 7, 8, 9, 16, 33, 64)
LAUNCHES = (LaunchConfig(1, 2, 1), LaunchConfig(2, 4, 4, False, True, False), LaunchConfig(8, 8, native=False))
WITH_TAIL = ("int4, groups of 128, zeros: True", "int8, by row, zeros: False", "fp8", "MXFP4", "NVFP4", "Q4_K", "Q6_K")


def weights() -> Iterator[tuple[str, Codable]]:
    """Every format, with a last step and last tiles that are not full; of 992 rows are gated pairs made, too."""
    for group, k in ((128, 4096 + 128), (64, 2048 + 64), (32, 1024 + 96), (256, 512)):
        for zeros in (False, True):
            yield f"int4, groups of {group}, zeros: {zeros}", int4(992, k, group, zeros, device="cuda")
    for kind in (torch.float16, torch.float32):
        yield f"int4, {kind}", int4(512, 1024, 128, True, kind, device="cuda")
    for group, k, zeros in ((128, 4096 + 128, False), (64, 2048 + 64, True), (32, 1024 + 96, True), (256, 512, True)):
        yield f"int8, groups of {group}, zeros: {zeros}", int8(992, k, group, zeros, device="cuda")
    for zeros in (False, True):
        yield (
            f"int8, by row, zeros: {zeros}",
            int8(1000 if zeros else 992, 2048 + 96, 2048 + 96, zeros, torch.float32, "cuda"),
        )
    yield "fp8", fp8(1000, 4096 + 160, device="cuda")
    yield "fp8, whole tiles", fp8(992, 1024 + 96, (32, 128), "cuda", torch.bfloat16)
    yield "fp8, by row", fp8_rows(992, 4096 + 160, "cuda", torch.bfloat16)
    yield "fp8, by row, float32", fp8_rows(1000, 1024 + 32, "cuda", torch.float32)
    yield "MXFP4", mxfp4(992, 2048 + 96, "cuda")
    yield "NVFP4", nvfp4(992, 2048 + 96, True, "cuda")
    yield "NVFP4 without scales of rows", nvfp4(1000, 1024 + 32, False, "cuda")
    for dtype, kept in GGUF_TYPES.items():
        yield dtype, gguf(dtype, 992, 2048 + (256 if kept.nested else 96), "cuda")


def configs(weight: FragmentWeight, rows: int, paired: bool = False) -> list[FragmentGemmConfig]:
    """Some of this card's, and one of a card with little shared memory, which splits K."""
    limit = int(torch.cuda.get_device_properties(0).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    found = fragment_gemm.candidates(weight, paired, rows, limit)
    some = [*found[:2], found[-1], *fragment_gemm.candidates(weight, paired, rows, 48 * 1024)[:1]]
    fragment_gemm.compile_ahead(weight, paired, rows, some)
    return list(dict.fromkeys(some))


random, empty = partial(few_rows.random, device="cuda"), partial(few_rows.empty, device="cuda")


def packed_weights(tails: tuple[int, ...] = (0, 64)) -> Iterator[tuple[str, FragmentWeight, torch.Tensor]]:
    """Every format alone, some with plain rows behind them, and plain rows alone; and what they stand for."""
    for name, weight in weights():
        wide = weight.dequantized()
        for tail in tails if name in WITH_TAIL else (0,):
            packed = FragmentWeight.of(weight)
            if tail:
                below = random(tail, weight.shape[1], seed=4) * wide[:16].std().bfloat16()
                packed, wide = packed.with_tail(below.clone()), torch.cat((wide, below.float()))
            yield f"{name}, tail of {tail}", packed, wide
    for n, k in ((257, 2048), (1000, 2880), (992, 4096 + 32)):
        memory = empty(n + 32, k)  # nothing behind a weight may be read
        memory[:n] = random(n, k, seed=2)
        yield f"plain {n} x {k}", FragmentWeight.plain(memory[:n]), memory[:n].float()


@pytest.mark.parametrize("rows", ROWS)
def test_every_config_equals_what_the_weight_stands_for(rows: int) -> None:
    for name, packed, wide in packed_weights():
        n, k = packed.shape
        x, residual, hot = random(rows, k), random(rows, n, seed=1), torch.zeros(rows, k, device="cuda").bfloat16()
        hot[torch.arange(rows), torch.arange(rows) * 97 % k] = 1
        x[:, 5] *= 1000
        want = x.double() @ wide.double().t()
        # The kernel rounds a minimum less 128 scales to float32; every other format gives the weight's own bits.
        rounded = packed.format.minima and not packed.format.nested
        slack = wide.abs().amax(1, keepdim=True) * (2**-19 if rounded else 0)
        for config in configs(packed, rows):
            out = fragment_gemm.linear(x, packed, empty(rows, n), config)
            assert off(out, want) < 3e-3, (name, config)
            assert torch.equal(fragment_gemm.linear(x, packed, empty(rows, n), config), out), (name, config)
            around = empty(rows, n + 40)
            fragment_gemm.linear(x, packed, around[:, 8 : n + 8], config)
            assert torch.equal(around[:, 8 : n + 8], out) and around[:, :8].isnan().all(), (name, config)
            added = fragment_gemm.linear(x, packed, residual.clone(), config, residual)
            assert torch.equal(added, (out.float() + residual.float()).bfloat16()), (name, config)
            picked = fragment_gemm.linear(hot, packed, empty(rows, n), config)
            least, most = ((hot.float() @ (wide + each).t()).bfloat16() for each in (-slack, slack))
            assert ((least <= picked) & (picked <= most)).all(), (name, config)


@pytest.mark.parametrize("rows", ROWS)
def test_every_gated_config_equals_what_the_weight_stands_for(rows: int) -> None:
    for name, packed, wide in packed_weights(tails=(0,)):
        n, x = len(wide), random(rows, packed.shape[1])
        if n % 32:
            continue
        want = swiglu_reference(x.double(), wide.double(), torch.empty(rows, n // 2, device="cuda").double())
        for config in configs(packed, rows, paired=True):
            out = fragment_gemm.swiglu(x, packed, empty(rows, n // 2), config)
            assert off(out, want) < 1e-2, (name, config)
            assert torch.equal(fragment_gemm.swiglu(x, packed, empty(rows, n // 2), config), out), (name, config)


def test_what_is_decoded_for_prompts_is_what_the_weight_stands_for() -> None:
    for name, weight in weights():
        packed, want = FragmentWeight.of(weight), weight.dequantized().bfloat16()
        assert torch.equal(fragment_decode.decode(packed, slice(None), torch.full_like(want, float("nan"))), want), name
        part = fragment_decode.decode(packed, slice(16, 48), torch.full_like(want, float("nan")))
        assert torch.equal(part, want[16:48]), name
        for config in LAUNCHES:
            part = fragment_decode.decode(packed, slice(None), torch.full_like(want, float("nan")), config)
            assert torch.equal(part, want), (name, config)


def test_rows_of_an_embedding_are_what_the_weight_stands_for() -> None:
    ids = torch.tensor([17, 0, 511, 8, 17, 500], device="cuda")
    for name, weight in weights():
        packed, want = FragmentWeight.of(weight), weight.dequantized().bfloat16()[ids]
        assert torch.equal(fragment_decode.gather(packed, ids, torch.full_like(want, float("nan"))), want), name


def test_a_row_does_not_depend_on_others_its_place_or_their_number() -> None:
    for name, weight in weights():
        n, k = weight.shape
        packed, x, strangers = FragmentWeight.of(weight), random(16, k), random(16, k, seed=1) * 30
        many = random(640, k, seed=2)  # a sum that is rounded otherwise shows in few rows of bfloat16
        for config in configs(packed, 16):
            want = fragment_gemm.linear(x, packed, empty(16, n), config)
            for place in (0, 7, 8, 15):
                mixed = strangers.clone()
                mixed[place] = x[3]
                got = fragment_gemm.linear(mixed, packed, empty(16, n), config)
                assert torch.equal(got[place], want[3]), (name, config)
            for rows in (1, 8, 40):
                got = fragment_gemm.linear(x[3:4].repeat(rows, 1), packed, empty(rows, n), config)
                assert torch.equal(got, want[3:4].expand(rows, n)), (name, config)
            by_eight, by_sixteen = (
                torch.cat([fragment_gemm.linear(each, packed, empty(rows, n), config) for each in many.split(rows)])
                for rows in (8, 16)
            )
            assert torch.equal(by_eight, by_sixteen), (name, config)


@pytest.mark.parametrize("dialect", ["gptq", "pack_quantized_zeros"])
def test_a_target_is_multiplied_by_the_kernels(dialect: str, tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path / "twin", hidden_size=256, intermediate_size=512, head_dim=64)
    quantize_checkpoint(tmp_path / "twin", tmp_path / "quantized", dialect)

    def logits(folder: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        checkpoint, facts = facts_of(tmp_path / folder)
        weights = read_weights(checkpoint, facts, torch.device(device), dtype)
        choose_configs(weights.products, 4)
        packed = [product for product in weights.products if isinstance(product.weight, FragmentWeight)]
        assert len(packed) > 4 or (folder, device) != ("quantized", "cuda")
        assert all(isinstance(product.config, FragmentGemmConfig) for product in packed)
        target = FusedTarget(weights, facts.model, (0, 2), 64, 4)
        target.prefill(torch.arange(5, 12, device=device), False)
        rows = target.verify(torch.arange(12, 16, device=device), False).hidden
        return target.head(rows).float().cpu()

    want, found = logits("quantized", "cpu", torch.float32), logits("quantized", "cuda", torch.bfloat16)
    rounding = (logits("twin", "cuda", torch.bfloat16) - want).norm()  # of the activations alone
    assert (found - want).norm() < 1.5 * rounding + 1e-2 * want.norm()
