"""What proofs cost a download: ``dflash pull`` beside ``hf download`` of the same repository, over loopback.

``PYTHONPATH=. python benchmarks/pull_speed.py --out FILE.json``: the fake hub of the tests, in a process of its own,
serves one large file and forty small ones; both programs run as processes, in turn, each into an empty cache. Xet is
off for both. The wall time counts from the start of the process to its end, proofs included. ``dflash pull`` also
fetches a drafter of 1 kB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
REPO, DRAFTER = "owner/large", "owner/small"
SMALL, SMALL_BYTES = 40, 200_000

HUB = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.fake_hub import FakeHub
from tests.hub_files import safetensors
with FakeHub() as hub:
    hub.add_folder(sys.argv[3], Path(sys.argv[2]))
    hub.add_repo(sys.argv[4], {"config.json": b"{}", "model.safetensors": safetensors(1000)})
    print(hub.url, flush=True)
    sys.stdin.read()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the large file in GB")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--work", type=Path, help="folder for source and caches; by default where there is room")
    parser.add_argument("--out", type=Path, help="write the record here")
    args = parser.parse_args()
    size = int(args.gb * 1e9)
    with tempfile.TemporaryDirectory(prefix="pull-speed-", dir=args.work or _roomy(size)) as name:
        work = Path(name)
        _fill(work / "source", size)
        with _hub(work / "source") as url:
            times = _rounds(work, url, args.rounds)
        where = str(work.parent)
    record = _record(times, size, where)
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _roomy(size: int) -> Path:
    """Memory where it holds source and cache twice over, else the folder for temporary files."""
    memory = Path("/dev/shm")
    free = shutil.disk_usage(memory).free if memory.exists() else 0
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory if min(free, pages) > 3 * size else Path(tempfile.gettempdir())


def _fill(folder: Path, size: int) -> None:
    """One safetensors file of zeros, sparse where the file system can, and the small ones."""
    folder.mkdir()
    header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    for number in range(SMALL - 1):
        text = json.dumps({"number": number, "text": "x" * SMALL_BYTES})
        (folder / f"tokenizer_{number:02}.json").write_text(text, encoding="utf-8")


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-c", HUB, str(ROOT), str(folder), REPO, DRAFTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise SystemExit("no pipes to the hub")
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def _rounds(work: Path, url: str, rounds: int) -> list[dict[str, float]]:
    """Wall seconds of both by round; which comes first alternates."""
    commands = {
        "dflash": [sys.executable, "-m", "dflash_local", "pull", REPO, "--drafter", DRAFTER, "--yes", "--force"],
        "hf": [sys.executable, "-c", "from huggingface_hub.cli.hf import main; main()", "download", REPO],
    }
    found = []
    print("round  dflash pull  hf download  ratio", flush=True)
    for number in range(rounds):
        names = list(commands) if number % 2 else list(reversed(commands))
        times = {name: _timed(commands[name], work / "home", url) for name in names}
        found.append({"dflash_s": times["dflash"], "hf_s": times["hf"], "ratio": times["dflash"] / times["hf"]})
        print(
            f"{number + 1:>5}  {times['dflash']:>9.2f} s  {times['hf']:>9.2f} s  {found[-1]['ratio']:.3f}", flush=True
        )
    return found


def _timed(command: Sequence[str], home: Path, url: str) -> float:
    """Seconds of one download into an empty home."""
    home.mkdir()
    own = {"HOME": str(home), "HF_HOME": str(home / "hf"), "DFLASH_HOME": str(home / "dflash"), "HF_ENDPOINT": url}
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environ = {**kept, **own, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    try:
        begin = time.perf_counter()
        done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
        took = time.perf_counter() - begin
        found = [path for path in home.rglob("model.safetensors") if "snapshots" in path.parts]
        if done.returncode or not found:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    finally:
        shutil.rmtree(home)
    return took


def _record(rounds: Sequence[Mapping[str, float]], size: int, where: str) -> dict[str, object]:
    middle = {key: round(median(one[key] for one in rounds), 3) for key in ("dflash_s", "hf_s", "ratio")}
    print(f"median {middle['dflash_s']:.2f} s, {middle['hf_s']:.2f} s, ratio {middle['ratio']:.3f}")
    return {
        "benchmark": "pull_speed",
        "command": "PYTHONPATH=. python benchmarks/pull_speed.py --out benchmarks/results/cpu_pull_speed.json",
        "what": f"a file of {size / 1e9:g} GB and {SMALL} of {SMALL_BYTES / 1e3:g} kB, fake hub on loopback",
        "machine": {"cpus": os.cpu_count(), "processor": _processor(), "folder": where, "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("dflash-local", "huggingface_hub")}
        | {"python": python_version()},
        "median": middle,
        "rounds": [{key: round(value, 3) for key, value in one.items()} for one in rounds],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    sys.exit(main())
