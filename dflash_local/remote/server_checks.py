"""What listens at an address, asked before the first request: program, version, model, drafts.

vLLM: ``/version`` and ``/metrics``; it reports its speculative config nowhere. SGLang: ``/server_info``, which was
``/get_server_info`` (sgl-project/sglang PR 21463), with the start options of the server; they may hold its keys, so
that only named ones are read. Both: ``/v1/models``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_local import terminal
from dflash_local.drafters.kinds import KINDS, config_of
from dflash_local.errors import ServerError, UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.remote import server_metrics
from dflash_local.remote.endpoint import ServerEndpoint, Wait, within

Program = Literal["vllm", "sglang"]
PROGRAMS: Mapping[Program, str] = {"vllm": "vLLM", "sglang": "SGLang"}
PROBE_S = 20.0  # for all that is asked of a server before the first request
MAX_NAME = 200  # characters
MAX_MODELS = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """A version that is known to be wrong.

    Attributes:
        below: the first minor version that is not known to have it. source: where it is described.
    """

    program: Program
    below: tuple[int, int]
    text: str
    source: str


FAULTS = (
    Fault(
        "vllm",
        (0, 29),
        'with "draft_sample_method": "probabilistic" its replies do not follow the target\'s distribution '
        "(greedy drafts, the default, do)",
        "vllm-project/vllm PR 54282, merged after 0.28.0",
    ),
    Fault(
        "vllm",
        (0, 29),
        "no draft of a sliding-window drafter is accepted where the target has no FlashAttention (MLA, FlashInfer)",
        "vllm-project/vllm PR 54374, merged after 0.28.0",
    ),
)


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What a server is to serve.

    Attributes:
        name: as the user gave it. names: everything the target is known by; none takes the only model there is.
        drafters: ids of the drafter and its mirrors; none where none is known. block: its trained block size.
    """

    name: str = ""
    names: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    block: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An entry of ``/v1/models``.

    Attributes:
        id: what requests call it. root: the repository or folder behind it. context: in tokens.
    """

    id: str
    root: str = ""
    context: int | None = None

    def is_one_of(self, names: tuple[str, ...]) -> bool:
        """True where it goes by one of the names, or its weights lie in a folder called as a repository is."""
        known = {name.casefold() for name in names}
        tails = {name.partition("/")[2] for name in known if name.count("/") == 1}  # of repositories: owner/name
        mine, root = self.id.casefold(), self.root.replace("\\", "/").rstrip("/").casefold()
        return not known.isdisjoint({mine, root} - {""}) or not tails.isdisjoint({mine, root.rpartition("/")[2]} - {""})


@dataclass(frozen=True, slots=True)
class ServerFacts(SessionFacts):
    """A pair in a server of another program. What the server does not report is empty, and 0 for a block size.

    Attributes:
        program: ``vllm`` or ``sglang``. served: what its requests call the model. url: without a token.
        drafts: whether it drafts; None where it does not report that. method: its name for how it drafts.
    """

    program: Program = "vllm"
    version: str = ""
    served: str = ""
    url: str = ""
    drafts: bool | None = None
    method: str = ""

    @property
    def title(self) -> str:
        """``vLLM 0.32.0``."""
        return f"{PROGRAMS[self.program]} {self.version}".rstrip()

    @property
    def drafting(self) -> bool:
        return self.drafts is not False  # vLLM does not report its drafter

    @property
    def in_server(self) -> bool:
        return True

    @property
    def engine(self) -> str:
        return self.program

    @property
    def dtype(self) -> str:
        return ""

    @property
    def device(self) -> str:
        return "server"

    @property
    def promise(self) -> str:
        return "exactness is the server's own"

    @property
    def loaded_as(self) -> str:
        """``vLLM 0.32.0 at http://127.0.0.1:8000, 7 drafts a cycle``."""
        parts = [f"{self.title} at {self.url}"]
        if self.drafts is False:
            parts.append("without drafts")
        parts += [self.method] if self.method else []
        parts += [f"{self.block_size - 1} drafts a cycle"] if self.block_size else []
        return ", ".join(parts)


