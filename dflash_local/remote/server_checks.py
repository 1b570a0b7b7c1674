"""What listens at an address, asked before the first request: program, version, model, drafts.

Which paths tell that is in ``programs``, one file each; ``/v1/models`` is asked of all, and ``/metrics``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflash_local.drafters.kinds import KINDS, config_of
from dflash_local.errors import ServerError, UnknownModelError, UsageError
from dflash_local.load_config import LoadConfig
from dflash_local.loaded import SessionFacts
from dflash_local.remote import server_metrics
from dflash_local.remote.endpoint import ServerEndpoint, Wait, within
from dflash_local.remote.programs import PROGRAMS
from dflash_local.remote.programs.server_program import Program, SelfReport, ServerProgram, text_of, whole_of

PROBE_S = 20.0  # for all that is asked of a server before the first request
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
        program: a name of ``programs``. served: what its requests call the model. url: without a token.
        drafts: whether it drafts; None where it does not report that. method: its name for how it drafts.
        switches: a request may switch its drafting off, which was tried.
    """

    program: Program = "vllm"
    version: str = ""
    served: str = ""
    url: str = ""
    drafts: bool | None = None
    method: str = ""
    switches: bool = False

    @property
    def server(self) -> ServerProgram:
        """How requests are put to it."""
        return PROGRAMS[self.program]

    @property
    def title(self) -> str:
        """``vLLM 0.32.0``."""
        return f"{self.server.title} {self.version}".rstrip()

    @property
    def drafting(self) -> bool:
        return self.drafts is not False  # vLLM does not report its drafter

    @property
    def in_server(self) -> bool:
        return True

    @property
    def names_tokens(self) -> bool:
        return self.server.token_ids

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
        elif self.switches:
            parts.append("drafts switched off by request")
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
    found, told = _program(endpoint, wait)
    if program not in (None, found.name):
        raise ServerError(
            f"{found.title} answers at {endpoint.url}, not {PROGRAMS[program].title}",
            f"--engine {found.name}, or correct --url",
        )
    model = _chosen(models, wanted, endpoint.url)
    counters = server_metrics.read(endpoint, wait)
    drafts, block = told.drafts, told.block_size
    if drafts is None and counters is not None:
        drafts = counters.speculation
        block = len(counters.per_position) + 1 if counters.per_position else None
    context = model.context or told.context
    facts = ServerFacts(
        target=wanted.name or model.id,
        drafter=told.drafter or None,
        block_size=block or 0,
        has_tokenizer=True,
        load=LoadConfig(context=context, draft=drafts is not False),
        program=found.name,
        version=told.version,
        served=model.id,
        url=endpoint.url,
        drafts=drafts,
        method=told.method,
    )
    return _with_notices(facts, told.drafter, wanted, counters is not None, endpoint)


def switches_off(endpoint: ServerEndpoint, facts: ServerFacts) -> bool:
    """Whether a request may switch the server's drafting off, tried with a request of one token.

    Raises:
        ServerError: nobody answers.
    """
    wait = within(PROBE_S)
    return bool(facts.server.off) and facts.server.proves_off(lambda path, body: endpoint.post(path, body, wait))


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
        raise unknown_server(endpoint.url)
    found = []
    for entry in entries[:MAX_MODELS]:
        if isinstance(entry, dict) and text_of(entry.get("id")) and not entry.get("parent"):
            context = whole_of(entry.get("max_model_len"), 2**31 - 1)
            found.append(ServedModel(text_of(entry["id"]), text_of(entry.get("root")), context))
    return tuple(found)


def _program(endpoint: ServerEndpoint, wait: Wait) -> tuple[ServerProgram, SelfReport]:
    """The program, and what it says of itself.

    Raises:
        ServerError: it is none that is known here.
    """
    for program in PROGRAMS.values():
        told = program.report(lambda path: endpoint.get_object(path, wait))
        if told is not None:
            return program, told
    raise unknown_server(endpoint.url)


def unknown_server(url: str) -> ServerError:
    """Return the error for an address where no server of a known program listens."""
    known = ", ".join(program.title for program in PROGRAMS.values())
    return ServerError(f"what answers at {url} is no server that is known here", f"correct --url; known are {known}")


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
    if facts.drafts and facts.method and facts.method.upper().removeprefix("DRAFT-") not in methods:
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
