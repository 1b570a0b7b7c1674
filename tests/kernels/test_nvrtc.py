"""Kernels in CUDA C++: they compile for every card, within its shared memory, and what is compiled is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_local.config.features import GatedDeltaNetConfig
from dflash_local.errors import MissingDependencyError
from dflash_local.kernels import attend_codes, delta_step, fragment_gemm, nvrtc
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import PLAIN, FragmentFormat, FragmentWeight
from dflash_local.kernels.skinny_gemm import RESERVED_SHARED_MEMORY
from tests.cuda_cards import SHARED_MEMORY
from tests.kernels.few_rows import FORMATS

# With a format's plain rows behind it, too.
KINDS = {
    **FORMATS,
    "int4 with a tail": replace(FORMATS["int4"], tail=64),
    "fp8 with a tail": replace(FORMATS["fp8"], tail=96),
}
DRIVER = 13000


def on_meta(n: int, k: int, kind: FragmentFormat) -> FragmentWeight:
    """A weight without memory."""
    if kind == PLAIN:
        return FragmentWeight.plain(torch.empty(n, k, dtype=torch.bfloat16, device="meta"))
    codes = torch.empty(-(-n // 16), -(-k // 128), kind.step_words, dtype=torch.int32, device="meta")
    shape = torch.Size((n + kind.tail, k))
    return FragmentWeight(codes, torch.empty(0, device="meta"), None, None, shape, kind, torch.bfloat16)


def check_compiled(
    compiler: nvrtc.Nvrtc, card: int, weight: FragmentWeight, paired: bool, rows: int, config: FragmentGemmConfig
) -> None:
    """It compiles, takes no shared memory of its own beside what the host counts, and few numbers leave registers."""
    options = fragment_gemm.compile_options(weight.format, weight.shape[1], config, rows, paired)
    source = fragment_gemm.source_text(fragment_gemm.SOURCE)
    compiled, log = compiler.compile(source, [f"--gpu-architecture=sm_{card}", "--ptxas-options=-v", *options])
    assert compiled.startswith(b"\x7fELF") and fragment_gemm.KERNEL_NAME.encode() in compiled
    assert "warning" not in log and "bytes smem" not in log, log
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= 128, (config, log)
    taken = config.shared_bytes(weight.shape[1], rows, weight.format)
    assert taken + RESERVED_SHARED_MEMORY <= SHARED_MEMORY[card] * 1024


# Every kind of codes, each for another card; all formats for all cards in test_every_configuration_compiles.
HERE = ("bfloat16", "int4 with a tail", "int4, groups of 32 with zeros", "int8, rows", "fp8, rows", "MXFP4")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HERE)
def test_each_card_compiles_a_configuration_of_some_formats(compiler: nvrtc.Nvrtc, name: str) -> None:
    """In turn for one slice of eight rows and for two; both of every format in the long tests."""
    at, kind = HERE.index(name), KINDS[name]
    card, rows = list(SHARED_MEMORY)[at], (16, 8)[at // 2 % 2]
    weight, paired = on_meta(24_576, 4096, kind), not kind.tail
    config = fragment_gemm.candidates(weight, paired, rows, SHARED_MEMORY[card] * 1024)[0]
    check_compiled(compiler, card, weight, paired, rows, config)


@pytest.mark.slow
@pytest.mark.parametrize("card", SHARED_MEMORY)
@pytest.mark.parametrize("name", KINDS)
def test_every_configuration_compiles_for_every_card(compiler: nvrtc.Nvrtc, card: int, name: str) -> None:
    for n, k, paired in ((24_576, 4096, True), (34_816, 5120, True), (4096, 12_288, False), (5120, 17_408, False)):
        weight = on_meta(n, k, KINDS[name])
        if paired and weight.format.tail:
            continue
        for rows in (8, 16):
            configs = fragment_gemm.candidates(weight, paired, rows, SHARED_MEMORY[card] * 1024)
            assert configs
            for config in configs:
                check_compiled(compiler, card, weight, paired, rows, config)


@pytest.mark.parametrize("card", SHARED_MEMORY)
@pytest.mark.parametrize("sizes", [(24_576, 4096), (5120, 17_408), (4096, 12_288), (64, 64), (1024, 4128)])
def test_every_card_is_offered_configurations_that_it_holds(card: int, sizes: tuple[int, int]) -> None:
    for kind in KINDS.values():
        for paired in (False,) if kind.tail else (False, True):
            weight = on_meta(*sizes, kind)
            for rows in (1, 16, 64):
                configs = fragment_gemm.candidates(weight, paired, rows, SHARED_MEMORY[card] * 1024)
                assert configs and len(configs) <= 10
                for config in configs:
                    taken = config.shared_bytes(sizes[1], rows, kind) + RESERVED_SHARED_MEMORY
                    assert taken * config.blocks_per_sm <= SHARED_MEMORY[card] * 1024
                    assert config.threads <= 1024 and config.block_k(sizes[1]) * config.split_k >= sizes[1]
                    assert not paired or config.unit_tiles % 2 == 0


def test_what_is_compiled_is_kept_for_the_same_source_options_and_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []

    class Compiler:
        version = (13, 0)

        def architectures(self) -> tuple[int, ...]:
            return (80, 90)

        def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
            asked.append(options)
            return f"{source} {options}".encode(), ""

    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "nvrtc", Compiler)
    first = nvrtc.cubin("one", ["-DN=1"], (9, 0), DRIVER)
    assert nvrtc.cubin("one", ["-DN=1"], (9, 0), DRIVER) == first and len(asked) == 1
    nvrtc.cubin("one", ["-DN=1"], (9, 0), DRIVER, own_instructions=True)
    assert [options[0][-6:] for options in asked] == ["=sm_90", "sm_90a"] and asked[0][1:] == ["-DN=1"]
    nvrtc.cubin("two", ["-DN=1"], (9, 0), DRIVER)
    nvrtc.cubin("one", ["-DN=2"], (9, 0), DRIVER)
    nvrtc.cubin("one", ["-DN=1"], (8, 0), DRIVER)
    nvrtc.cubin("one", ["-DN=1"], (9, 0), DRIVER + 10)
    monkeypatch.setattr(Compiler, "version", (13, 1))
    nvrtc.cubin("one", ["-DN=1"], (9, 0), DRIVER)
    assert len(asked) == 7
    folder = nvrtc.cubin_folder()
    assert folder is not None and len(list(folder.iterdir())) == 7
    with pytest.raises(MissingDependencyError, match=r"13\.1 does not know this card .*12\.0") as caught:
        nvrtc.cubin("one", [], (12, 0), DRIVER)
    assert "pip install --upgrade nvidia-cuda-nvrtc" in caught.value.hint


def test_only_the_compiler_of_torchs_cuda_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0", "nvrtc64_130_0.dll")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc.nvrtc_files, "installed", lambda: map(Path, names))
    monkeypatch.setattr(nvrtc, "Nvrtc", str)
    nvrtc.nvrtc.cache_clear()
    try:
        assert str(nvrtc.nvrtc()) == "libnvrtc.so.13"
        assert [nvrtc.nvrtc_files.major_of(name) for name in names] == ["12", "13", None, None, "13"]
    finally:
        nvrtc.nvrtc.cache_clear()


@pytest.mark.parametrize("card", sorted(SHARED_MEMORY))
def test_the_recurrence_compiles_for_every_card(compiler: nvrtc.Nvrtc, card: int) -> None:
    """Of Qwen3.5-9B; all of it in registers."""
    options = delta_step.compile_options(GatedDeltaNetConfig(16, 32, 128, 128, 4))
    source = delta_step.SOURCE.read_text(encoding="utf-8")
    cubin, log = compiler.compile(source, [f"--gpu-architecture=sm_{card}", "--ptxas-options=-v", *options])
    assert cubin and "0 bytes spill stores, 0 bytes spill loads" in log


@pytest.mark.timeout(300)
@pytest.mark.parametrize("queries", [16, 32, 48, 64, 80, 96])
def test_attention_over_codes_compiles_for_hopper(compiler: nvrtc.Nvrtc, queries: int) -> None:
    options = attend_codes.compile_options(24, 4, queries, 0)
    source = attend_codes.SOURCE.read_text(encoding="utf-8")
    cubin, log = compiler.compile(source, ["--gpu-architecture=sm_90a", "--ptxas-options=-v", *options])
    spilled = re.findall(r"(\d+) bytes spill stores", log)
    assert cubin and [int(number) <= 64 for number in spilled] == [True], log
    assert "serialized" not in log and attend_codes.shared_bytes(queries) + RESERVED_SHARED_MEMORY <= 227 * 1024


def test_what_does_not_compile_says_why(compiler: nvrtc.Nvrtc) -> None:
    with pytest.raises(RuntimeError, match="undefined"):
        compiler.compile("__global__ void f() { g(); }", ["--gpu-architecture=sm_80"])
