"""Seconds, bytes and memory of processes.

This process stays small (it imports neither numpy nor torch): a child's peak memory as the kernel counts it is at least
that of the process it was forked from.
"""
import os
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Cost:
    """What one run of a command took: seconds, and the peak resident memory of its largest process in bytes."""

    seconds: float
    memory: int


class Failed(Exception):
    """A compared tool did not do its work."""


def natural(path):
    """Sorts checkpoint-9 before checkpoint-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def files(path):
    """The files of a checkpoint, which is a file or a directory, in the order of their names."""
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink()) if path.is_dir() else [path]


def size(path):
    """Bytes of all files at `path`."""
    return sum(file.stat().st_size for file in files(path))


def warm(path):
    """Reads the files at `path`, so that they are in the page cache."""
    for file in files(path):
        with open(file, "rb", buffering=0) as source:
            while source.read(1 << 22):
                pass


def start(command, stdout=subprocess.DEVNULL, cwd=None, environment=None, errors=subprocess.PIPE):
    command = ["sh", "-ec", command] if isinstance(command, str) else [str(part) for part in command]
    options = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": errors, "cwd": cwd}
    return subprocess.Popen(command, env=os.environ | (environment or {}), **options)


def run(command, cwd=None, environment=None):
    """Runs a command (a string: by the shell) to its end and throws its output away."""
    with subprocess_errors() as errors:
        begin = time.perf_counter()
        process = start(command, cwd=cwd, environment=environment, errors=errors)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-500:]
            raise Failed(f"{shown(command)}: exit {process.returncode}: {said}")
    return Cost(seconds, usage.ru_maxrss * 1024)


def subprocess_errors():
    import tempfile

    return tempfile.TemporaryFile()


def same(command, checkpoint, cwd=None, environment=None):
    """Whether a command's output is the files of a checkpoint one after another. Raises Failed if not."""
    process = start(command, stdout=subprocess.PIPE, cwd=cwd, environment=environment, errors=subprocess.DEVNULL)
    equal = True
    for path in files(checkpoint):
        with open(path, "rb") as source:
            while equal and (want := source.read(1 << 20)):
                equal = process.stdout.read(len(want)) == want
    equal = equal and not process.stdout.read(1)
    process.stdout.close()
    if process.wait() or not equal:
        raise Failed(f"{shown(command)}: what came out is not {checkpoint.name}")


def same_files(path, checkpoint):
    """Whether the files at `path` are those of the checkpoint. Raises Failed if not."""
    got, want = files(path), files(checkpoint)
    names = [[file.relative_to(top) for file in some] for some, top in ((got, path), (want, checkpoint))]
    if names[0] != names[1]:
        raise Failed(f"{path}: other files than {checkpoint.name} has")
    for one, other in zip(got, want):
        with open(one, "rb") as a, open(other, "rb") as b:
            while (block := a.read(1 << 20)) == b.read(1 << 20):
                if not block:
                    break
            else:
                raise Failed(f"{one} differs from {other.name}")


def shown(command):
    return command if isinstance(command, str) else shlex.join(Path(c).name if i == 0 else str(c) for i, c in enumerate(command))


def copy_and_sync(checkpoint, directory):
    """Seconds of `cp` and fsync of the checkpoint into the directory."""
    target = directory / "copy"
    every = [target / path.relative_to(checkpoint) if checkpoint.is_dir() else target for path in files(checkpoint)]
    cost = run(f"cp -r {shlex.quote(str(checkpoint))} {shlex.quote(str(target))} && sync " + shlex.join(map(str, every)))
    run(["rm", "-r", target])
    return cost.seconds
