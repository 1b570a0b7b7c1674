"""An option with which the tests here rehearse another card: ``pytest -m gpu tests/gpu --card "RTX 4090"``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.rehearsal import CARDS, Rehearsal, rehearse

REHEARSAL = pytest.StashKey[Rehearsal]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--card", choices=tuple(CARDS), help="a card whose code the GPU at hand is to run")


def pytest_configure(config: pytest.Config) -> None:
    card = config.getoption("--card", None)
    if card:
        of_parent = getattr(config, "workerinput", {})  # of pytest-xdist, in a process that it started
        config.stash[REHEARSAL] = rehearse(card, of_parent.get("ledger"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have a process of pytest-xdist count with this one."""
    rehearsal = node.config.stash.get(REHEARSAL, None)
    if rehearsal is not None:
        node.workerinput["ledger"] = rehearsal.ledger


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a kernel of another card was wanted, even if the engine went on without it."""
    rehearsal = session.config.stash.get(REHEARSAL, None)
    if rehearsal is not None and rehearsal.counts()["refused"]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rehearsal = config.stash.get(REHEARSAL, None)
    if rehearsal is not None:
        terminalreporter.write_line(rehearsal.summary())
