"""The rules of the tree, read off the source with ``ast``: floors, torch-free rooms, habits."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dflash_local"

FLOORS = {
    **dict.fromkeys(("__init__", "checkpoint_files", "child_process", "errors", "events", "import_path"), 0),
    **dict.fromkeys(("json_text", "load_config", "loaded", "request", "schema", "settings"), 0),
    **dict.fromkeys(("shared_prefix", "tables", "terminal", "text_index"), 0),
    **dict.fromkeys(("catalog", "config", "drafters.layout", "layout", "transcripts", "worker"), 1),
    **dict.fromkeys(("store", "planner"), 2),
    **dict.fromkeys(("chat", "kernels"), 3),
    **dict.fromkeys(("drafters", "models"), 4),
    "engine": 5,
    **dict.fromkeys(("adapt", "app", "service", "remote", "bench", "check", "report"), 6),
    **dict.fromkeys(("api", "ui"), 7),
    **dict.fromkeys(("cli", "__main__"), 8),
}
TORCH_FREE = {room for room, floor in FLOORS.items() if floor == 0} | {
    *("catalog", "config", "drafters.layout", "layout", "store", "planner", "worker", "chat", "app", "service"),
    "transcripts",
    *("remote", "report", "api", "ui", "cli", "__main__"),
}
HEAVY = {"torch", "transformers", "triton", "accelerate", "bitsandbytes", "fla", "textual", "gradio"}
# Where a torch-free room may import it after all, inside that function alone.
HEAVY_ALLOWED = {"planner/hardware.py": "probe_torch"}

# What Python programs are given stands on the lowest floor and reaches up when it is called.
PUBLIC = ("__init__.py", "load")

# Whatever starts a process, by its full name.
STARTERS = re.compile(
    r"subprocess\.(run|call|check_call|check_output|getoutput|getstatusoutput|Popen)"
    r"|os\.(system|popen|startfile|fork\w*|posix_spawn\w*|spawn\w+|exec[lv]\w*)"
    r"|asyncio\.(subprocess\.)?create_subprocess_\w+|pty\.(spawn|fork)"
    r"|multiprocessing\b(?!\.(connection\.(Client|Connection|Listener)|AuthenticationError)$).*"
    r"|concurrent\.futures\.(process\.)?ProcessPoolExecutor|webbrowser\.\w+|torch\.multiprocessing\b.*"
)
# Loaded by ``python -m dflash_local`` before the current folder is off the path: even __future__ would come from there.
LOADED_EARLY = ("__init__.py", "__main__.py", "import_path.py")
BROAD_EXCEPTS = {
    **dict.fromkeys(("check/run.py", "cli/main.py", "service/answering.py", "api/answer.py", "ui/job.py"), 1),
    "app/engine_process.py": 2,
}
# Modules that parse JSON without the bounds of ``json_text``: files of the package, pipes between our own processes,
# and requests, which have bounds of their own.
PLAIN_JSON = {
    *("json_text.py", "catalog/shapes.py", "app/examples.py", "bench/baselines.py"),
    *("bench/tasks/sandbox_child.py", "kernels/kernel_trial.py", "chat/tokenizer.py", "chat/tokenizer_worker.py"),
    *("chat/template.py", "chat/template_worker.py", "request.py", "api/request_body.py", "ui/web/streams.py"),
}
NEW_IN_311 = {"tomllib", "StrEnum", "Self", "assert_never", "LiteralString", "ExceptionGroup", "BaseExceptionGroup"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
# path or path::function -> why it is longer; an entry no longer needed fails.
LONGER: dict[str, str] = {}


class Import(NamedTuple):
    """One imported module or name: ``dflash_local.errors``, ``torch.nn``, ``typing.Self``."""

    name: str
    line: int
    function: str  # outermost enclosing function, "" at module level
    typing_only: bool


def sources() -> list[Path]:
    """Every module of the package; rglob does not follow the link to the screens, so they are named."""
    return sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "ui").rglob("*.py")})


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    return room_within(path.relative_to(PACKAGE).with_suffix("").parts)


def room_within(parts: Sequence[str]) -> str:
    """The room of a module or of a name in it. Of drafters, what both engines compute with lies high; the rest, which
    the plan reads, lies low.
    """
    high = {"engines", "fused", "reference", "training"} & set(parts[1:3])
    return "drafters.layout" if parts[0] == "drafters" and not high else parts[0]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    """Of a module, which must be one of Python 3.10."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a module."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    found = tuple(_imports(tree_of(path), "", False))
    return (
        tuple(item for item in found if (relative(path), item.function) != PUBLIC) if PACKAGE in path.parents else found
    )


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """Those directly inside, and what holds some; no expression has any."""
    inside = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, inside))


