"""The report as a zip file of JSON files: written from memory, read with limits, never unpacked onto a disk."""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_local.errors import ReportError, UsageError
from dflash_local.json_text import parse_json

SCHEMA = 1
MAIN = "report"
MAX_ARCHIVE = 8 * 2**20  # bytes
MAX_PART = 8 * 2**20
MAX_PARTS = 32
EPOCH = (1980, 1, 1, 0, 0, 0)  # the time of every member: ``created`` tells it once
_MEMBER = re.compile(r"([a-z][a-z_]{0,31})\.json")
FOREIGN = "give an archive that dflash report wrote"


def encoded(part: Any) -> bytes:
    return json.dumps(part, indent=1).encode() + b"\n"


def pack(parts: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, part in parts.items():
            info = zipfile.ZipInfo(f"{name}.json", EPOCH)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o600 << 16
            file.writestr(info, encoded(part))
    return buffer.getvalue()


def unpack(path: Path) -> dict[str, Any]:
    """The parts of an archive by name, ``report`` among them. UsageError: no such file. ReportError: no report."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_ARCHIVE + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "give a file that dflash report wrote") from error
    if len(raw) > MAX_ARCHIVE:
        raise ReportError(f"{path} is larger than {MAX_ARCHIVE // 2**20} MiB: no report", FOREIGN)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            parts = _parts(archive, path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ReportError(f"{path} is damaged or no report: {type(error).__name__}", FOREIGN) from error
    main = parts.get(MAIN)
    schema = main.get("schema") if isinstance(main, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool):
        raise ReportError(f"{path} holds no report: {MAIN}.json tells no schema", FOREIGN)
    if schema != SCHEMA:
        raise ReportError(f"{path} has schema {schema}; this version reads {SCHEMA}", "use a newer dflash-local")
    return parts


def _parts(archive: zipfile.ZipFile, path: Path) -> dict[str, Any]:
    members = archive.infolist()
    if len(members) > MAX_PARTS:
        raise ReportError(f"{path} holds {len(members)} files: no report", FOREIGN)
    parts: dict[str, Any] = {}
    left = MAX_PART
    for member in members:
        found = _MEMBER.fullmatch(member.filename)
        if found is None or found[1] in parts:
            raise ReportError(f"{path} holds {member.filename[:60]!r}, which no report does", FOREIGN)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ReportError(f"{path} is compressed in another way than a report", FOREIGN)
        with archive.open(member) as file:
            content = file.read(left + 1)  # what the header says of its size may be wrong
        left -= len(content)
        if left < 0:
            raise ReportError(f"{path} unpacks to more than {MAX_PART // 2**20} MiB: no report", FOREIGN)
        try:
            parts[found[1]] = parse_json(content)
        except ValueError as error:
            raise ReportError(f"{path}: {member.filename} is not JSON", FOREIGN) from error
    return parts
