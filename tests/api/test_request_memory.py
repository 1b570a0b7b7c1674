"""A request leaves nothing behind: what it held goes when it ends, and not when the garbage collector comes by."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dflash_local.errors import ContextError, DFlashError
from dflash_local.request import Request
from dflash_local.service.ticket import Ticket
from tests.api.conftest import Serve, wait_until
from tests.service.scripted import ScriptedSession

REQUESTS = 4


@pytest.fixture
def collected() -> Iterator[list[object]]:
    """What only the collector can free; filled by ``gc.collect()`` while the test runs."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize("fault", [None, ContextError("too long")], ids=["answered", "refused"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_is_in_no_circle_of_references(
    fault: DFlashError | None, stream: bool, serve: Serve, collected: list[object]
) -> None:
    server = serve(ScriptedSession(faults=[fault and ContextError(fault.message) for _ in range(REQUESTS)]))
    for _ in range(REQUESTS):
        assert (b"too long" in server.chat("x" * 1000, stream=stream).body) == bool(fault)
    wait_until(lambda: not server.endpoint.live and not server.service.status.running)
    gc.collect()
    assert [type(one).__name__ for one in collected if isinstance(one, (Request, Ticket))] == []
