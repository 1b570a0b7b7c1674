"""Quantized weights become fragments where the kernels for them run, over their own memory; their products stay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import cuda_driver, fragment_decode, fragment_gemm, nvrtc
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import Codable, FragmentWeight
from dflash_local.kernels.kernel_record import KernelRecord
from dflash_local.kernels.kernel_trial import KernelTrial, OnProgress
from dflash_local.kernels.quantized_weight import CodedWeight
from dflash_local.kernels.skinny_gemm import GemmConfig
from dflash_local.kernels.split_kv import DeviceProperties
from dflash_local.kernels.timing import TIMED_AGAIN
from dflash_local.models.checkpoint import Checkpoint
from dflash_local.models.fused import fragment_kernels, kernel_choice
from dflash_local.models.fused.kernel_choice import candidates, choose_configs, without_kernel
from dflash_local.models.fused.linear import GateUp, JoinedLinear, Linear, finish, gathered_rows
from dflash_local.models.fused.target import FusedTarget
from dflash_local.models.fused.weights import read_weights
from dflash_local.models.target_facts import TargetFacts
from tests.card_clock import CardClock, timed_again
from tests.families import save_model
from tests.quantized_checkpoints import quantize_checkpoint
from tests.quantized_weights import fp8, fp8_rows, int4, int8, mxfp4, nvfp4

WHOLE = (
    lambda: int4(96, 256, 32, True),
    lambda: int4(96, 256, 128),
    lambda: int8(96, 256, 256),
    lambda: fp8(96, 256),
    lambda: fp8_rows(96, 256),
    lambda: mxfp4(96, 256),
    lambda: nvfp4(96, 256),
)


@pytest.fixture
def record(tmp_path: Path) -> KernelRecord:
    return KernelRecord(tmp_path / "cubins", {})


@pytest.fixture
def card(record: KernelRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where kernels run and were tried; products stay PyTorch's, since activations lie on the CPU."""

    def all_right(
        trials: Iterable[KernelTrial], device: torch.device, record: KernelRecord, progress: OnProgress
    ) -> None:
        record.verdicts |= {trial.kernel: "right" for trial in trials if trial.kernel not in record.verdicts}

    for module in (fragment_kernels, kernel_choice):
        monkeypatch.setattr(module, "runs_kernels", lambda weight: isinstance(weight, CodedWeight))
    monkeypatch.setattr(fragment_kernels, "record_of", lambda device: record)
    monkeypatch.setattr(fragment_kernels, "try_kernels", all_right)
    for module in (fragment_kernels, kernel_choice):
        monkeypatch.setattr(module, "device_properties", lambda device: DeviceProperties(99 * 1024, 16, (9, 0)))
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: 13000)
    monkeypatch.setattr(nvrtc, "cubin", lambda *_of_a_card: b"")


@pytest.mark.parametrize("made", WHOLE)
def test_a_weight_is_packed_over_its_own_memory_and_multiplies_as_before(made: object, card: None) -> None:
    assert callable(made)
    weight: Codable = made()
    single, pair = Linear(weight), GateUp(made())
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    want, gated = single(x, torch.empty(5, 96)), pair(x, torch.empty(5, 48))
    finish([single, pair])
    assert isinstance(single.weight, FragmentWeight) and isinstance(pair.weight, FragmentWeight)
    assert single.weight.codes.data_ptr() == weight.codes.data_ptr() and single.weight.nbytes == weight.nbytes
    in_order: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6 * float(want.abs().max())}  # of summation
    assert torch.allclose(single(x, torch.empty(5, 96)), want, **in_order)
    in_bfloat16 = 2**-7  # without a kernel, weights are rounded to the dtype that they stand for
    assert torch.allclose(single.prefill(x), want, atol=in_bfloat16 * float(want.abs().max()))
    assert torch.allclose(pair(x, torch.empty(5, 48)), gated, atol=in_bfloat16 * float(gated.abs().max()))
    assert torch.allclose(pair.prefill(x), gated, atol=in_bfloat16 * float(gated.abs().max()))
    ids = torch.tensor([0, 5, 40, 87])
    decoded = single.weight.dequantized().to(weight.dtype)[ids]
    assert torch.equal(gathered_rows(single, ids, False).weight, decoded), "rows of other tiles"  # type: ignore[arg-type]
    finish([single])
    assert torch.allclose(single(x, torch.empty(5, 96)), want, **in_order), "once is enough"


