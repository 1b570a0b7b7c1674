"""Products of a few rows with a weight, quantised or not, by ``fragment_gemm.cu``: its every byte is read once.

Configurations are chosen by measurement (``models.fused.kernel_choice``). Each fixes the order of the float32 sums, so
a row's result does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from dflash_local.kernels import cuda_driver, nvrtc
from dflash_local.kernels.cuda_driver import WARP_SIZE
from dflash_local.kernels.fragment_packing import PLAIN, STEP_K, TILE_N, FragmentFormat, FragmentWeight
from dflash_local.kernels.jit import runs_kernels
from dflash_local.kernels.skinny_gemm import MAX_ROWS, RESERVED_SHARED_MEMORY, gated, row_stride
from dflash_local.kernels.split_kv import device_properties
from dflash_local.layout.linear import ROW_TILE, SLICE_ROWS

SOURCE = Path(__file__).with_name("fragment_gemm.cu")
FRAGMENTS = Path(__file__).with_name("fragments.cu")  # stands before every source whose weights lie in fragments
KERNEL_NAME = "fragment_gemm"
TAIL_BITS = 16
# As the source numbers them.
CODES = {"int4": 0, "int8": 1, "e4m3": 2, "e2m1": 3, "bfloat16": 4, "int5": 5, "int6": 6, "iq4": 7}
NESTED_SCALE_TYPES = {torch.uint8: 6, torch.int8: 7}
SCALE_TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.uint8: 4, torch.float8_e4m3fn: 5}
NO_SCALE = 0
MAX_PARTS = 1024  # counters of a device
SPLITS = (1, 2, 4, 8, 16)
MAX_SUMS = 2**24  # numbers that blocks which share a K leave for each other, unless there is no other way
MAX_LOADING_THREADS, MAX_LOADED = 512, 48  # more threads have no registers for more codes than that
# More of a lane for a tile's step where scales are made of bytes, or minima added; by tiles of eight rows.
GGUF_REGISTERS = {1: 4, 2: 6}
# Warps along K (about so many), along N, tiles of a warp, stages: winners on an H200.
LAYOUTS = ((16, 1, 2, 2), (16, 1, 1, 2), (8, 2, 2, 2), (8, 2, 1, 4), (10, 2, 1, 2))
PLAIN_LAYOUTS = ((16, 1, 1, 2), (8, 2, 1, 2), (4, 2, 1, 4))  # of bfloat16, whose loads take four times the registers


@dataclass(frozen=True, slots=True)
class FragmentGemmConfig:
    """Describe how a product is shared.

    Attributes:
        warps_k: warps that share a unit's K. warps_n: warps side by side along N. tiles: of 16 features, of a warp.
        num_stages: steps of 128 along K that a warp loads ahead. split_k: blocks that share a unit's K.
        blocks_per_sm: blocks that a multiprocessor holds at a time.
    """

    warps_k: int = 16
    warps_n: int = 1
    tiles: int = 2
    num_stages: int = 2
    split_k: int = 1
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return self.warps_k * self.warps_n * WARP_SIZE

    @property
    def unit_tiles(self) -> int:
        """Count tiles of 16 features that a block works on at a time."""
        return self.warps_n * self.tiles

    def block_k(self, in_features: int) -> int:
        """Count columns of x that a block holds, filled up so that each warp has as many steps."""
        steps = -(-in_features // STEP_K)
        of_block = -(-steps // self.split_k)
        return -(-of_block // self.warps_k) * self.warps_k * STEP_K

    def shared_bytes(self, in_features: int, rows: int, weight_format: FragmentFormat) -> int:
        """Return shared memory of a block: its columns of x, their sums over groups, and twice the warps' sums."""
        block_k, rows = self.block_k(in_features), row_tiles(rows) * ROW_TILE
        group_sums = block_k // weight_format.step_group * rows * weight_format.sum_bytes
        return rows * (block_k * 2 + 64) + group_sums + 2 * self.warps_k * rows * (self.unit_tiles * TILE_N + 4) * 4

    def fits(self, weight: FragmentWeight, paired: bool, rows: int, shared_memory: int) -> bool:
        """Return True where a device's multiprocessor (bytes of shared memory for its blocks) holds it."""
        loaded = self.tiles * self.num_stages * weight.format.bits * 2  # registers of a lane for codes
        if weight.format.of_gguf:
            loaded += self.tiles * self.num_stages * GGUF_REGISTERS[row_tiles(rows)]
        if (paired and self.unit_tiles % 2) or (self.threads > MAX_LOADING_THREADS and loaded > MAX_LOADED):
            return False
        taken = self.shared_bytes(weight.shape[1], rows, weight.format) + RESERVED_SHARED_MEMORY
        return taken * self.blocks_per_sm <= shared_memory


