"""Few-row products with quantised weights on a GPU: equal to what the weight stands for, row by row, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dflash_local.config.quantization import GGUF_TYPES
from dflash_local.kernels import few_row_gemm, fragment_decode
from dflash_local.kernels.few_row_gemm import FewRowConfig
from dflash_local.kernels.fragment_decode import LaunchConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.skinny_gemm import swiglu_reference
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused.kernel_choice import choose_configs
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.families import save_model
from tests.quantised_checkpoints import quantise
from tests.quantized_weights import fp8, fp8_rows, gguf, int4, int8, mxfp4, nvfp4

pytestmark = pytest.mark.gpu

ROWS = (1, 7, 8, 9, 16, 33, 64)
REPLAYS = 10_000
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


def test_rows_of_a_tail_ride_along() -> None:
    for name, weight in weights():
        if name not in WITH_TAIL:
            continue
        n, k = weight.shape
        for tail in (24, 64, 160):
            below = random(tail, k, seed=4) * weight.dequantized(slice(16)).std().bfloat16()
            packed = FragmentWeight.of(weight).with_tail(below.clone())
            wide = torch.cat((weight.dequantized(), below.float()))
            for rows in (1, 8, 16, 40):
                x, residual = random(rows, k), random(rows, n + tail, seed=1)
                one_hot = torch.zeros_like(x)
                one_hot[torch.arange(rows), torch.arange(rows) * 97 % k] = 1
                want = x.double() @ wide.double().t()
                for config in configs(packed, rows):
                    out = few_row_gemm.linear(x, packed, empty(rows, n + tail), config)
                    error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
                    below_error = (out.double() - want)[:, n:].norm(dim=1) / want[:, n:].norm(dim=1)
                    assert error.max() < 3e-3 and below_error.max() < 3e-3, (name, tail, config)
                    again = few_row_gemm.linear(x, packed, empty(rows, n + tail), config)
                    assert torch.equal(again, out), (name, tail, config)
                    added = few_row_gemm.linear(x, packed, residual.clone(), config, residual)
                    assert torch.equal(added, (out.float() + residual.float()).bfloat16()), (name, tail, config)
                    picked = few_row_gemm.linear(one_hot, packed, empty(rows, n + tail), config)
                    assert torch.equal(picked, (one_hot.float() @ wide.t()).bfloat16()), (name, tail, config)


def configs(weight: FragmentWeight, rows: int, paired: bool = False) -> list[FewRowConfig]:
    """Some of this card's, and one of a card with little shared memory, which splits K."""
    limit = int(torch.cuda.get_device_properties(0).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    found = few_row_gemm.candidates(weight, paired, rows, limit)
    some = [*found[:2], found[-1], *few_row_gemm.candidates(weight, paired, rows, 48 * 1024)[:1]]
    few_row_gemm.compile_ahead(weight, paired, rows, some)
    return list(dict.fromkeys(some))


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def empty(*sizes: int) -> torch.Tensor:
    """Memory that shows what is not written."""
    return torch.full(sizes, float("nan"), device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
def test_every_config_equals_what_the_weight_stands_for(rows: int) -> None:
    for name, weight in weights():
        n, k = weight.shape
        packed, x, residual = FragmentWeight.of(weight), random(rows, k), random(rows, n, seed=1)
        x[:, 5] *= 1000
        want = x.double() @ weight.dequantized().double().t()
        for config in configs(packed, rows):
            out = few_row_gemm.linear(x, packed, empty(rows, n), config)
            error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
            assert error.max() < 3e-3, (name, config)
            assert torch.equal(few_row_gemm.linear(x, packed, empty(rows, n), config), out), (name, config)
            wide = empty(rows, n + 40)
            few_row_gemm.linear(x, packed, wide[:, 8 : n + 8], config)
            assert torch.equal(wide[:, 8 : n + 8], out) and wide[:, :8].isnan().all() and wide[:, n + 8 :].isnan().all()
            added = few_row_gemm.linear(x, packed, residual.clone(), config, residual)
            assert torch.equal(added, (out.float() + residual.float()).bfloat16()), (name, config)


@pytest.mark.parametrize("rows", ROWS)
def test_plain_rows_are_multiplied_where_they_lie(rows: int) -> None:
    for n, k in ((257, 2048), (1000, 2880), (992, 4096 + 32)):
        memory = empty(n + 32, k)  # nothing behind a weight may be read
        memory[:n] = random(n, k, seed=2)
        weight, x, residual = FragmentWeight.plain(memory[:n]), random(rows, k), random(rows, n, seed=1)
        want = x.double() @ memory[:n].double().t()
        hot = torch.zeros_like(x)
        hot[torch.arange(rows), torch.arange(rows) * 97 % k] = 1
        for config in configs(weight, rows):
            out = few_row_gemm.linear(x, weight, empty(rows, n), config)
            assert ((out.double() - want).norm(dim=1) / want.norm(dim=1)).max() < 3e-3, (n, k, config)
            assert torch.equal(few_row_gemm.linear(x[:1], weight, empty(1, n), config), out[:1]), (n, k, config)
            added = few_row_gemm.linear(x, weight, residual.clone(), config, residual)
            assert torch.equal(added, (out.float() + residual.float()).bfloat16()), (n, k, config)
            both = few_row_gemm.linear(x, weight, residual.clone(), config, residual, residual[0])
            assert torch.equal(both, added + residual[0]), (n, k, config)
            picked = few_row_gemm.linear(hot, weight, empty(rows, n), config)
            assert torch.equal(picked, memory[:n].t()[torch.arange(rows) * 97 % k]), (n, k, config)
        for config in configs(weight, rows, paired=True) if n % 32 == 0 else ():
            gated = swiglu_reference(x.double(), memory[:n].double(), torch.empty(rows, n // 2, device="cuda").double())
            out = few_row_gemm.swiglu(x, weight, empty(rows, n // 2), config)
            assert ((out.double() - gated).norm(dim=1) / gated.norm(dim=1)).max() < 1e-2, (n, k, config)


@pytest.mark.parametrize("rows", ROWS)
def test_every_gated_config_equals_what_the_weight_stands_for(rows: int) -> None:
    for name, weight in weights():
        if weight.shape[0] % 32:
            continue
        n, k = weight.shape
        packed, x = FragmentWeight.of(weight), random(rows, k)
        want = swiglu_reference(
            x.double(), weight.dequantized().double(), torch.empty(rows, n // 2, device="cuda").double()
        )
        for config in configs(packed, rows, paired=True):
            out = few_row_gemm.swiglu(x, packed, empty(rows, n // 2), config)
            error = (out.double() - want).norm(dim=1) / want.norm(dim=1)
            assert error.max() < 1e-2, (name, config)
            assert torch.equal(few_row_gemm.swiglu(x, packed, empty(rows, n // 2), config), out), (name, config)


def test_one_hot_rows_pick_columns_out_exactly() -> None:
    for name, weight in weights():
        n, k = weight.shape
        packed, want = FragmentWeight.of(weight), weight.dequantized().bfloat16()
        config = configs(packed, 16)[0]
        for at in range(0, k, 16):
            x = torch.zeros(16, k, device="cuda", dtype=torch.bfloat16)
            x[torch.arange(16), at + torch.arange(16)] = 1
            got = few_row_gemm.linear(x, packed, empty(16, n), config)
            assert torch.equal(got, want[:, at : at + 16].t()), (name, at)


def test_no_scale_of_mxfp4_leaves_the_range_of_the_products() -> None:
    weight = mxfp4(64, 256, "cuda", scales=(0, 189))
    packed, x = FragmentWeight.of(weight), torch.eye(256, device="cuda", dtype=torch.bfloat16)
    for at in range(0, 256, 64):
        got = few_row_gemm.linear(x[at : at + 64], packed, empty(64, 64), configs(packed, 64)[0])
        assert torch.equal(got, weight.dequantized().bfloat16()[:, at : at + 64].t())


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
    ids = torch.tensor([17, 0, 991, 8, 17, 500], device="cuda")
    for name, weight in weights():
        packed, want = FragmentWeight.of(weight), weight.dequantized().bfloat16()[ids]
        assert torch.equal(fragment_decode.gather(packed, ids, torch.full_like(want, float("nan"))), want), name


def test_a_row_does_not_depend_on_others_its_place_or_their_number() -> None:
    for name, weight in weights():
        n, k = weight.shape
        packed, x, strangers = FragmentWeight.of(weight), random(16, k), random(16, k, seed=1) * 30
        for config in configs(packed, 16):
            want = few_row_gemm.linear(x, packed, empty(16, n), config)
            for place in (0, 7, 8, 15):
                mixed = strangers.clone()
                mixed[place] = x[3]
                got = few_row_gemm.linear(mixed, packed, empty(16, n), config)
                assert torch.equal(got[place], want[3]), (name, config)
            for rows in (1, 8, 40):
                got = few_row_gemm.linear(x[3:4].repeat(rows, 1), packed, empty(rows, n), config)
                assert torch.equal(got, want[3:4].expand(rows, n)), (name, config)


def test_a_graph_may_overwrite_what_a_product_has_just_read() -> None:
    """Products begin before the kernels in front of them end; they must see all that those wrote, and write nothing
    too early, with plain launches between them and without."""
    first, second = (FragmentWeight.of(int4(1024, 1024, 128, device="cuda")) for _ in range(2))
    third = FragmentWeight.of(fp8(1024, 1024, device="cuda"))
    split = FewRowConfig(4, 1, 2, split_k=2)
    x, hidden, out = random(16, 1024), empty(16, 1024), empty(16, 1024)

    def work() -> None:
        few_row_gemm.linear(x, first, hidden, split)
        hidden.mul_(1 / 64)
        few_row_gemm.linear(hidden, second, out, split, x)
        few_row_gemm.linear(out, third, hidden, FewRowConfig(8, 1, 2))  # its input is overwritten by the next one
        few_row_gemm.linear(x, first, out, FewRowConfig(8, 1, 1))
        out.add_(hidden)

    work()
    want = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(REPLAYS):
        out.fill_(float("nan"))
        hidden.fill_(float("nan"))
        graph.replay()
        wrong += (out != want).sum()
    assert want.isfinite().all() and int(wrong) == 0


def test_nothing_is_loaded_during_a_capture() -> None:
    packed, x, out = FragmentWeight.of(int4(64, 1024, 32, device="cuda")), random(4, 1024), empty(4, 64)
    new = FewRowConfig(5, 1, 1)
    with pytest.raises(RuntimeError, match="nothing is loaded"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        few_row_gemm.linear(x, packed, out, new)
    assert few_row_gemm.linear(x, packed, out, new).isfinite().all()


@pytest.mark.parametrize("dialect", ["gptq", "pack_quantized_zeros"])
def test_a_target_is_multiplied_by_the_kernels(dialect: str, tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path / "twin", hidden_size=256, intermediate_size=512, head_dim=64)
    quantise(tmp_path / "twin", tmp_path / "quantised", dialect)

    def logits(folder: str, device: str, dtype: torch.dtype) -> torch.Tensor:
        checkpoint = Checkpoint.open(tmp_path / folder)
        facts = TargetFacts.from_checkpoint(checkpoint)
        weights = read_weights(checkpoint, facts, torch.device(device), dtype)
        choose_configs(weights.products, 4)
        packed = [product for product in weights.products if isinstance(product.weight, FragmentWeight)]
        assert len(packed) > 4 or (folder, device) != ("quantised", "cuda")
        assert all(isinstance(product.config, FewRowConfig) for product in packed)
        target = FusedTarget(weights, facts.model, (0, 2), 64, 4)
        target.prefill(torch.arange(5, 12, device=device), False)
        rows = target.verify(torch.arange(12, 16, device=device), False).hidden
        return target.head(rows).float().cpu()

    want, found = logits("quantised", "cpu", torch.float32), logits("quantised", "cuda", torch.bfloat16)
    rounding = (logits("twin", "cuda", torch.bfloat16) - want).norm()  # of the activations alone
    assert (found - want).norm() < 1.5 * rounding + 1e-2 * want.norm()