def probe(
    endpoint: ServerEndpoint,
    wanted: WantedModel,
    program: Program | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ServerFacts:
    """What serves the wanted model at an address; its notices say what is not as it might be.

    Args:
        program: that it must be; None takes either.

    Raises:
        ServerError: nobody answers, another program does, or the token is refused. UnknownModelError: it serves
            another model. Interrupted: cancelled.
    """
    wait = within(PROBE_S, cancelled)
    models = served_models(endpoint, wait)
    found, version, options = _program(endpoint, wait)
    if program not in (None, found):
        raise ServerError(
            f"{PROGRAMS[found]} answers at {endpoint.url}, not {PROGRAMS[program]}",
            f"--engine {found}, or correct --url",
        )
    model = _chosen(models, wanted, endpoint.url)
    counters = server_metrics.read(endpoint, wait)
    block, drafter = None, ""
    drafts = counters.speculation if counters is not None and found == "vllm" else None
    if found == "vllm":
        positions = len(counters.per_position) if counters is not None else 0
        block = positions + 1 if positions else None
    elif options:
        method = _text(options.get("speculative_algorithm"))
        drafts, drafter = bool(method), _text(options.get("speculative_draft_model_path"))
        size = options.get("speculative_num_draft_tokens")
        block = size if drafts and type(size) is int and 0 < size <= server_metrics.MAX_POSITIONS else None
    facts = ServerFacts(
        target=wanted.name or model.id,
        drafter=drafter or None,
        block_size=block or 0,
        has_tokenizer=True,
        load=LoadConfig(context=model.context, draft=drafts is not False),
        program=found,
        version=version,
        served=model.id,
        url=endpoint.url,
        drafts=drafts,
        method=_text(options.get("speculative_algorithm")),
    )
    return _with_notices(facts, drafter, wanted, counters is not None, endpoint)


def passed_on(status: Mapping[str, Any]) -> ServerFacts | None:
    """The server of another program whose replies a dflash process passes on, by that process's status; or None."""
    facts = status.get("facts")
    try:
        return ServerFacts.from_dict(facts) if isinstance(facts, dict) and "program" in facts else None
    except (ValueError, UsageError):
        return None


def served_models(endpoint: ServerEndpoint, wait: Wait) -> tuple[ServedModel, ...]:
    """The models of a server, adapters left out.

    Raises:
        ServerError: nobody answers, the token is refused, or it is no server of this kind. Interrupted: cancelled.
    """
    content = endpoint.get_object("/v1/models", wait)
    entries = content.get("data") if content is not None else None
    if not isinstance(entries, list):
        raise ServerError(f"what answers at {endpoint.url} is neither vLLM nor SGLang", "correct --url")
    found = []
    for entry in entries[:MAX_MODELS]:
        if isinstance(entry, dict) and _text(entry.get("id")) and not entry.get("parent"):
            context = entry.get("max_model_len")
            whole = isinstance(context, int) and not isinstance(context, bool) and 0 < context < 2**31
            found.append(ServedModel(_text(entry["id"]), _text(entry.get("root")), context if whole else None))
    return tuple(found)


def _program(endpoint: ServerEndpoint, wait: Wait) -> tuple[Program, str, Mapping[str, Any]]:
    """Program, version and, of SGLang, its start options.

    Raises:
        ServerError: it is neither.
    """
    for path in ("/server_info", "/get_server_info"):
        info = endpoint.get_object(path, wait)
        if info is not None and ("model_path" in info or "internal_states" in info):
            return "sglang", _text(info.get("version")), info
    version = endpoint.get_object("/version", wait)
    if version is not None and _text(version.get("version")):
        return "vllm", _text(version["version"]), {}
    raise ServerError(f"what answers at {endpoint.url} is neither vLLM nor SGLang", "correct --url")


def _chosen(models: tuple[ServedModel, ...], wanted: WantedModel, url: str) -> ServedModel:
    listed = ", ".join(model.id for model in models[:5]) or "no model"
    if not wanted.names:
        if len(models) == 1:
            return models[0]
        raise UnknownModelError(f"the server at {url} serves {listed}", "name the MODEL before --url")
    for model in models:
        if model.is_one_of(wanted.names):
            return model
    raise UnknownModelError(
        f"the server at {url} serves {listed}, not {wanted.name}", "name that MODEL, or start the server with this one"
    )


def _with_notices(
    facts: ServerFacts, drafter: str, wanted: WantedModel, readable: bool, endpoint: ServerEndpoint
) -> ServerFacts:
    return replace(facts, notices=tuple(_notices(facts, drafter, wanted, readable, endpoint)))


def _notices(
    facts: ServerFacts, drafter: str, wanted: WantedModel, readable: bool, endpoint: ServerEndpoint
) -> Iterator[str]:
    """Lines on what is not as it might be."""
    name = facts.title
    if facts.drafts is False:
        yield f"{name} at {facts.url} was started without speculative decoding: replies come one token at a time"
    elif facts.drafts is None:
        reason = "" if readable else ": no counters on its /metrics"
        yield f"{name} at {facts.url} does not report whether it drafts{reason}"
    methods = {servers.algorithm for kind in KINDS if (servers := config_of(kind).servers) is not None}
    if facts.drafts and facts.method and facts.method.upper() not in methods:
        yield f"{name} drafts with {facts.method}, not with a DFlash drafter"
    elif drafter and wanted.drafters and not ServedModel("", drafter).is_one_of(wanted.drafters):
        yield f"{name} drafts with {drafter}, not with {wanted.drafters[0]}"
    if facts.block_size and wanted.block and facts.block_size != wanted.block:
        yield f"{name} drafts {facts.block_size - 1} tokens a cycle; the drafter was trained for {wanted.block - 1}"
    for fault in FAULTS:
        release = re.match(r"(\d{1,4})\.(\d{1,4})", facts.version)
        if fault.program == facts.program and release and (int(release[1]), int(release[2])) < fault.below:
            yield f"{name} is known to be wrong: {fault.text}: {fault.source}"
    if endpoint.in_the_clear:
        yield f"the token goes unencrypted to {facts.url}: use https, or ssh -L"


def _text(value: Any) -> str:
    """A short text of a server, safe to show; empty for anything else."""
    return terminal.safe_line(value)[:MAX_NAME] if isinstance(value, str) else ""
