"""Small files in the true formats of the six data sets, on a fake hub."""

from __future__ import annotations

import json
from typing import Any

from dflash_local.bench.tasks.table import TASKS
from tests.fake_hub import FakeHub

RECORDS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": f"Tom has {n} apples and buys 3. How many?", "answer": f"<<{n}+3={n + 3}>>\n#### {n + 3}"}
        for n in (1, 1000, 7)
    ],
    "math500": [
        {
            "problem": "Compute $\\frac{1}{2}+\\frac{1}{4}$.",
            "solution": "It is $\\boxed{\\frac{3}{4}}$.",
            "answer": "\\frac{3}{4}",
            "subject": "Algebra",
            "level": 1,
            "unique_id": f"test/algebra/{n}.json",
        }
        for n in (1, 2)
    ],
    "humaneval": [
        {
            "task_id": f"Python/{n}",
            "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs."""\n',
            "entry_point": "total",
            "canonical_solution": "    return sum(xs)\n",
            "test": "\n\ndef check(total):\n    assert total([1, 2]) == 3\n    assert total([]) == 0\n\ncheck(total)",
        }
        for n in (0, 1)
    ],
    "mbpp": [
        {
            "source_file": "Benchmark Questions Verification V2.ipynb",
            "task_id": n,
            "prompt": "Write a function to double a number.",
            "code": "def double(n):\n    return 2 * n",
            "test_imports": ["import math"],
            "test_list": ["assert double(2) == 4", "assert double(math.floor(3.5)) == 6"],
        }
        for n in (2, 11, 12, 600)
    ],
    "mt-bench": [
        {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Now shorter."]},
        {"question_id": 82, "category": "writing", "turns": ["Draft a mail.", "Be stern."], "reference": ["a"]},
    ],
    "alpaca": [
        {"instruction": "Name three colours.", "input": "", "output": "Red."},
        {"instruction": "Add them.", "input": "1 and 2", "output": "3"},
    ],
}


def file_of(name: str, records: list[dict[str, Any]] | None = None) -> bytes:
    """The bytes of a task's file."""
    content = RECORDS[name] if records is None else records
    if TASKS[name].form == "json":
        return json.dumps(content, indent=1).encode()
    return "".join(json.dumps(record) + "\n" for record in content).encode()


def add_task(hub: FakeHub, name: str, raw: bytes | None = None, **more: bytes) -> str:
    """A task's repository, with a script that nobody may fetch; returns the commit."""
    task = TASKS[name]
    files = {task.file: file_of(name) if raw is None else raw, "loader.py": b"raise SystemExit('run!')", **more}
    return hub.add_repo(task.repo, files)