def _imports(node: ast.AST, function: str, typing_only: bool) -> Iterator[Import]:
    for child in statements_in(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, function, typing_only) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            yield from (Import(f"{module}.{alias.name}", child.lineno, function, typing_only) for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(body=child.body, type_ignores=[]), function, True)
            yield from _imports(ast.Module(body=child.orelse, type_ignores=[]), function, typing_only)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _imports(child, function or child.name, typing_only)
        else:
            yield from _imports(child, function, typing_only)


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in statements_in(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        yield from functions_of(node)


def imported_room(name: str) -> str | None:
    """The room an import of ours leads to; None for other packages."""
    parts = name.split(".")
    if parts[0] != "dflash_local":
        return None
    inside = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
    return room_within(parts[1:]) if inside else "__init__"


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in sources()} <= set(FLOORS)


def test_imports_are_absolute_and_go_down() -> None:
    wrong = []
    for path in sources():
        room = room_of(path)
        for item in imports_of(path):
            other = imported_room(item.name)
            if item.name.startswith("."):
                wrong.append(f"{relative(path)}:{item.line} imports {item.name}, which is relative")
            elif other and not item.typing_only and FLOORS.get(other, 99) > FLOORS[room]:
                wrong.append(f"{relative(path)}:{item.line} ({room}) imports {item.name}, a higher floor")
    assert not wrong, "\n".join(wrong)


def test_rooms_of_one_floor_form_no_circle() -> None:
    below: dict[str, set[str]] = {room: set() for room in FLOORS}
    for path in sources():
        for item in imports_of(path):
            other, room = imported_room(item.name), room_of(path)
            if other and other != room and not item.typing_only and FLOORS.get(other) == FLOORS[room]:
                below[room].add(other)
    while below:  # take away the rooms that import no remaining room; a circle leaves some
        free = [room for room, others in below.items() if not others & set(below)]
        assert free, f"a circle among {sorted(below)}: {below}"
        for room in free:
            del below[room]


def test_modules_form_no_circle() -> None:
    """Inside rooms, too, and counting imports inside functions: one hides a circle, it does not break it."""
    modules = {module_of(path): path for path in sources()}
    below = {
        module: {name for item in imports_of(path) if not item.typing_only if (name := module_behind(item, modules))}
        - {module}
        for module, path in modules.items()
    }
    left = set(below)
    while free := {module for module in left if not below[module] & left}:
        left -= free
    while idle := left - {name for module in left for name in below[module]}:  # what only leads to a circle
        left -= idle
    assert not left, f"a circle among {sorted(left)}"


def module_behind(item: Import, modules: Collection[str]) -> str | None:
    """The module of ours that an import leads to: of ``from a import b`` that is ``a.b`` or, where there is none, a."""
    return next((name for name in (item.name, item.name.rpartition(".")[0]) if name in modules), None)


def test_torch_free_rooms_import_no_heavy_library() -> None:
    wrong = []
    for path in sources():
        if room_of(path) not in TORCH_FREE:
            continue
        for item in imports_of(path):
            heavy = item.name.split(".")[0] in HEAVY or item.name.startswith("safetensors.torch")
            heavy = heavy and not _is_screens_own(path, item.name)
            allowed = item.typing_only or (item.function and HEAVY_ALLOWED.get(relative(path)) == item.function)
            if heavy and not allowed:
                wrong.append(f"{relative(path)}:{item.line} imports {item.name}")
    assert not wrong, "\n".join(wrong)


def _is_screens_own(path: Path, name: str) -> bool:
    """The screens' libraries, in the screens' room."""
    return room_of(path) == "ui" and name.split(".")[0] in ("textual", "gradio")


def test_torch_free_rooms_reach_no_heavy_library_when_imported() -> None:
    modules = {module_of(path): path for path in sources()}

    def at_import(path: Path) -> Iterator[str]:
        return (item.name for item in imports_of(path) if not item.function and not item.typing_only)

    def chain(module: str, seen: set[str]) -> list[str]:
        for name in at_import(modules[module]):
            own = _is_screens_own(modules[module], name)
            if not own and (name.split(".")[0] in HEAVY or name.startswith("safetensors.torch")):
                return [module, name]
            parts = name.split(".")
            for ours in (".".join(parts[:end]) for end in range(2, len(parts) + 1)):
                if ours in modules and ours not in seen:
                    seen.add(ours)
                    found = chain(ours, seen)
                    if found:
                        return [module, *found]
        return []

    starts = [module_of(path) for path in sources() if room_of(path) in TORCH_FREE]
    wrong = [" -> ".join(found) for module in starts if (found := chain(module, {module}))]
    assert not wrong, "\n".join(wrong)


def test_torch_free_rooms_run_on_python_310() -> None:
    wrong = []
    for path in sources():
        if room_of(path) in TORCH_FREE:
            newer = [item for item in imports_of(path) if item.name.split(".")[-1] in NEW_IN_311]
            wrong += [f"{relative(path)}:{item.line} imports {item.name}" for item in newer]
    assert not wrong, "\n".join(wrong)


