"""The report as a zip file of JSON files, written from memory."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
EPOCH = (1980, 1, 1, 0, 0, 0)  # the time of every member: ``created`` tells it once


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
