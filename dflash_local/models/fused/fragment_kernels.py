"""Describe which skinny GEMM kernels may multiply a weight on its card, and which is the fastest: found out once, kept.

A kernel's first use is a child process's (``kernels.kernel_trial``); at each load used configurations are tried again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from dflash_local.kernels import decode_gemm, fragment_decode, fragment_gemm, nvrtc
from dflash_local.kernels.allocate import dtype_name
from dflash_local.kernels.fragment_gemm import FragmentGemmConfig
from dflash_local.kernels.fragment_packing import PLAIN, Codable, FragmentWeight, fragment_format
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.kernel_record import KernelRecord, Verdict, record_of
from dflash_local.kernels.kernel_trial import OnProgress, TrialsImpossibleError, try_kernels
from dflash_local.kernels.product_check import ProductCheck, mixed_rows
from dflash_local.kernels.product_trials import FragmentGemmTrial, trials_of
from dflash_local.kernels.skinny_gemm import MAX_ROWS, GemmConfig, gated
from dflash_local.kernels.split_kv import device_properties
from dflash_local.kernels.timing import spell
from dflash_local.layout.linear import SLICE_ROWS

KernelConfig = GemmConfig | FragmentGemmConfig
Product = tuple[FragmentWeight, bool]  # the bool: gate and up, which are multiplied with each other
REPORT = "dflash check MODEL --only kernels --json reports it"
FAILED: dict[Verdict, str] = {
    "wrong": "gave wrong numbers",
    "fault": "faulted",
    "hang": "did not end",
    "uncompiled": "did not compile",
    "untried": "were left out",
}


def product_of(weight: object, paired: bool) -> Product | None:
    """Return the product of a weight that the kernels take where it lies: packed, or plain bfloat16."""
    if isinstance(weight, FragmentWeight):
        return weight, paired
    if not isinstance(weight, torch.Tensor) or not runs_kernels(weight):
        return None
    try:
        return FragmentWeight.plain(weight), paired
    except ValueError:
        return None


def try_new(products: Iterable[Product], rows: int, progress: OnProgress = lambda text, part: None) -> None:
    """Try kernels for up to ``rows`` rows that are new to this card; ``progress`` gets what is done, and its share."""
    each = [(weight, paired) for weight, paired in products if not _unmet(weight)]
    if not each:
        return
    device = each[0][0].device
    record = record_of(device)
    record.impossible = ""
    try:
        try_kernels((trial for product in each for trial in _trials(product, rows)), device, record, progress)
    except TrialsImpossibleError as error:
        record.impossible = str(error)


def right_configs(product: Product, rows: int, shared_memory: int) -> list[FragmentGemmConfig]:
    """Return configurations tried on this card and right with the weight; ``shared_memory`` in bytes."""
    weight, paired = product
    if _unmet(weight):
        return []
    record = record_of(weight.device)
    if not record.impossible:
        try_new([product], rows)
    found = fragment_gemm.candidates(weight, paired, rows, shared_memory)
    found = [config for config in found if _is_tried(record, product, config, rows)]
    if not found:
        return []
    fragment_gemm.compile_ahead(weight, paired, rows, found)
    check = _check(product, rows)
    return [config for config in found if check.passes(config, rows)]


def still_right(
    product: Product, rows: int, others: Sequence[KernelConfig | None], spelled: str
) -> Iterator[KernelConfig | None]:
    """Find the configuration spelled so where it may be launched; ``others`` of no skinny GEMM always may."""
    weight, paired = product
    yield from (other for other in others if spell(other) == spelled)
    if _unmet(weight):
        return
    record, shared_memory = record_of(weight.device), device_properties(weight.device).shared_memory
    for config in fragment_gemm.candidates(weight, paired, rows, shared_memory):
        if repr(config) == spelled and _is_tried(record, product, config, rows):
            yield from [config] if _check(product, rows).passes(config, rows) else []


def why_none(products: Sequence[Product]) -> str:
    """Return why no configuration is used for these weights of one device, in words for a user."""
    device = products[0][0].device
    unmet = nvrtc.why_not(torch.cuda.get_device_capability(device))
    if unmet is not None:
        return str(unmet)
    record = record_of(device)
    kernels = {trial.kernel for product in products for trial in _trials(product, SLICE_ROWS)}
    if not kernels:
        return "no kernel takes matrices of that shape"
    return why_failed(record, kernels)


def why_failed(record: KernelRecord, kernels: Collection[str]) -> str:
    """Return why none of some kernels is used, in words for a user: their verdicts, or why there are none."""
    verdicts = Counter(record.verdicts.get(kernel) for kernel in kernels)
    failed = [f"{verdicts[verdict]} {words}" for verdict, words in FAILED.items() if verdicts[verdict]]
    if failed:
        return f"of {len(kernels)} kernels {', '.join(failed)} on this card ({REPORT})"
    return record.impossible or f"no kernel gave the right product on this card ({REPORT})"


def _unmet(weight: FragmentWeight) -> bool:
    return nvrtc.why_not(torch.cuda.get_device_capability(weight.device)) is not None


def _trials(product: Product, rows: int) -> list[FragmentGemmTrial]:
    """List trials of all configurations for so many rows, those with fewer rows first."""
    weight, paired = product
    configs = fragment_gemm.candidates(weight, paired, rows, device_properties(weight.device).shared_memory)
    found = [trial for config in configs for trial in _trials_of(product, config, rows)]
    return sorted(found, key=lambda trial: trial.rows)


def _trials_of(product: Product, config: FragmentGemmConfig, rows: int) -> tuple[FragmentGemmTrial, ...]:
    """Return kernels that a configuration chosen for so many rows may launch: with more rows, too, where they fit."""
    weight, paired = product
    fits = config.fits(weight, paired, SLICE_ROWS, device_properties(weight.device).shared_memory)
    return trials_of(weight, paired, config, SLICE_ROWS if fits else rows)


def _is_tried(record: KernelRecord, product: Product, config: FragmentGemmConfig, rows: int) -> bool:
    return all(record.is_right(trial.kernel) for trial in _trials_of(product, config, rows))


def _check(product: Product, rows: int) -> ProductCheck:
    weight, paired = product
    return ProductCheck(weight, paired, mixed_rows(rows, weight.shape[1], weight.device))


def product_name(product: Product, rows: int) -> str:
    """Name a product for so many rows as the record has it."""
    weight, paired = product
    n, k = weight.shape
    against = f", torch {torch.__version__}" if weight.format == PLAIN else ""  # whose products were measured, too
    return f"{weight.format} {n} x {k} {'paired ' if paired else ''}at {rows} rows{against}"


def takes(weight: Codable) -> bool:
    """Return True where kernels read fragments on the weight's device, and take its dtype, its shape and its groups."""
    return runs_kernels(weight) and not why_not(weight)


