"""The kernels of the slots under Triton's interpreter, in a child: it is looked at when a kernel is defined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, math, torch
from tools.train import slot_kernels as kernels

torch.manual_seed(0)
found = {}
for kv, group, dim, room in ((3, 3, 64, 150), (2, 4, 48, 70)):
    q, k, v = torch.randn(3, kv * group, dim), torch.randn(3, kv, dim), torch.randn(3, kv, dim)
    keys, values = torch.randn(3, kv, room, dim), torch.randn(3, kv, room, dim)
    at, twins, out = torch.tensor([0, room - 1, 64]), (keys.clone(), values.clone()), torch.empty_like(q)
    wanted = kernels.attend_slots_reference(q, k, v, *twins, at)
    kernels._attend[(3, kv)](q, k, v, keys, values, at, out, room, kv, group, dim, 16, 64, kernels.TILE)
    found[f"attention {dim}"] = float((out - wanted).abs().max())
    found[f"stored {dim}"] = float(not (torch.equal(keys, twins[0]) and torch.equal(values, twins[1])))
logits = 0.1 * torch.randn(3, 9000)
logits[:, 7000], logits[:, 100] = 3.0, 2.5
ids = []
for step in range(120):
    chosen, best = torch.empty(3, dtype=torch.long), torch.empty(3, dtype=torch.long)
    greedy, heat = torch.tensor([False, False, True]), torch.tensor([1.0, 0.4, 1.0])
    seed = torch.tensor([(1 << 32) + step])
    kernels._choose[(3,)](logits, heat, greedy, seed, chosen, best, 9000, math.log(0.2), kernels.CHUNK)
    ids.append(chosen.tolist() + best.tolist())
print(json.dumps({"errors": found, "ids": ids}))
"""


@pytest.mark.slow
def test_kernels_compute_what_their_references_do() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert max(found["errors"].values()) < 1e-5, found["errors"]
    rows = list(zip(*found["ids"], strict=True))
    assert all(set(row) == {7000} for row in rows[2:])  # greedy, and the likeliest of all three
    shares = [sum(each == 7000 for each in row) / len(row) for row in rows[:2]]
    assert set(rows[0]) == {7000, 100}  # min-p leaves these two
    assert abs(shares[0] - 0.622) < 0.13 and abs(shares[1] - 0.777) < 0.13  # 1 / (1 + exp(-0.5 / temperature))
