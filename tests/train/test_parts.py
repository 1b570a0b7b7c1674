"""A file cut into parts and joined elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.train.parts import cut, join


def test_parts_join_to_the_file_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(range(256)) * 10_000)
    made = cut(file, tmp_path / "parts", 1)
    assert [each.name for each in made] == ["model.gguf.0", "model.gguf.1", "model.gguf.2", "model.gguf.sha256"]
    stem, joined = tmp_path / "parts" / "model.gguf", tmp_path / "there" / "model.gguf"
    join(stem, joined)
    assert joined.read_bytes() == file.read_bytes()
    made[1].write_bytes(made[1].read_bytes()[:-1] + b"\0")
    with pytest.raises(SystemExit, match="SHA-256"):
        join(stem, joined)
    assert not joined.exists()
    made[2].unlink()
    with pytest.raises(SystemExit, match=r"model\.gguf\.2"):
        join(stem, joined)
