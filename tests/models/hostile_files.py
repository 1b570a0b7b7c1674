"""Files of a checkpoint that are damaged, no files at all, or lead elsewhere."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.models.hostile_fields import HUGE, Case, Change, short


def raw_config(part: str, raw: bytes) -> Change:
    def change(pair: Path) -> None:
        (pair / part / "config.json").write_bytes(raw)

    return change


def file_cases() -> Iterator[Case]:
    """A config.json that is none, and files that are no files."""
    raws = {
        "empty": b"",
        "a list": b"[1]",
        "null": b"null",
        "deep": b"[" * 100_000,
        "bytes": b"\xff\xfe{}",
        "nul": b"\0",
        "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
        "digits": b'{"a": ' + b"1" * 5000 + b"}",
        "20 MB": b'{"a": "' + b"x" * 20_000_000 + b'"}',
    }
    for part, (name, raw) in product(("target", "drafter"), raws.items()):
        yield Case("config file", f"{part} {name}", raw_config(part, raw))
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    places = [("target", name) for name in (*files, "model.safetensors", "special_tokens_map.json")]
    places += [("drafter", "config.json"), ("drafter", "model.safetensors")]
    for (part, name), (kind, make) in product(places, ODD_FILES.items()):
        yield Case("odd files", f"{part}/{name} is {kind}", placed(part, name, make))
    for name in ("adapter_config.json", "shard-00001-model-00001-of-00002.safetensors", "modeling_evil.py"):
        yield Case(
            "odd files", f"target/{name} stands beside", placed("target", name, lambda path: path.write_text("{"))
        )
    index = "model.safetensors.index.json"
    for value in (5, [], {}, {"weight_map": 5}, {"weight_map": {}}, *INDICES):
        text = json.dumps(value)
        yield Case("index", short(value), indexed(text))
    for kind, make in ODD_FILES.items():
        yield Case("index", f"{index} is {kind}", indexed("", make))


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to /dev/stdin": lambda path: path.symlink_to("/dev/stdin"),
    "a dangling link": lambda path: path.symlink_to("nothing-here"),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "empty": Path.touch,
    "gone": lambda path: None,
}
INDICES: tuple[Any, ...] = (
    {"weight_map": {"model.embed_tokens.weight": "../../etc/passwd.safetensors"}},
    {"weight_map": {"model.embed_tokens.weight": 5}},
    {"weight_map": {"model.embed_tokens.weight": "a.safetensors"}, "metadata": "x"},
    {"weight_map": {"x": "weights.safetensors"}, "metadata": {}},
)


def placed(part: str, name: str, make: Callable[[Path], object]) -> Change:
    def apply(pair: Path) -> None:
        (pair / part / name).unlink(missing_ok=True)
        make(pair / part / name)

    return apply


def indexed(text: str, make: Callable[[Path], object] | None = None) -> Change:
    """The target's weights under another name, found by an index."""

    def apply(pair: Path) -> None:
        (pair / "target" / "model.safetensors").rename(pair / "target" / "weights.safetensors")
        path = pair / "target" / "model.safetensors.index.json"
        (make or (lambda path: path.write_text(text)))(path)

    return apply


def headers(part: str, change: Callable[[bytes, bytes], bytes]) -> Change:
    """Rewrite a weight file from the JSON of its header and its data."""

    def apply(pair: Path) -> None:
        path = pair / part / "model.safetensors"
        whole = path.read_bytes()
        path.unlink()
        length = struct.unpack("<Q", whole[:8])[0]
        path.write_bytes(change(whole[8 : 8 + length], whole[8 + length :]))

    return apply


def packed(header: bytes, data: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def entry(**changes: Any) -> Callable[[bytes, bytes], bytes]:
    """Change the first entry of a header."""

    def change(raw: bytes, data: bytes) -> bytes:
        header = json.loads(raw)
        first = next(name for name in header if name != "__metadata__")
        header[first] = {**header[first], **changes}
        return packed(json.dumps(header).encode(), data)

    return change


def added(name: str, value: Any) -> Callable[[bytes, bytes], bytes]:
    return lambda raw, data: packed(json.dumps({**json.loads(raw), name: value}).encode(), data)


DTYPES: tuple[Any, ...] = ("F4", "F64", "F8_E4M3", "C64", "BOOL", "EVIL", 5, None, [])
SHAPES: tuple[Any, ...] = ([], [0], [-1], [2**62], [2**61] * 3, [HUGE], ["1"], "x", [1] * 9, None)
OFFSETS = ([0], [0, HUGE], [5, 1], [-2, 0], "x", None, [0, True])
HEADERS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "no bytes": lambda raw, data: b"",
    "seven bytes": lambda raw, data: b"1234567",
    "length 0": lambda raw, data: packed(b"", data),
    "length 2**63": lambda raw, data: struct.pack("<Q", 2**63) + raw + data,
    "length 90 MB": lambda raw, data: struct.pack("<Q", 90_000_000) + raw + data,
    "not json": lambda raw, data: packed(b"{" + b"x" * 100, data),
    "deep": lambda raw, data: packed(b"[" * 100_000, data),
    "a list": lambda raw, data: packed(b"[1,2]", data),
    "a list of bytes": lambda raw, data: packed(b"\xff" * 64, data),
    "blank before": lambda raw, data: packed(b" " + raw, data),
    "blank after": lambda raw, data: packed(raw + b" " * 13, data),
    "twice": lambda raw, data: packed(raw[:-1] + b"," + raw.lstrip()[1:], data),
    "cut": lambda raw, data: packed(raw, data[:-5]),
    "long": lambda raw, data: packed(raw, data + b"12345"),
    "pickle": lambda raw, data: b"\x80\x04" + raw + data,
    "web page": lambda raw, data: b"<!doctype html><html>" + raw,
    "metadata 5": added("__metadata__", 5),
    "metadata of numbers": added("__metadata__", {"format": 5}),
    "metadata of objects": added("__metadata__", {"format": {"a": 1}}),
    "metadata null": added("__metadata__", None),
    "a tensor of nothing": added("model.layers.0.nothing", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "an empty name": added("", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a name with a line end": added("a\nb\x1b[31m", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "half a character": added("\ud800", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a name of 1 MB": added("x" * 2**20, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "an entry that is none": added("x", 5),
    "an extra key": entry(evil=True),
    **{f"dtype {short(kind)}": entry(dtype=kind) for kind in DTYPES},
    **{f"shape {short(kind)}": entry(shape=kind) for kind in SHAPES},
    **{f"offsets {short(kind)}": entry(data_offsets=kind) for kind in OFFSETS},
}


def header_cases() -> Iterator[Case]:
    for part, (name, change) in product(("target", "drafter"), HEADERS.items()):
        yield Case("headers", f"{part} {name}", headers(part, change))