@pytest.mark.parametrize("weight", [int4(96, 256, 32), fp8_rows(88, 160)])
def test_a_few_plain_rows_ride_along_with_packed_ones(
    weight: Codable, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = weight.shape
    rows = torch.randn(24, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(0))
    want = x @ torch.cat((weight.dequantized(), rows.float())).t()
    joined = JoinedLinear((Linear(weight), Linear(rows)), {})
    joined.finish()
    (product,) = joined.products
    assert isinstance(product.weight, FragmentWeight) and product.weight.format.tail == 24
    in_order: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6 * float(want.abs().max())}  # of summation
    assert torch.allclose(joined(x, torch.empty(5, n + 24)), want, **in_order)
    assert torch.allclose(joined.prefill(x), want, atol=2**-7 * float(want.abs().max()))
    residual = torch.randn(5, n + 24, generator=torch.Generator().manual_seed(2))
    added = residual + joined.prefill(x)
    monkeypatch.setattr(fragment_decode, "DECODED_SLICE", 32 * k)
    assert fragment_decode.slice_rows(n, k) < n, "several slices"
    assert joined.prefill(x, residual) is residual and torch.allclose(residual, added, **in_order)
    assert candidates(product, 99 * 1024, 16) and product.kind != Linear(FragmentWeight.of(int4(120, 256, 32))).kind
    joined.finish()
    assert joined.products == (product,), "once is enough"


@pytest.mark.parametrize("weight", [int4(96, 256, 16), int4(96, 80, 80), fp8(96, 256, (8, 128))])
def test_what_the_kernels_do_not_take_stays(weight: Codable, card: None) -> None:
    layer = Linear(weight)
    finish([layer])
    assert layer.weight is weight
    (line,) = without_kernel([layer, layer])
    assert f"weights of {weight.shape[0]} x {weight.shape[1]} are decoded for each product" in line
    assert line.count("no kernel takes them (") == 1 and not line.endswith("()")


