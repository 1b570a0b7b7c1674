"""Where figures of a loaded pair come from, for files that are saved and handed on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dflash_local.app import fitting
from dflash_local.app.examples import TOY
from dflash_local.bench import provenance
from dflash_local.bench.certify_servers import identity
from dflash_local.catalog.bundled import Pair
from dflash_local.planner import hardware
from dflash_local.remote.server_checks import ServerFacts
from dflash_local.service.service import Service
from dflash_local.settings import Settings

FACTS = ("engine", "dtype", "device", "block_size", "context", "notices")


def figures_origin(service: Service, pair: Pair, user: Settings, in_server: bool) -> Mapping[str, Any]:
    """Versions, machine and pair, or the server in place of a machine; no names of hosts or users."""
    facts = service.facts
    own = {"pair": service.model.name, "note": TOY if pair.toy else None, "versions": provenance.versions()}
    if in_server:
        return {**own, "server": identity(facts) if isinstance(facts, ServerFacts) else None}
    return {
        **own,
        "machine": {
            "system": platform.platform(),
            "processor": hardware.processor(),
            "cores": os.cpu_count(),
            "device": fitting.machine(user).as_dict(),
        },
        **{name: getattr(facts, name) if facts is not None else None for name in FACTS},
        "load": asdict(facts.load) if facts is not None else None,
    }
