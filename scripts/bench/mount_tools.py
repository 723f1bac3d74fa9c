"""What the benchmark of the mount does to the machine: mounts, timed clients, the page cache, pairs of runs in turn."""
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tools
from measure import Failed

sys.path.insert(0, str(tools.ROOT / "mount-tests"))  # its Zspace and Mount

CLIENT = Path(__file__).with_name("mount_client.py")
CACHESTAT = 451
# A file is called cached from this share on: a busy kernel takes single pages back at any time.
CACHED = 0.99
PAGE = os.sysconf("SC_PAGE_SIZE")
# Every mount is killed after so many seconds, whatever happens.
WATCHDOG = 1800


def say(*words):
    print("bench:", *words, file=sys.stderr, flush=True)


@dataclass
class Row:
    """One line of the table: seconds of each run through the mount, and of what it is held against right after."""

    what: str
    beside: str
    goal: float
    # "speed": at least `goal` × as fast. "time": at most `goal` × the time. "plus": at most `goal` seconds more.
    kind: str
    ours: list
    theirs: list
    # Bytes moved, where the table shows a rate.
    size: int | None = None
    notes: list = field(default_factory=list)

    def measures(self):
        """What is compared with the goal, of each pair of runs."""
        pairs = zip(self.ours, self.theirs)
        if self.kind == "plus":
            return [ours - theirs for ours, theirs in pairs]
        return [theirs / ours if self.kind == "speed" else ours / theirs for ours, theirs in pairs]

    def met(self):
        measured = statistics.median(self.measures())
        return measured >= self.goal if self.kind == "speed" else measured <= self.goal


def in_turn(runs, ours, theirs):
    """Seconds of both, `runs` times, each time the other way round; a first pair is not counted. What they saw must be the same."""
    ways, found = {"mount": ours, "other": theirs}, {"mount": [], "other": []}
    for number in range(runs + 1):
        seen = {}
        for name in sorted(ways, reverse=number % 2 == 0):
            took, seen[name] = ways[name]()
            if number:
                found[name].append(took)
        if seen["mount"] != seen["other"]:
            raise Failed(f"the mount gave {seen['mount']}, the other {seen['other']}")
    return found["mount"], found["other"]


def client(what, *args, fill=0):
    """Runs a client; seconds as it measured them, and what it saw."""
    command = [sys.executable, "-W", "ignore", CLIENT, what, fill, *args]
    # Threads of OpenBLAS would look for work that nobody has for them.
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise Failed(f"{what} {args}: exit {done.returncode}: {done.stderr.strip()[-500:]}")
    answer = json.loads(done.stdout)
    return answer["seconds"], answer["seen"]


def prepare(what, *args):
    """Runs one of the client's helpers."""
    subprocess.run([str(part) for part in (sys.executable, "-W", "ignore", CLIENT, what, *args)], check=True)


def timed(command):
    """Seconds of a whole process whose output is thrown away."""
    begin = time.perf_counter()
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    done = subprocess.run([str(part) for part in command], **options)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise Failed(f"{command}: exit {done.returncode}: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return seconds


def cached(path):
    """How much of a file is in the page cache under its own inode, from 0 to 1."""
    libc = ctypes.CDLL(None, use_errno=True)
    span, counts = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if libc.syscall(CACHESTAT, file.fileno(), span, counts, 0):
            raise OSError(ctypes.get_errno(), "cachestat (Linux 6.5 or newer)", str(path))
    return counts[0] / max(1, -(-size // PAGE))


def must_be_cached(*paths):
    for path in paths:
        share = cached(path)
        if share < CACHED:
            raise Failed(f"{path}: only {100 * share:.1f} % of it are in the page cache")


def dirty():
    """Bytes in the page cache that are still to be written."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Dirty", "Writeback"))


@contextmanager
def mounted(store, mnt, **options):
    """A mount, ended in any case; options as those of the command line with _ for -, True for flags."""
    from zspace import Mount, Zspace

    options = {name.replace("_", "-"): value for name, value in options.items()}
    mount = Mount(Zspace(store), mnt, watchdog=WATCHDOG, **options)
    try:
        yield mount.start()
        mount.stop()
    finally:
        mount.close()
