"""A checkpoint: its configuration and its tensors, opened header first, read tensor by tensor.

Never opens a pickle, never imports code that came with a checkpoint (``auto_map`` is not looked at).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_local.checkpoint_files.config_values import shown
from dflash_local.checkpoint_files.safetensors_folder import name_list
from dflash_local.checkpoint_files.source import Source, needed_config, open_source
from dflash_local.checkpoint_files.tensor_info import AGAIN, TensorInfo
from dflash_local.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from dflash_local.models.place import Place

HUGE = 1e6  # weights of trained models stay under a few hundred


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A source whose configuration and headers have been read and found consistent; no tensor read yet.

    Attributes:
        added: pairs of a low rank, down [r, columns] and up [rows, r], whose product ``fill`` adds to a matrix.
    """

    source: Source
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    added: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the configuration and every header of a folder or GGUF file. CheckpointError: names what is damaged."""
        if not path.exists():
            raise CheckpointError(f"{path} does not exist", "give a folder that holds config.json, or a GGUF file")
        source = open_source(path)
        return cls(source, needed_config(source), source.tensors())

    @property
    def path(self) -> Path:
        """Return the folder or file."""
        return self.source.path

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def read(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        names: Iterable[str] | None = None,
        on_notice: Callable[[str], None] | None = None,
        undecoded: Collection[str] = (),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream tensors file by file, each checked for NaN and infinity before it is yielded.

        Args:
            dtype: what floating tensors become (float8 and integers stay as stored); None keeps all, and blocks of a
                GGUF file become float32.
            names: only these; all when None.
            on_notice: called with one line for a tensor that is suspicious but usable.
            undecoded: of which rows of blocks are yielded, uint8 [rows, bytes].

        Raises:
            CheckpointError: naming the tensor that is not finite or not there, or the damaged file.
        """
        from dflash_local.models.gguf_rows import floats_of
        from dflash_local.models.stored_tensor import StoredTensors

        files: dict[Path, list[TensorInfo]] = {}
        for info in self._infos(self.tensors if names is None else names):
            files.setdefault(info.file, []).append(info)
        for file, in_file in files.items():
            stored = StoredTensors.open(file)
            for info in in_file:
                if info.name in undecoded:
                    rows = stored.read_rows(info).to(device)
                    _judge(info, _peak(floats_of(replace(info, parts=()), [rows])), on_notice)
                    yield info.name, rows
                else:
                    yield info.name, _checked(info, stored.read(info), device, dtype, on_notice)

    def fill(
        self,
        places: Mapping[str, Sequence[Place]],
        on_notice: Callable[[str], None] | None = None,
        on_fraction: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Stream tensors to their places: cast to each place's dtype, and checked like ``read``.

        The places lie on one device, or pinned on the host beside it.

        On CUDA the bytes go through a ring of pinned memory (128 MiB) straight to their place and are checked there,
        in the end: after an error the places hold what was read.

        Raises:
            CheckpointError: as ``read`` does.
        """
        from dflash_local.models import weight_stream

        infos = self._infos(places)
        device = _device(places)
        if device is None or device.type != "cuda" or not all(map(weight_stream.takes, infos)):
            self._fill_one_by_one(places, on_notice, on_fraction)
        else:
            try:
                found = weight_stream.fill(infos, places, device, on_fraction)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {shown(str(error))}", AGAIN) from error
            for each in found:
                _judge(each.info, each.stored, on_notice)
                _judge_cast(each.info, each.stored, each.placed, each.dtype)
        for name, pair in self.added.items():
            down, up = (part.to(device).float() for part in pair)
            for place in places.get(name, ()):
                place.copy_(place.float() + up @ down)  # type: ignore[union-attr]  # a matrix in codes has no pair

    def _fill_one_by_one(
        self,
        places: Mapping[str, Sequence[Place]],
        on_notice: Callable[[str], None] | None,
        on_fraction: Callable[[float], None],
    ) -> None:
        from dflash_local.models.place import Conversion

        ordered = [name for name in self.tensors if name in places]
        coded = {name for name in ordered if isinstance(place := places[name][0], Conversion) and place.blocks}
        for count, (name, tensor) in enumerate(self.read(names=ordered, on_notice=on_notice, undecoded=coded), 1):
            for place in places[name]:
                if isinstance(place, Conversion):
                    place.take(tensor)
                else:
                    place.copy_(tensor)
            first = places[name][0]
            if not isinstance(first, Conversion) and first.dtype != tensor.dtype and _is_checked(tensor):
                _judge_cast(self.tensors[name], _peak(tensor), _peak(first), first.dtype)
            on_fraction(count / len(places))

    def _infos(self, names: Iterable[str]) -> list[TensorInfo]:
        wanted = list(names)
        absent = [name for name in wanted if name not in self.tensors]
        if absent:
            raise CheckpointError(f"{self.path} has no tensor {name_list(absent)}", AGAIN)
        return [self.tensors[name] for name in wanted]


def _device(places: Mapping[str, Sequence[Place]]) -> torch.device | None:
    from dflash_local.models.place import Conversion

    found = [place.device for each in places.values() for place in each if not isinstance(place, Conversion)]
    return next((device for device in found if device.type != "cpu"), next(iter(found), None))


def _checked(
    info: TensorInfo,
    tensor: torch.Tensor,
    device: torch.device | str,
    dtype: torch.dtype | None,
    on_notice: Callable[[str], None] | None,
) -> torch.Tensor:
    """Return the tensor on its device, known to be finite before and after the cast."""
    tensor = tensor.to(device)
    if not _is_checked(tensor):
        return tensor
    peak = _peak(tensor)
    _judge(info, peak, on_notice)
    if dtype is not None and tensor.dtype != dtype and tensor.element_size() > 1:
        tensor = tensor.to(dtype)
        _judge_cast(info, peak, _peak(tensor), dtype)
    return tensor


def _is_checked(tensor: torch.Tensor) -> bool:
    """Return True for floats that have something in them; of float8 only the kind without infinities."""
    import torch

    wide = tensor.element_size() > 1 or tensor.dtype == torch.float8_e4m3fn
    return tensor.is_floating_point() and tensor.numel() > 0 and wide


def _judge(info: TensorInfo, peak: float | None, on_notice: Callable[[str], None] | None) -> None:
    """Refuse a tensor that is not finite; tell of one that is suspicious. ``peak``: its largest absolute value."""
    if peak is None:
        raise CheckpointError(f"tensor {info.name} in {info.file} holds NaN or infinity", AGAIN)
    if on_notice is not None and peak > HUGE:
        on_notice(f"tensor {info.name} has values up to {peak:g}: the weights look damaged")
    if on_notice is not None and peak == 0 and info.name.endswith("weight"):
        on_notice(f"tensor {info.name} is all zeros: the weights look damaged")


def _judge_cast(info: TensorInfo, stored: float | None, placed: float | None, dtype: torch.dtype) -> None:
    if placed is None:
        raise CheckpointError(f"tensor {info.name} in {info.file} does not fit {dtype} (largest value {stored:g})")


def _peak(tensor: torch.Tensor) -> float | None:
    """Return the largest absolute value, None when any value is NaN or infinite. One pass, no copy."""
    from dflash_local.models.weight_stream import extremes, peak

    return peak(extremes(tensor).tolist())
