"""A kernel's name is enough to compile it for a card that is not here; no other text reaches the compiler."""

from __future__ import annotations

import pytest

from dflash_local.kernels import nvrtc
from dflash_local.kernels.expert_gemm import DownConfig, KernelSpec, Mixture
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import PLAIN
from dflash_local.kernels.product_trials import ExpertTrial, FragmentGemmTrial, RouteTrial
from dflash_local.report.scrub import Secrets, scrub
from tools.replay.recompile import recompiled

NAME = FragmentGemmTrial(PLAIN, (4096, 4096), False, FragmentGemmConfig(), 16).kernel


def test_the_name_survives_a_report() -> None:
    assert scrub(NAME, Secrets()) == NAME


def test_a_kernel_compiles_by_its_name_and_a_bad_one_does_not(compiler: nvrtc.Nvrtc) -> None:
    assert 90 in compiler.architectures() and recompiled(NAME, (9, 0)) == "compiles"
    broken = " ".join(word for word in NAME.split() if not word.startswith("-DWARPS_K"))
    assert recompiled(broken, (9, 0)).startswith("does not compile: ")
    assert recompiled(NAME, (2, 0)).startswith("not tried: ")


@pytest.mark.usefixtures("compiler")
def test_kernels_of_experts_compile_from_their_own_sources() -> None:
    mixture = Mixture(16, 2, 1)
    spec = KernelSpec(PLAIN, 256, False, mixture, DownConfig(8, 1, 2), 8)
    names = [RouteTrial(mixture, biased=False).kernel, ExpertTrial(spec, 256).kernel]
    assert [recompiled(scrub(name, Secrets()), (9, 0)) for name in names] == ["compiles", "compiles"]


@pytest.mark.parametrize("name", ["", "x", "-include=/etc/passwd", f"{NAME} -I/etc", '-DX="a"', "--std=c++17 -DX=$(x)"])
def test_other_options_do_not_reach_the_compiler(name: str) -> None:
    assert recompiled(name, (9, 0)) == "not tried: no name of a kernel"
