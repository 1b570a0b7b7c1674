"""A table of the cases of other projects' suites: passed, failed, or not applicable and why.

    python -m tests.api.conformance.table [--all]

Runs the tests that stand for them. Exits with 1 where one failed, or where a case is in two of these.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.api.conformance import test_messages, test_responses

ROOM = Path(__file__).parents[1]
LEFT_OUT = (test_messages.NOT_APPLICABLE, test_responses.NOT_APPLICABLE)


class Outcomes:
    """A plugin of pytest's that keeps how the tests of each case ended."""

    def __init__(self) -> None:
        self.cases: dict[str, list[tuple[str, str]]] = {}  # of a test
        self.found: dict[tuple[str, str], str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            marks = item.iter_markers("conformance")
            self.cases[item.nodeid] = [(mark.args[0], case) for mark in marks for case in mark.args[1:]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for case in self.cases[report.nodeid]:
            if report.failed or (report.when == "call" and self.found.get(case) != "failed"):
                self.found[case] = "failed" if report.failed else "passed"


def main() -> int:
    outcomes = Outcomes()
    pytest.main(["-q", "-n", "0", "-m", "conformance and not slow", str(ROOM)], plugins=[outcomes])
    rows = [(suite, case, outcome, "") for (suite, case), outcome in outcomes.found.items()]
    for table in LEFT_OUT:
        for suite, reasons in table.items():
            rows += [(suite, case, "not applicable", why) for why, cases in reasons.items() for case in cases.split()]
    twice = [case for case, count in Counter(row[:2] for row in rows).items() if count > 1]
    for suite, case, outcome, why in sorted(rows):
        if outcome != "passed" or "--all" in sys.argv:
            print(f"{suite:15} {outcome:15} {case}{why and ': '}{why}")
    for (suite, outcome), count in sorted(Counter((row[0], row[2]) for row in rows).items()):
        print(f"{suite:15} {outcome:15} {count}")
    print(*(f"in two rows: {case}" for case in twice), sep="\n")
    return int(bool(twice) or any(row[2] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