def candidates(weight: FragmentWeight, paired: bool, rows: int, shared_memory: int) -> list[FragmentGemmConfig]:
    """Return configurations worth measuring where a block has so much shared memory; ``paired``: gate and up."""
    if paired and weight.shape[0] % (2 * TILE_N):
        return []
    steps = weight.steps
    found: dict[FragmentGemmConfig, None] = {}
    for warps, warps_n, tiles, num_stages in PLAIN_LAYOUTS if weight.format == PLAIN else LAYOUTS:
        splits = []
        for split_k in SPLITS[: steps.bit_length()]:
            warps_k = _warps_without_waste(-(-steps // split_k), warps)
            config = FragmentGemmConfig(warps_k, warps_n, tiles, num_stages, split_k)
            if config.fits(weight, paired, rows, shared_memory):
                splits.append(config)
        found |= dict.fromkeys(splits[:2])
    # A K is shared where shared memory is small or the weight has few rows; a head's many rows would take much room.
    fewest = min((config.split_k for config in found), default=1)
    most = max(fewest, MAX_SUMS // (weight.tiles * TILE_N * SLICE_ROWS))
    return [config for config in found if config.split_k <= most]


def _warps_without_waste(steps: int, wanted: int) -> int:
    """Return about so many warps, that the steps divide evenly among."""
    choices = range(max(1, min(steps, wanted * 3 // 4)), max(1, min(steps, wanted * 5 // 4)) + 1)
    return min(choices, key=lambda warps: (-(-steps // warps) * warps, abs(warps - wanted)))


def row_tiles(rows: int) -> int:
    """Count tiles of eight rows that a launch for so many rows multiplies."""
    return min(-(-rows // ROW_TILE), SLICE_ROWS // ROW_TILE)


def linear(
    x: torch.Tensor,
    weight: FragmentWeight,
    out: torch.Tensor,
    config: FragmentGemmConfig | None,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``out = x @ weight.T (+ residual) (+ bias)``, each sum rounded; by PyTorch without a config.

    Args:
        x: [M, K]. out: [M, N], perhaps a part of wider rows; may be ``residual``. bias: [N].
    """
    if config is None or not _runs(x):
        result = linear_reference(x, weight, out, residual)
        return result if bias is None else result.add_(bias)
    _launch(x, weight, out, config, residual, paired=False, bias=bias)
    return out


def swiglu(
    x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, config: FragmentGemmConfig | None
) -> torch.Tensor:
    """Compute ``out`` [M, I] = silu(x @ gate.T) * (x @ up.T), each rounded; ``weight``: [2 I, K], 16 divides I."""
    if config is None or not _runs(x):
        return swiglu_reference(x, weight, out)
    _launch(x, weight, out, config, None, paired=True)
    return out


def linear_reference(
    x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute it in plain PyTorch, for any number of rows, a slice of the weight at a time."""
    product = out if residual is None else torch.empty_like(out)
    for _, rows in weight.slices():
        product[:, rows] = torch.mm(x, weight.dequantized(rows).to(x.dtype).t())
    multiply_tail(x, weight, product)
    return product if residual is None else torch.add(residual, product, out=out)


def multiply_tail(
    x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """Compute the part of ``linear`` that is of a weight's tail, by PyTorch."""
    if weight.tail is None:
        return
    columns = slice(weight.coded_rows, None)
    product = torch.mm(x, weight.tail_rows().to(x.dtype).t())
    out[:, columns] = product if residual is None else residual[:, columns] + product


def swiglu_reference(x: torch.Tensor, weight: FragmentWeight, out: torch.Tensor) -> torch.Tensor:
    return gated(linear_reference(x, weight, x.new_empty(len(x), weight.shape[0])), out)


def source_text(source: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (FRAGMENTS, source))


def compile_options(
    weight_format: FragmentFormat, in_features: int, config: FragmentGemmConfig, rows: int, paired: bool
) -> list[str]:
    return defined(
        **fragment_constants(weight_format, in_features, config.tiles),
        ROW_TILES=row_tiles(rows),
        WARPS_K=config.warps_k,
        WARPS_N=config.warps_n,
        NUM_STAGES=config.num_stages,
        SPLIT_K=config.split_k,
        BLOCKS_PER_SM=config.blocks_per_sm,
        SWIGLU=int(paired),
        HAS_TAIL=int(weight_format.tail > 0),
        SHARED_BYTES=config.shared_bytes(in_features, rows, weight_format),
    )


def fragment_constants(weight_format: FragmentFormat, in_features: int, tiles: int) -> dict[str, int]:
    """Return what ``fragments.cu`` is compiled for. ``tiles``: of 16 features, of a warp."""
    block, plain = weight_format.block, weight_format == PLAIN
    types = NESTED_SCALE_TYPES if weight_format.nested else SCALE_TYPES
    scale_type = NO_SCALE if plain else types[weight_format.scales]
    row_scale_type = SCALE_TYPES[torch.float32] if weight_format.row_scales else NO_SCALE
    return {
        "CODES": CODES[weight_format.codes],
        "BLOCK_ROWS": block[0] if block else 1,
        "GROUP_SIZE": block[1] if block else 0,
        "HAS_ZEROS": int(weight_format.zeros),
        "HAS_MINIMA": int(weight_format.minima),
        "SCALE_TYPE": scale_type if block else NO_SCALE,
        "ROW_SCALE_TYPE": row_scale_type if block else scale_type,
        "IN_FEATURES": in_features,
        "TILES_PER_WARP": tiles,
    }


def defined(**constants: int) -> list[str]:
    return ["--std=c++17", "--fmad=false", *(f"-D{name}={value}" for name, value in constants.items())]


def _runs(x: torch.Tensor) -> bool:
    return len(x) <= MAX_ROWS and x.dtype == torch.bfloat16 and runs_kernels(x)


def _launch(
    x: torch.Tensor,
    weight: FragmentWeight,
    out: torch.Tensor,
    config: FragmentGemmConfig,
    residual: torch.Tensor | None,
    paired: bool,
    bias: torch.Tensor | None = None,
) -> None:
    tiles = weight.tiles
    if paired and weight.shape[0] % (2 * TILE_N):
        raise ValueError(f"a gated pair of {weight.shape[0]} rows does not consist of tiles of {TILE_N}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError("rows of activations must begin at multiples of 16 bytes")
    kernel = _kernel(x.device, weight.format, weight.shape[1], config, row_tiles(len(x)) * ROW_TILE, paired)
    units = -(-tiles // config.unit_tiles)
    tail_tiles = 0 if weight.tail is None else len(weight.tail)
    blocks = max(1, device_properties(x.device).num_sms * config.blocks_per_sm // config.split_k)
    parts = min(units + tail_tiles, blocks, MAX_PARTS)
    sums: torch.Tensor | None = None
    if config.split_k > 1:
        results = (units * config.unit_tiles + tail_tiles) * TILE_N * SLICE_ROWS
        sums = partial_sums(x.device, config.split_k * results)
    counters = zero_counters(x.device)
    stride = row_stride(out, residual)
    row_scales = weight.scales if weight.format.block is None else weight.row_scales
    for at in range(0, len(x), SLICE_ROWS):
        rows = slice(at, at + SLICE_ROWS)
        kernel.launch(
            parts * config.split_k,
            (
                x[rows], weight.codes, weight.scales, weight.zeros, row_scales, weight.tail, out[rows],
                None if residual is None else residual[rows], bias, sums, counters,
                c_int64(x.stride(0)), c_int64(stride), len(x[rows]), out.shape[1], tiles, weight.format.tail,
                tail_share(weight.format, config, units, parts),
            ),
        )  # fmt: skip


def tail_share(kind: FragmentFormat, config: FragmentGemmConfig, units: int, parts: int) -> int:
    """Count the units of a block that has a tile of the tail, too, so that it reads about as much as others."""
    tiles = -(-kind.tail // TILE_N)
    if not tiles:
        return 0
    of_tile = -(-TAIL_BITS // (kind.bits * config.unit_tiles))  # units that a tile weighs
    rounds = -(-(units + of_tile * tiles) // parts)
    return min(max(0, rounds - of_tile), units // tiles)


def compile_ahead(weight: FragmentWeight, paired: bool, rows: int, configs: Sequence[FragmentGemmConfig]) -> None:
    """Compile the kernels of several configurations on all cores, where there is a disk to keep them on."""
    if nvrtc.cubin_folder() is None:
        return
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: compiled(weight.device, weight.format, weight.shape[1], one, rows, paired), configs))


@cache
def _kernel(
    device: torch.device,
    weight_format: FragmentFormat,
    in_features: int,
    config: FragmentGemmConfig,
    rows: int,
    paired: bool,
) -> cuda_driver.LoadedKernel:
    cubin = compiled(device, weight_format, in_features, config, rows, paired)
    shared_bytes = config.shared_bytes(in_features, rows, weight_format)
    return cuda_driver.LoadedKernel(cubin, KERNEL_NAME, config.threads, shared_bytes, device)


def compiled(
    device: torch.device,
    weight_format: FragmentFormat,
    in_features: int,
    config: FragmentGemmConfig,
    rows: int,
    paired: bool,
) -> bytes:
    """Return cubin of a kernel, see ``nvrtc.cubin``. ``rows``: of x that a launch takes at most, a multiple of 8."""
    options = compile_options(weight_format, in_features, config, rows, paired)
    return cuda_driver.cubin(source_text(SOURCE), options, device)


@cache
def zero_counters(device: torch.device) -> torch.Tensor:
    """Return zeros, and every launch leaves them so; the launches that share them follow one another."""
    return torch.zeros(MAX_PARTS, dtype=torch.int32, device=device)


_sums: dict[torch.device, list[torch.Tensor]] = {}  # of each device, the largest last; captured graphs use them all


def partial_sums(device: torch.device, numbers: int) -> torch.Tensor:
    """Return room for the sums of blocks that share a K; the launches that share it follow one another."""
    room = _sums.setdefault(device, [])
    if not room or room[-1].numel() < numbers:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product must run once before it is captured: nothing is allocated during a capture")
        room.append(torch.empty(numbers, dtype=torch.float32, device=device))
    return room[-1]
