"""The `zspace` command and a mount of it, as the tests drive them."""
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BINARY = Path(os.environ.get("ZSPACE_BIN") or ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/zspace")
SETTLE, SETTLE_DIR = 0.3, 1.0
# How long to look whether a version too many appears: several times the longest settling.
QUIET = 2.5


def eventually(condition, what, seconds=20):
    """Waits until `condition()` is true (and returns it)."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
        time.sleep(0.05)


def is_mounted(path):
    """Whether something is mounted at `path`, even if it is dead."""
    name = str(path).replace(" ", "\\040")
    with open("/proc/self/mountinfo") as mounts:
        return any(line.split()[4] == name for line in mounts)


def mounts_below(path):
    with open("/proc/self/mountinfo") as mounts:
        return [p for p in (line.split()[4] for line in mounts) if p.startswith(f"{path}/")]


def python(code, *args, **options):
    """Starts Python code that prints a line when it has begun."""
    return subprocess.Popen([sys.executable, "-uc", code, *map(str, args)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)  # fmt: skip


class Zspace:
    """The command line on one store."""

    def __init__(self, store):
        self.store = Path(store)

    def command(self, *args):
        return [str(BINARY), "--store", str(self.store), *map(str, args)]

    def run(self, *args, ok=True, timeout=100, **options):
        """Runs a verb; with `ok` it must exit with 0. Output is captured as text unless told otherwise."""
        options = {"capture_output": True, "text": True} | options
        done = subprocess.run(self.command(*args), timeout=timeout, **options)
        if ok and done.returncode != 0:
            raise AssertionError(f"zspace {' '.join(map(str, args))}: exit {done.returncode}\n{done.stderr}")
        return done

    def out(self, *args, **options):
        return self.run(*args, **options).stdout

    def json(self, *args, **options):
        return json.loads(self.out(*args, "--json", **options))

    def json_lines(self, *args, **options):
        return [json.loads(line) for line in self.out(*args, "--json", **options).splitlines()]

    def stored(self):
        """Bytes that all versions take."""
        return self.json("stats")["stored"]

    def commit(self, *args):
        """Commits, and returns (branch, number, id) of each version made."""
        made = []
        for line in self.out("commit", *args).splitlines():
            rev, version_id = line.split()[:2]
            branch, number = rev.rsplit("/", 1)
            made.append((branch, int(number), version_id))
        return made

    def verify(self):
        """Every hash of the store must be right."""
        return self.out("verify")


class Mount:
    """A mount in a process of its own, which `close` ends whatever state it is in."""

    def __init__(self, zspace, path, watchdog=110, **options):
        self.zspace = zspace
        self.path = Path(path)
        self.options = {"settle": SETTLE, "settle-dir": SETTLE_DIR} | options
        self.watchdog = watchdog
        self.process = None
        self.log = self.path.with_suffix(".log")

    def start(self):
        """Mounts, and returns when the mount is usable."""
        self.path.mkdir(exist_ok=True) if not is_mounted(self.path) else None
        args = ["mount", self.path]
        for name, value in self.options.items():
            args += [f"--{name}"] if value is True else [f"--{name}", value]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.zspace.command(*args), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.timer = threading.Timer(self.watchdog, self.process.kill)
        self.timer.daemon = True
        self.timer.start()
        eventually(self.usable, lambda: f"the mount is usable\n{self.messages()}")
        return self

    def usable(self):
        if self.process.poll() is not None:
            raise AssertionError(f"mount ended with {self.process.returncode}\n{self.messages()}")
        try:
            # statvfs asks the mount itself: of a dead one, the kernel still remembers names and attributes.
            return is_mounted(self.path) and bool(os.statvfs(self.path)) and (self.path / "staging").is_dir()
        except OSError:  # a dead mount point that is about to be cleared
            return False

    def messages(self):
        return self.log.read_text(errors="replace")

    def stop(self):
        """Unmounts as a user does."""
        self.zspace.run("umount", self.path)
        assert self.process.wait(timeout=30) == 0, self.messages()
        assert not is_mounted(self.path)
        self.timer.cancel()

    def kill(self):
        """The mount dies without a chance to do anything: kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.timer.cancel()

    def restart(self):
        self.stop()
        return self.start()

    def close(self):
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process:
            self.timer.cancel()
        while is_mounted(self.path):
            subprocess.run(["umount", "-l", self.path], check=True)

    def staging(self, branch="main"):
        return self.path / "staging" / branch

    def version(self, number, branch="main", door="versions"):
        return self.path / door / branch / f"{number:06}"

    def versions(self, branch="main"):
        """The numbers of a branch's versions."""
        directory = self.path / "versions" / branch
        return [int(n) for n in os.listdir(directory) if n.isdigit()] if directory.is_dir() else []

    def wait_for(self, number, branch="main", seconds=20):
        """Waits until a version exists, and returns its directory."""
        eventually(
            lambda: number in self.versions(branch),
            lambda: f"{branch}/{number} (there are {self.versions(branch)})\n{self.status()}\n{self.messages()}",
            seconds,
        )
        return self.version(number, branch)

    def exactly(self, number, branch="main"):
        """Waits for a version, and then some time to see that no further one appears. Returns its directory."""
        path = self.wait_for(number, branch)
        time.sleep(QUIET)
        assert self.versions(branch) == list(range(1, number + 1)), self.status()
        return path

    def status(self):
        return self.zspace.run("status", self.path, ok=False).stdout

    def settled(self, branches, seconds=40):
        """Waits until every entry is committed or waits for somebody to say what to do."""
        mine = lambda line: any(line.startswith(f"{branch}/") for branch in branches)
        decided = lambda line: "  committed  " in line or "  waiting  " in line
        undecided = lambda: [line for line in self.status().splitlines() if mine(line) and not decided(line)]
        eventually(lambda: not undecided(), undecided, seconds)

    def wait_for_status(self, *words, seconds=20):
        """Waits until `zspace status` has all the words in one line, and returns that line."""
        return eventually(
            lambda: next((l for l in self.status().splitlines() if all(w in l for w in words)), None),
            lambda: f"a line with {words} in status\n{self.status()}\n{self.messages()}",
            seconds,
        )
