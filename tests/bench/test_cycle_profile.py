"""A profile of overlapping kernels: nothing is counted twice, nothing left out."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the profile is torch's")

from benchmarks import cycle_profile


def test_exposed_time_and_gaps_fill_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel of a replay counts, too: it was left out."""
    monkeypatch.setattr(cycle_profile, "REPLAYS", 2)
    replay = (("first", 0.0, 10.0), ("second", 8.0, 14.0), ("inside", 9.0, 12.0), ("second", 17.0, 20.0))
    kernels = [(name, begin + at, end + at) for at in (0.0, 1000.0) for name, begin, end in replay]
    found = cycle_profile.table(kernels)
    assert list(found) == ["first", "second", "inside"]
    assert found["first"] == {"launches": 1, "us": 10, "gap": 0, "exposed": 10}
    assert found["second"] == {"launches": 2, "us": 9, "gap": 3, "exposed": 7}
    assert found["inside"] == {"launches": 1, "us": 3, "gap": 0, "exposed": 0}
