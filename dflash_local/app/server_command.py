"""The command that serves a pair with a server program on this machine, or on several.

Of vLLM and SGLang it is the registry row's, or, for a pair without one, that of its drafter's block size.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_local.app.llama_cpp_command import llama_cpp_words
from dflash_local.app.models import ModelStore, model_store
from dflash_local.app.resolve import Choice, with_local_mirror
from dflash_local.catalog.row import REMOTE_CODE, Launch, Repo, Row, fingerprint_of
from dflash_local.catalog.shapes import shape
from dflash_local.checkpoint_files.source import open_source
from dflash_local.drafters.kinds import config_of, known_kind
from dflash_local.errors import DownloadError, SettingsError, UsageError
from dflash_local.remote.programs import PROGRAMS
from dflash_local.remote.programs.server_program import Program
from dflash_local.settings import Settings

BEGINS: Mapping[Program, tuple[str, ...]] = {"vllm": ("vllm",), "sglang": ("python", "python3")}
DRAFTING = ("--speculative-", "--spec-")  # how all options of drafting begin; the latter are llama.cpp's
HEAD = "HEAD_ADDRESS"  # stands for the address of the first of several machines
HEAD_PORT: Mapping[Program, str] = {"vllm": "8000", "sglang": "30000"}  # where they listen unless told otherwise
MEET_PORT = 20000  # where SGLang's machines meet


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How a server is started.

    Attributes:
        words: the program, as the registry calls it, and its arguments. environment: variables besides the user's own.
        fetched: repositories that are not on this machine, which the server downloads itself.
        remark: what the user should know of it.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    fetched: tuple[str, ...] = ()
    remark: str = ""


def server_command(
    program: Program,
    choice: Choice,
    user: Settings,
    drafts: bool = True,
    trusts: bool = False,
    gpus: int | None = None,
) -> ServerCommand:
    """The command that serves a choice; files that are on this machine are named by their folders.

    Args:
        gpus: to split every layer over; None leaves that to the registry's row.
        drafts: False leaves the drafter out, and nothing else.
        trusts: the user lets the server run code of the target's repository, where it needs that.

    Raises:
        UsageError: no drafter, or none of known block size, or the user does not trust code that is needed.
        DownloadError: the drafter is announced only, or the files are not here and this is offline.
        SettingsError: the row's command starts another program.
    """
    store = model_store(user)
    if program == "llama.cpp":
        argv, remark = llama_cpp_words(choice, store, drafts)
        return ServerCommand(argv, remark=remark)
    choice = choice if store is None else with_local_mirror(choice, store)
    row = choice.drafter_row if drafts or choice.row is None else choice.row
    if drafts and choice.drafter is None:
        if row is not None and not row.has_drafter:
            raise DownloadError(f"{row.name} is announced: no drafter is published yet", "dflash models lists others")
        raise UsageError(f"no drafter is known for {choice.name}", "name one with --drafter")
    if choice.target is None:
        raise UsageError(f"nothing is known of where the files of {choice.name} are")
    launch = _launch_of(program, row)
    if launch is None:
        launch = _generic(program, choice, store, drafts)
    if launch.wants_remote_code and not trusts:
        raise UsageError(
            f"{PROGRAMS[program].title} needs Python code of the repository of {choice.name}, "
            "and runs it with your rights",
            f"read it first; {REMOTE_CODE} agrees",
        )
    part = choice.target if choice.package is None or row is None else row.target  # servers read no such file
    target = _place(part or choice.target, store)
    drafter = _place(choice.drafter, store) if drafts and choice.drafter is not None else target
    fetched = tuple(dict.fromkeys(place.id for place in (target, drafter) if not Path(place.id).is_absolute()))
    if fetched and user.hub.offline:
        raise DownloadError(
            f"{' and '.join(fetched)} is not on this machine, and this is offline",
            f"without HF_HUB_OFFLINE: dflash pull {choice.name}",
        )
    words = launch.words(target, drafter, gpus)
    if words[0] not in BEGINS[program]:
        raise SettingsError(f"the {program} command of {choice.name} starts {words[0]!r}", "see registry.yaml")
    return ServerCommand(tuple(words if drafts else undrafted(words)), launch.environment, fetched)


def wants_remote_code(program: Program, choice: Choice, drafts: bool = True) -> bool:
    """Whether ``server_command`` needs ``trusts``."""
    launch = _launch_of(program, choice.drafter_row if drafts or choice.row is None else choice.row)
    return launch is not None and launch.wants_remote_code


def undrafted(words: Sequence[str]) -> list[str]:
    """A command without its options of drafting, each with its value."""
    left: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.startswith(DRAFTING)
        elif dropping:
            dropping = False
            continue
        if not dropping:
            left.append(word)
    return left


def node_commands(row: Row, nodes: int) -> dict[str, tuple[str, ...]]:
    """Server program -> a line for each of several alike machines, the first of them at ``HEAD``.

    Tensor parallelism over all GPUs: neither program drafts across stages of a pipeline (vllm-project/vllm 57755).
    """
    if row.server is None or row.target is None or row.drafter is None:
        return {}
    launches: dict[str, tuple[Program, Launch | None]] = {
        "vLLM": ("vllm", row.server.vllm),
        "SGLang": ("sglang", row.server.sglang),
    }
    target, drafter = row.target, row.drafter
    found = {}
    for title, (program, launch) in launches.items():
        if launch is not None:
            gpus = nodes * (launch.gpus or row.server.tensor_parallel or 1)
            more = [_of_node(program, nodes, rank) for rank in range(nodes)]
            found[title] = tuple(launch.line(target, drafter, gpus, options) for options in more)
    return found


def _of_node(program: Program, nodes: int, rank: int) -> list[str]:
    """The options of one of several machines; only the first takes requests."""
    several = ["--nnodes", str(nodes), "--node-rank", str(rank)]
    if program == "vllm":
        several += ["--master-addr", HEAD]
        return [*several, "--headless"] if rank else [*several, "--host", HEAD]
    several += ["--dist-init-addr", f"{HEAD}:{MEET_PORT}"]
    return several if rank else [*several, "--host", HEAD]


def _launch_of(program: Program, row: Row | None) -> Launch | None:
    if row is None or row.server is None:
        return None
    launches: Mapping[Program, Launch | None] = {"vllm": row.server.vllm, "sglang": row.server.sglang}
    return launches.get(program)


def _generic(program: Program, choice: Choice, store: ModelStore | None, drafts: bool) -> Launch:
    """Return the command for a pair without a row. UsageError: no server has drafters of this kind."""
    kind = _kind(choice, store)
    drafter = config_of(kind)
    servers = drafter.servers
    if servers is None:
        raise UsageError(
            f"{PROGRAMS[program].title} runs no drafter of the kind {kind}", "dflash runs it without a server"
        )
    block = _block_of(choice, store) if drafts else 1  # left out again by the caller
    if program == "vllm":
        drafted = block - drafter.first_draft
        config = {"method": servers.method, "model": "DRAFTER", "num_speculative_tokens": drafted}
        words = ["vllm", "serve", "TARGET", "--speculative-config", json.dumps(config)]
    else:
        words = ["python", "-m", "sglang.launch_server", "--model-path", "TARGET"]
        drafting = ["--speculative-algorithm", servers.algorithm, "--speculative-draft-model-path", "DRAFTER"]
        words += [*drafting, servers.block_option, str(block)]
    return Launch(shlex.join(words))


def _kind(choice: Choice, store: ModelStore | None) -> str:
    """By the drafter's own configuration, or by the registry."""
    listed = None
    if choice.row is not None and choice.drafter is not None and not isinstance(choice.drafter, Path):
        listed = choice.row.other_drafter(choice.drafter.id)
    own = known_kind(_drafter_config(choice, store))
    return own or ("dflash" if listed is None else listed.kind)


def _drafter_config(choice: Choice, store: ModelStore | None) -> Mapping[str, Any]:
    """Of the files where they are here, else what the registry keeps of it; empty where neither is."""
    if choice.drafter is None:
        return {}
    here = open_source(Path(_place(choice.drafter, store).id)).config()
    return here or (None if isinstance(choice.drafter, Path) else shape(choice.drafter.id)) or {}


def _block_of(choice: Choice, store: ModelStore | None) -> int:
    """The trained block size of a choice's drafter, as its own configuration counts it."""
    row = choice.drafter_row
    known = row.fingerprints[0].block_size if row is not None and row.fingerprints else None
    if known is None:
        found = fingerprint_of(_drafter_config(choice, store))["block"]
        known = found if isinstance(found, int) else None
    if known is None:
        raise UsageError(
            f"the block size of the drafter of {choice.name} is not known before it is here",
            "download it first: dflash pull",
        )
    return known


def _place(part: Repo | Path, store: ModelStore | None) -> Repo:
    """The folder of a part that is whole on this machine, else its repository at the revision that is known."""
    if isinstance(part, Path):
        return Repo(str(part.resolve()))
    found = None if store is None else store.find(part)
    return part if found is None or found.missing else Repo(str(found.folder.resolve()))