def test_a_missing_compiler_leaves_the_generic_product_and_is_named_with_its_wheel(
    card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = MissingDependencyError("the compiler NVRTC is not installed", "python -m pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(nvrtc, "why_not", lambda capability: missing)
    layer = Linear(int4(96, 256, 32))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    want = layer(x, torch.empty(5, 96))
    finish([layer])
    assert isinstance(layer.weight, FragmentWeight) and candidates(layer, 99 * 1024, 16) == []
    assert torch.allclose(layer(x, torch.empty(5, 96)), want, rtol=1e-4, atol=1e-3)
    (line,) = without_kernel([layer])
    assert "pip install nvidia-cuda-nvrtc" in line and "96 x 256" in line


@pytest.mark.parametrize("fault", ["one row", "one feature", "not written"])
def test_a_kernel_that_is_wrong_on_this_card_is_not_offered(
    fault: str, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, pair = Linear(int4(96, 256, 32, True)), GateUp(fp8(96, 256))
    finish([single, pair])
    assert all(candidates(layer, 227 * 1024, 16) for layer in (single, pair))
    bad = candidates(single, 227 * 1024, 16)[0]
    assert without_kernel([single]) and not without_kernel([Linear(int4(96, 256, 32))])
    for name in ("linear", "swiglu"):
        right = getattr(fragment_gemm, name)

        def wrong(
            x: torch.Tensor, weight: object, out: torch.Tensor, config: object, *residual: object, right: Any = right
        ) -> torch.Tensor:
            found: torch.Tensor = right(x, weight, out, None, *residual)
            if config == bad and fault == "one row":
                found[3] = 1e-3  # whose inputs are zeros
            elif config == bad and fault == "one feature":
                found[0, 5] += found[0].float().std()
            elif config == bad:
                found[-1, -1] = float("nan")
            return found

        monkeypatch.setattr(fragment_gemm, name, wrong)
    offered = candidates(single, 227 * 1024, 16)
    assert offered and bad not in offered


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CardClock:
    found = CardClock.plant(monkeypatch)
    for kind in (Linear, GateUp):
        monkeypatch.setattr(kind, "__call__", found.noting(kind.__call__, lambda layer, *args: layer.config))
    return found


def some_layers() -> list[Linear | GateUp]:
    """Seven of one kind and one of another."""
    layers: list[Linear | GateUp] = [*(Linear(int4(96, 256, 32)) for _ in range(7)), GateUp(fp8(96, 256))]
    finish(layers)
    return layers


def test_what_was_the_fastest_is_not_tried_again_and_timed_once(
    card: None, record: KernelRecord, clock: CardClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = some_layers()
    heard: list[str] = []
    first = choose_configs(layers, 16, lambda text, part: heard.append(text))
    assert len(clock.us) > 4 and layers[0].config == layers[1].config and heard[-1] == "measuring"
    assert isinstance(layers[0].config, FragmentGemmConfig)

    def again(*args: object) -> None:
        assert not {trial.kernel for trial in args[0]} - set(record.verdicts)  # type: ignore[attr-defined]

    for layer in layers:
        layer.config = None
    kept = KernelRecord(record.path.parent, {})
    kept.verdicts = dict(record.verdicts)
    monkeypatch.setattr(fragment_kernels, "record_of", lambda device: kept)
    monkeypatch.setattr(fragment_kernels, "try_kernels", again)
    clock.timed.clear()
    clock.warmed.clear()
    assert choose_configs(layers, 16) == first and {layer.config for layer in layers} == set(first.values())
    few, only = (layers[0].config,) * TIMED_AGAIN, (layers[-1].config,)
    assert clock.timed == [few, only] and not clock.warmed, "a few layers of each kind, once"
    assert choose_configs(layers, 8) and len(clock.timed) > 4, "another number of rows is another product"


@pytest.mark.parametrize(
    ("factor", "words", "changed"),
    [(1.2, "", False), (0.85, "", False), (2.4, "2 kinds of weights take 2.4 times", True), (0.5, "", True)],
)
def test_a_product_that_takes_another_time_than_when_it_was_chosen_is_measured_again(
    factor: float, words: str, changed: bool, card: None, record: KernelRecord, clock: CardClock
) -> None:
    layers = some_layers()
    choose_configs(layers, 16)
    before, config = dict(record.microseconds), layers[0].config
    clock.us[config] *= factor
    said = timed_again(lambda timer: choose_configs(layers, 16, timer=timer), clock)
    assert words in said and bool(said) == bool(words) and (len(clock.timed) > 4) is changed
    assert (layers[0].config == config) == (factor < 2), "another one is faster now"
    assert len(dict(record.microseconds.items() - before.items())) == (2 if changed else 0)
    assert not timed_again(lambda timer: choose_configs(layers, 16, timer=timer), clock)
    assert len(clock.timed) == 2, "measured again once"


@pytest.mark.parametrize("fastest", ["library", "Triton"])
@pytest.mark.parametrize("compiler", [True, False])
def test_the_library_s_or_triton_s_product_of_a_plain_weight_is_remembered_for_its_torch(
    fastest: str, compiler: bool, card: None, record: KernelRecord, clock: CardClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kernel_choice, fragment_kernels):
        monkeypatch.setattr(module, "runs_kernels", lambda weight: True)
    if not compiler:
        monkeypatch.setattr(nvrtc, "why_not", lambda capability: MissingDependencyError("NVRTC is not installed"))
    monkeypatch.setattr(fragment_gemm, "linear", lambda x, weight, out, config, *residual: out.fill_(1))
    layers = [Linear(torch.randn(96, 256).bfloat16()) for _ in range(3)]
    want = None if fastest == "library" else GemmConfig(16, 64, 4)
    clock.us[want] = 1.0
    choose_configs(layers, 16)
    assert layers[0].config == want and len(clock.us) > 2 and len(record.choices) == 1
    clock.timed.clear()
    choose_configs(layers, 16)
    assert layers[0].config == want and clock.timed == [(want,) * 3], "not chosen again"
    monkeypatch.setattr(torch, "__version__", "99.0")
    choose_configs(layers, 16)
    assert len(record.choices) == 2 and len(clock.timed) > 3


def test_kernels_that_failed_give_way_to_the_generic_product_and_a_line_counts_them(
    card: None, record: KernelRecord, clock: CardClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Linear(int4(96, 256, 32))
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    want = layer(x, torch.empty(5, 96))
    finish([layer])
    verdicts: Iterator[Any] = itertools.chain(["hang", "fault", "wrong"], itertools.repeat("untried"))

    def try_kernels(
        trials: Iterable[KernelTrial], device: torch.device, record: KernelRecord, progress: OnProgress
    ) -> None:
        record.verdicts |= {trial.kernel: next(verdicts) for trial in trials if trial.kernel not in record.verdicts}

    monkeypatch.setattr(fragment_kernels, "try_kernels", try_kernels)
    choose_configs([layer], 16)
    assert layer.config is None and not clock.timed and not clock.warmed
    assert torch.allclose(layer(x, torch.empty(5, 96)), want, rtol=1e-4, atol=1e-3)
    (line,) = without_kernel([layer])
    assert "1 gave wrong numbers, 1 faulted, 1 did not end" in line and "96 x 256" in line
    assert without_kernel([layer, GateUp(layer.weight)])[0].count("96 x 256") == 1
    assert "dflash check MODEL --only kernels --json" in line


@pytest.mark.parametrize("dialect", ["gptq", "pack_quantized_zeros"])
def test_a_target_with_packed_weights_has_the_logits_of_one_that_is_decoded(
    dialect: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_model("qwen3_5", tmp_path / "twin", hidden_size=128, intermediate_size=256, head_dim=32)
    quantize_checkpoint(tmp_path / "twin", tmp_path / "quantized", dialect)
    checkpoint = Checkpoint.open(tmp_path / "quantized")
    facts = TargetFacts.from_checkpoint(checkpoint)

    def logits() -> torch.Tensor:
        weights = read_weights(checkpoint, facts, torch.device("cpu"), torch.bfloat16)
        kinds.append({type(product.weight) for product in weights.products})
        target = FusedTarget(weights, facts.model, (0, 2), 64, 4)
        target.prefill(torch.arange(5, 15), False)
        return target.head(target.verify(torch.tensor([15]), False).hidden).float()

    kinds: list[set[type]] = []
    want = logits()
    request.getfixturevalue("card")
    found = logits()
    assert FragmentWeight in kinds[1] and FragmentWeight not in kinds[0]
    assert torch.allclose(found, want, atol=2e-2 * float(want.abs().max()))
