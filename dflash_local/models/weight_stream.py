"""Tensors from files to a device through a ring of pinned memory: threads read ahead, it checks and decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_local.checkpoint_files.tensor_info import AGAIN, GGML, TensorInfo
from dflash_local.errors import CheckpointError
from dflash_local.models.gguf_rows import copy_values, floats_of, joined_rows, joined_values, piece_shape, pieces_of
from dflash_local.models.place import Conversion, Place

WIDE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
DTYPES = {**WIDE, **INTEGERS, "F8_E4M3": torch.float8_e4m3fn}
FP8_NAN = 0x7F  # without its sign
WINDOW = 16 * 2**20  # bytes of one read
GAP = 2**16  # bytes of tensors that nobody wants which are read rather than skipped: a read of its own costs more
READERS = 4  # one thread copies 5 to 10 GB/s out of the page cache, a bus takes 25 to 50
ON_HOST_SLICE = 2**26  # bytes of a tensor in host memory that the device checks at a time
RING = 2 * READERS  # windows in memory at once: 128 MiB

Places = Mapping[str, Sequence[Place]]


def takes(info: TensorInfo) -> bool:
    """Return True where a tensor's dtype is read here."""
    return all(each.dtype in DTYPES or each.dtype in GGML for each in pieces_of(info))


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Bytes of a window ``at`` an offset that belong to a tensor, from ``begin`` to ``end``."""

    info: TensorInfo
    at: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ReadWindow:
    file: Path
    offset: int
    size: int
    parts: tuple[WindowPart, ...]


@dataclass(frozen=True, slots=True)
class TensorExtremes:
    """The largest absolute value of a tensor as stored, and where it lies; None when one is NaN or infinite."""

    info: TensorInfo
    stored: float | None
    placed: float | None
    dtype: torch.dtype


def windows(infos: Iterable[TensorInfo], size: int = WINDOW) -> Iterator[ReadWindow]:
    """Return the reads that cover these tensors, file by file and front to back; of others only short runs are read."""
    files: dict[Path, list[TensorInfo]] = {}
    for info in infos:
        files.setdefault(info.file, []).append(info)
    for file, members in files.items():
        parts: list[WindowPart] = []
        first = held = 0
        for info in sorted(members, key=lambda info: info.offset):
            begin = 0
            while begin < info.nbytes:
                at = info.offset + begin
                gap = at - first - held
                if parts and 0 < gap <= GAP and held + gap < size:
                    held += gap
                elif parts and (gap or held == size):
                    yield ReadWindow(file, first, held, tuple(parts))
                    parts = []
                if not parts:
                    first, held = at, 0
                end = min(info.nbytes, begin + size - held)
                parts.append(WindowPart(info, held, begin, end))
                held += end - begin
                begin = end
        if parts:
            yield ReadWindow(file, first, held, tuple(parts))


class _Ring:
    """Buffers that are read into; one is free again when the device has taken what it held."""

    def __init__(self, device: torch.device, count: int, size: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)]
        self._taken: list[torch.cuda.Event | None] = [None] * count

    def free(self, number: int) -> torch.Tensor:
        event = self._taken[number]
        if event is not None:
            event.synchronize()
        return self._buffers[number]

    def taken(self, number: int) -> None:
        if self._on_gpu:
            event = self._taken[number] = torch.cuda.Event()
            event.record()


class _Landing:
    """Puts parts in place; keeps the extremes of each tensor on the device until all are there."""

    def __init__(self, infos: Sequence[TensorInfo], places: Places, device: torch.device) -> None:
        self._wholes = {piece.name: info for info in infos for piece in pieces_of(info)}
        self._places, self._device = places, device
        self._arriving: dict[str, dict[str, torch.Tensor]] = {}  # by tensor and piece
        self._found = torch.zeros(len(infos), 2, 2, dtype=torch.float64, device=device)
        self._seen: list[tuple[TensorInfo, torch.dtype]] = []
        self._left: dict[str, int] = {}  # bytes to come, by tensor

    def land(self, part: WindowPart, data: torch.Tensor) -> None:
        info = self._wholes[part.info.name]
        pieces = self._arriving.setdefault(info.name, {})
        if part.info.name not in pieces:
            pieces[part.info.name] = _destination(info, part.info, self._places[info.name][0], self._device)
        piece = pieces[part.info.name].view(-1).view(torch.uint8)
        piece[part.begin : part.end].copy_(data, non_blocking=True)
        self._left[info.name] = self._left.get(info.name, info.nbytes) - (part.end - part.begin)
        if not self._left[info.name]:
            arrived = self._arriving.pop(info.name)
            self._settle(info, [arrived[each.name] for each in pieces_of(info)])

    def _settle(self, info: TensorInfo, pieces: Sequence[torch.Tensor]) -> None:
        places = self._places[info.name]
        for place in places:
            if isinstance(place, Conversion):
                place.take((joined_rows if place.blocks else joined_values)(info, pieces))
            elif place.data_ptr() != pieces[0].data_ptr():
                copy_values(info, pieces, place)
        if info.dtype in INTEGERS:  # always numbers
            return
        first, row = places[0], self._found[len(self._seen)]
        row[0] = self._extremes(floats_of(info, pieces))
        row[1] = row[0] if isinstance(first, Conversion) or first.dtype == pieces[0].dtype else self._extremes(first)
        self._seen.append((info, first.dtype))

    def _extremes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``extremes``, found on the device also of what lies in host memory, a slice at a time."""
        if tensor.device == self._device:
            return extremes(tensor)
        slices = tensor.view(-1).split(ON_HOST_SLICE // tensor.element_size())
        found = torch.stack([extremes(part.to(self._device, non_blocking=True)) for part in slices])
        return extremes(found)

    def extremes(self) -> list[TensorExtremes]:
        rows = self._found.tolist()
        return [
            TensorExtremes(info, peak(stored), peak(placed), dtype)
            for (info, dtype), (stored, placed) in zip(self._seen, rows, strict=False)
        ]


def extremes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the smallest and the largest value [2], NaN for a tensor with NaN in it; of float8 those of its codes."""
    if tensor.dtype == torch.float8_e4m3fn:  # which torch cannot compare
        largest = (tensor.view(torch.uint8) & FP8_NAN).amax().double()
        return torch.where(largest == FP8_NAN, torch.nan, largest).expand(2)
    return torch.stack(torch.aminmax(tensor))


def _destination(info: TensorInfo, piece: TensorInfo, place: Place, device: torch.device) -> torch.Tensor:
    """Return where a piece is read to: the place itself, or memory beside it, which is copied, repeated, decoded or
    put in order afterwards.
    """
    dtype = DTYPES.get(piece.dtype, torch.uint8)
    same = isinstance(place, torch.Tensor) and place.is_contiguous() and tuple(place.shape) == tuple(piece.shape)
    if isinstance(place, torch.Tensor) and same and place.dtype == dtype and piece is info and not info.undo:
        return place
    if isinstance(place, torch.Tensor) and piece.dtype not in GGML:
        device = place.device
    elif isinstance(place, Conversion) and place.on_host:
        device = torch.device("cpu")
    return torch.empty(piece_shape(piece), dtype=dtype, device=device)


def peak(pair: Sequence[float]) -> float | None:
    low, high = abs(pair[0]), abs(pair[1])
    return max(low, high) if low < float("inf") and high < float("inf") else None


def fill(
    infos: Sequence[TensorInfo],
    places: Places,
    device: torch.device,
    on_fraction: Callable[[float], None] = lambda _: None,
    size: int = WINDOW,
) -> list[TensorExtremes]:
    """Read tensors that it ``takes`` into all their places, cast where a place has another dtype.

    Beside the places there are the ring and, of a tensor that is cast, one more copy at a time.

    Returns:
        what to judge each tensor by, in the order of the files; empty tensors are left out.

    Raises:
        OSError: a file cannot be read. CheckpointError: a file has become shorter.
    """
    total, done = sum(info.nbytes for info in infos) or 1, 0
    wanted = list(windows((piece for info in infos for piece in pieces_of(info)), size))
    ring = _Ring(device, RING, max((window.size for window in wanted), default=0))
    landing = _Landing(infos, places, device)
    reads: deque[tuple[int, ReadWindow, Future[None]]] = deque()

    def take() -> int:
        number, window, read = reads.popleft()
        read.result()
        for part in window.parts:
            landing.land(part, ring.free(number)[part.at : part.at + part.end - part.begin])
        ring.taken(number)
        return sum(part.end - part.begin for part in window.parts)

    with ThreadPoolExecutor(READERS, "read-weights") as pool:
        for count, window in enumerate(wanted):
            if len(reads) == RING:
                done += take()
                on_fraction(done / total)
            number = count % RING
            reads.append((number, window, pool.submit(_read, window, ring.free(number))))
        while reads:
            done += take()
            on_fraction(done / total)
    return landing.extremes()


def _read(window: ReadWindow, buffer: torch.Tensor) -> None:
    """Fill the buffer's beginning; outside of Python's lock, so that threads do this at the same time."""
    rest = buffer.numpy().data[: window.size]
    with window.file.open("rb", buffering=0) as stream:
        stream.seek(window.offset)
        while len(rest):
            count = stream.readinto(rest)
            if not count:
                raise CheckpointError(f"{window.file} changed while it was read", AGAIN)
            rest = rest[count:]