def test_only_settings_reads_the_environment() -> None:
    wrong = []
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                if isinstance(node.value, ast.Name) and node.value.id == "os" and relative(path) != "settings.py":
                    wrong.append(f"{relative(path)}:{node.lineno}")
        if relative(path) != "settings.py":
            direct = [item for item in imports_of(path) if item.name in ("os.environ", "os.getenv")]
            wrong += [f"{relative(path)}:{item.line}" for item in direct]
    assert not wrong, "\n".join(wrong)


def starts_in(path: Path) -> Iterator[tuple[str, int]]:
    """What starts a process, annotations left out: the full name and the line."""
    full: dict[str, str] = {}
    typing_only: set[ast.AST] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            full |= {item.asname: item.name for item in node.names if item.asname}
            full |= {item.name.split(".")[0]: item.name.split(".")[0] for item in node.names if not item.asname}
        elif isinstance(node, ast.ImportFrom):
            full |= {item.asname or item.name: f"{node.module}.{item.name}" for item in node.names}
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            typing_only |= set(ast.walk(annotation)) if annotation is not None else set()
    for node in nodes_of(path):
        if isinstance(node, (ast.Name, ast.Attribute)) and node not in typing_only:
            head, dot, rest = dotted(node).partition(".")
            name = full.get(head, "") + dot + rest
            if STARTERS.fullmatch(name):
                yield name, node.lineno


def dotted(node: ast.AST) -> str:
    """``a.b.c`` as it is written; of other expressions "", as no module is one."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_only_child_process_starts_processes() -> None:
    """The rules on what children may import and know are kept in that one file."""
    found = [
        f"{relative(path)}:{line} {name}"
        for path in sources()
        if relative(path) != "child_process.py"
        for name, line in starts_in(path)
    ]
    assert not found, "\n".join(found)
    assert {name for name, _ in starts_in(PACKAGE / "child_process.py")} == {"subprocess.Popen", "subprocess.run"}


def test_only_the_console_prints() -> None:
    wrong = [
        f"{relative(path)}:{node.lineno}"
        for path in sources()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if relative(path) != "cli/console.py"
    ]
    assert not wrong, "\n".join(wrong)


def test_broad_excepts_are_the_known_ones() -> None:
    found: dict[str, int] = {}
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
                if node.type is None or names & {"Exception", "BaseException"}:
                    found[relative(path)] = found.get(relative(path), 0) + 1
    assert found == BROAD_EXCEPTS


def test_json_is_parsed_with_bounds() -> None:
    found = {
        relative(path) for path in sources() for node in nodes_of(path) if dotted(node) in ("json.load", "json.loads")
    }
    assert {path for path in found if not path.startswith("remote/")} <= PLAIN_JSON


def _too_long(paths: Iterable[Path], root: Path) -> Iterator[str]:
    for path in paths:
        name = path.relative_to(root).as_posix()
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES:
            yield name
        for node in functions_of(tree_of(path)):
            if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES:
                yield f"{name}::{node.name}"


def test_files_and_functions_are_short() -> None:
    everything = [*sources(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "tools").rglob("*.py"))]
    assert set(_too_long(everything, ROOT)) == set(LONGER)


def test_every_module_says_what_it_owns() -> None:
    silent, plain = [], []
    for path in sources():
        body = tree_of(path).body
        if ast.get_docstring(tree_of(path)) is None:
            silent.append(relative(path))
        imported = {item.name for item in imports_of(path)}
        if any(not isinstance(node, (ast.Expr, ast.Assign)) for node in body):
            plain += [relative(path)] if "__future__.annotations" not in imported else []
    plain = [name for name in plain if name not in LOADED_EARLY]
    assert not silent, f"no module docstring: {silent}"
    assert not plain, f"no 'from __future__ import annotations': {plain}"


def test_names_say_something() -> None:
    everything = [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    vague = [path for path in everything if set(path.stem.lower().split("_")) & VAGUE_NAMES and path.suffix != ".pyc"]
    assert not vague


def test_every_test_can_fail() -> None:
    """A test asserts, expects an error, or calls a function of its file or a check_ function that does."""
    hollow = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = {node: list(ast.walk(node)) for node in functions_of(tree_of(path))}
        asserting = {node.name for node, all_ in inside.items() if any(isinstance(each, ast.Assert) for each in all_)}
        for node, all_ in inside.items():
            called = {dotted(each.func) for each in all_ if isinstance(each, ast.Call)}
            expects = any(re.search(r"(^|\.)(raises|fail|(assert|check|expect)\w*)$", name) for name in called)
            if node.name.startswith("test_") and not (node.name in asserting or called & asserting or expects):
                hollow.append(f"{path.name}::{node.name}")
    assert not hollow, f"no assertion in {hollow}"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import json, sys\n"
        "from dflash_local.cli.main import main\n"
        "code = main(['--help'])\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code, modules = json.loads(done.stderr.strip().splitlines()[-1])
    assert code == 0 and "doctor" in done.stdout
    assert not (HEAVY | {"tokenizers", "huggingface_hub", "numpy"}) & {name.split(".")[0] for name in modules}
