"""What runs a program that a model wrote: shuts itself off from the machine first, then runs it to its end.

Run by path with ``python -I -S``: imports the standard library only, nothing of the package. Standard input is one
JSON object: ``program``, ``nonce``, ``folder`` (empty, the program's own), ``result`` (a file) and ``limits``. The
first line written to ``result`` says what shuts it off, the nonce follows when the program came to its end.

The kernel shuts it off where it can: namespaces of network and processes, Landlock for files, seccomp for system calls,
limits. An audit hook, which with limits is all there is elsewhere, stands before these: it keeps off accidents, and
nobody who means to get around it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

NEW_USER, NEW_NETWORK, NEW_PIDS, NEW_IPC = 0x10000000, 0x40000000, 0x20000000, 0x08000000
PARENT_DEATH_SIGNAL, NO_NEW_PRIVILEGES = 1, 38
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock; the same numbers on every architecture
READ_FILE, READ_FOLDER, WRITE_FILE, TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
SET_SECCOMP, REFUSE_CALL, FOREIGN_CALLS = 22, 0x00050001, 0x40000000  # EPERM; x32 calls of x86-64
# clone, clone3, fork, vfork, execve, execveat, socket, ptrace, unshare, setns, mount, bpf, io_uring_setup, perf_event
SYSTEM_CALLS = {
    "x86_64": (0xC000003E, (56, 435, 57, 58, 59, 322, 41, 101, 272, 308, 165, 321, 425, 298)),
    "aarch64": (0xC00000B7, (220, 435, 221, 281, 198, 117, 97, 268, 40, 280, 425, 241)),
}
NEVER = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11  # execute; make devices and sockets
TIMED_OUT = 124
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache")
REFUSED: tuple[str, ...] = (
    *("socket.", "ctypes.", "subprocess.", "pty.", "fcntl.", "syslog.", "urllib.", "ftplib.", "sqlite3."),
    *("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "signal.pthread_kill", "os.putenv"),
)
FILES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
FILES |= {"os.chown", "os.utime", "os.listdir", "os.scandir", "os.chdir", "os.setxattr", "os.removexattr", "os.mkfifo"}


def main() -> None:
    """Shut this process off, run the program, and end without a word but in ``result``."""
    asked = json.loads(sys.stdin.buffer.read())
    folder, limits = asked["folder"], asked["limits"]
    result = os.open(asked["result"], os.O_WRONLY)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.chdir(folder)
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    fenced = library is not None and own_namespaces(library)
    if fenced and library is not None:
        become_worker(library, limits["RLIMIT_CPU"])
    limit(limits)
    files = library is not None and only_these_files(library, folder)
    calls = files and library is not None and no_new_processes(library)
    guards = (
        "a network namespace" if fenced else "a socket guard in Python and no network namespace",
        "Landlock" if files else "a file guard in Python",
        "seccomp" if calls else "a process guard in Python",
    )
    os.write(result, ", ".join(guards).encode() + b"\n")
    sys.addaudithook(guard(os.path.realpath(folder)))
    run(asked["program"], result, asked["nonce"].encode())


def own_namespaces(library: Any) -> bool:
    """No network, no processes and no rights but its own; where users may have none, root still may."""
    flags = NEW_NETWORK | NEW_IPC | NEW_PIDS
    return any(library.unshare(each) == 0 for each in (flags | NEW_USER, flags))


def become_worker(library: Any, cpu_s: int) -> None:
    """Return in the second process of the new namespace; those before it wait and end as it does.

    The first one there, which signals of the namespace do not reach, runs nothing; all others end with it.
    """
    for _ in range(2):
        child = os.fork()
        if child:
            _, status, used = os.wait4(child, 0)
            seconds = used.ru_utime + used.ru_stime
            ended = os.waitstatus_to_exitcode(status)
            late = ended == -signal.SIGXCPU or (ended == -signal.SIGKILL and seconds >= cpu_s)
            os._exit(TIMED_OUT if late or ended == TIMED_OUT else int(ended != 0))
        library.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def limit(limits: dict[str, int]) -> None:
    """By the names of ``resource``, where the system has them."""
    try:
        import resource
    except ImportError:  # Windows: the parent's limit of time is what remains
        return
    for name, value in {**limits, "RLIMIT_CORE": 0}.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                after = value + (name == "RLIMIT_CPU")  # a second between the signal of its own and the kill
                resource.setrlimit(kind, (value, after))
            except (OSError, ValueError):  # macOS refuses some of them
                continue


def only_these_files(library: Any, folder: str) -> bool:
    """Landlock: the standard library to read, the folder to write, nothing to execute, no TCP."""
    library.syscall.restype = ctypes.c_long
    version = library.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    fields = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = library.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    allowed = [(path, READ_FILE | READ_FOLDER) for path in (*LIBRARIES, *readable())]
    allowed += [(folder, rights & ~NEVER), (os.devnull, READ_FILE | WRITE_FILE | TRUNCATE)]
    for path, right in allowed:
        try:
            opened = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            right &= READ_FILE | WRITE_FILE | TRUNCATE
        library.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", right & rights, opened), 0)
        os.close(opened)
    library.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    done = library.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return bool(done)


def no_new_processes(library: Any) -> bool:
    """seccomp: no process, no program, no socket, no namespace, whoever asks; root is under no limit of processes."""
    known = SYSTEM_CALLS.get(os.uname().machine)
    if known is None:
        return False
    architecture, numbers = known
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, REFUSE_CALL), (0x20, 0, 0, 0)]
    lines += [(0x35, 0, 1, FOREIGN_CALLS), (0x06, 0, 0, REFUSE_CALL)]
    for number in numbers:
        lines += [(0x15, 0, 1, number), (0x06, 0, 0, REFUSE_CALL)]
    lines.append((0x06, 0, 0, 0x7FFF0000))  # all others are allowed
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    head = struct.pack("@HP", len(lines), ctypes.addressof(code))
    return bool(library.prctl(SET_SECCOMP, 2, head, 0, 0) == 0)


def readable() -> tuple[str, ...]:
    """Where the standard library lies."""
    return tuple(dict.fromkeys(os.path.realpath(path) for path in (os.path.dirname(os.__file__), *sys.path) if path))


def guard(folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: no sockets, no processes, no files but the standard library's to read and its own."""
    readable_roots = (*readable(), os.devnull, *LIBRARIES)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if isinstance(path, int) or path is None:
            return True
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(root + os.sep) for root in roots)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = arguments
            roots = (folder,) if flags & writing else (folder, *readable_roots)
            if not inside(path, roots):
                raise PermissionError("no files but those of the own folder")
        elif event in FILES:
            roots = (folder, *readable_roots) if event in ("os.listdir", "os.scandir") else (folder,)
            names = arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]
            if not all(inside(path, roots) for path in names):
                raise PermissionError("no files but those of the own folder")

    return hook


def run(program: str, result: int, nonce: bytes) -> None:
    """Run it as a main program and end this process, whatever it does."""
    done = False
    try:
        exec(compile(program, "reply.py", "exec", dont_inherit=True), {"__name__": "__main__"})
        os.write(result, nonce)
        done = True
    finally:
        os._exit(0 if done else 1)


if __name__ == "__main__":
    main()