def why_not(weight: Codable) -> str:
    """Return why the kernels do not take a weight, on whatever device; empty where they do."""
    if weight.dtype != torch.bfloat16:
        return f"they compute in bfloat16, not in {dtype_name(weight.dtype)}"
    try:
        fragment_format(weight)
    except ValueError as error:
        return str(error)
    return ""


class _Fragments:
    has_library = False

    def finish(self, weight: FragmentWeight) -> FragmentWeight:
        return weight

    def randomize(self, weight: FragmentWeight, generator: torch.Generator) -> None:
        raise TypeError("a weight is packed once it is filled")

    def rows(self, weight: FragmentWeight, stop: int) -> FragmentWeight:
        return weight.first_rows(stop)

    def linear(
        self,
        x: torch.Tensor,
        weight: FragmentWeight,
        out: torch.Tensor,
        config: FragmentGemmConfig | None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        if len(x) > MAX_ROWS:
            product = self.prefill(x, weight)
            return out.copy_(product) if residual is None else torch.add(residual, product, out=out)
        if config is None:
            return decode_gemm.linear(x, weight, out, residual)
        return fragment_gemm.linear(x, weight, out, config, residual)

    def swiglu(
        self, x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, config: FragmentGemmConfig | None
    ) -> torch.Tensor:
        if len(x) <= MAX_ROWS:
            if config is None:
                return decode_gemm.swiglu(x, weight, out)
            return fragment_gemm.swiglu(x, weight, out, config)
        return gated(self.prefill(x, weight), out)

    def prefill(self, x: torch.Tensor, weight: FragmentWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
        return fragment_decode.linear(x, weight, residual)

    def candidates(
        self, weight: FragmentWeight, paired: bool, rows: int, shared_memory: int
    ) -> list[FragmentGemmConfig]:
        if runs_kernels(weight):
            return right_configs((weight, paired), rows, shared_memory)
        return fragment_gemm.candidates(weight, paired, rows, shared_memory)


FRAGMENTS = _Fragments()
