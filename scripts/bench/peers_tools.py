"""What the benchmark of peers does with the program: stores, servers, timed pulls, pairs of runs in turn."""
import json
import os
import re
import shutil
import subprocess
import time
from contextlib import contextmanager

from measure import Failed, files


class Bench:
    """The program, and the stores it works on."""

    def __init__(self, binary, runs, long_runs, log):
        self.binary, self.runs, self.long_runs, self.log = binary, runs, long_runs, log

    def run(self, *args):
        done = subprocess.run([self.binary, *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"zspace {' '.join(map(str, args))}: exit {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def new(self, store):
        self.run("init", "--store", store)
        return store

    def put(self, store, data):
        """Puts bytes as an object; its id."""
        path = store.with_name("bytes")
        path.write_bytes(data)
        put = json.loads(self.run("object", "put", "--json", path, "--store", store))
        path.unlink()
        return put["id"]

    def copy(self, store, target):
        """A copy that is on the disk, so that nobody's fsync waits for it."""
        subprocess.run(["cp", "-r", store, target], check=True)
        for path in files(target):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return target

    @contextmanager
    def serving(self, store):
        """The port of a server, which is ended in any case."""
        command = [self.binary, "serve", "--store", str(store), "--tcp", "127.0.0.1:0", "--read-only"]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)
        try:
            said = server.stdout.readline()
            if not (found := re.search(r"127\.0\.0\.1:(\d+)", said)):
                raise Failed(f"zspace serve said {said!r}")
            yield int(found[1])
        finally:
            end([server])

    def pull(self, port, stores, *args):
        """Pulls into stores at once, in as many processes: seconds of them all, and what each said."""
        pulls = []
        try:
            begin = time.perf_counter()
            for store in stores:
                command = [self.binary, "pull", f"tcp:127.0.0.1:{port}", "--json", "--store", store, *args]
                options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": self.log}
                pulls.append(subprocess.Popen([str(part) for part in command], **options))
            # Each says one short line, which a pipe holds.
            codes = [process.wait() for process in pulls]
            seconds = time.perf_counter() - begin
            said = [process.stdout.read() for process in pulls]
        finally:
            end(pulls)
        if any(codes):
            raise Failed(f"zspace pull {' '.join(map(str, args))}: exit {max(codes)}")
        return seconds, [json.loads(one) for one in said]

    def objects(self, port, stores, wanted):
        seconds, outcomes = self.pull(port, stores, "--object", wanted)
        if any(one["objects"] != [wanted] or one["collisions"] for one in outcomes):
            raise Failed(f"pulled {outcomes[0]} in place of {wanted}")
        return seconds, outcomes

    def each(self, runs, base, target, pull):
        """Pulls into a fresh copy of a store (None: a new one) `runs` times, after once uncounted; seconds and what was said."""
        took, said = [], []
        for number in range(runs + 1):
            store = self.copy(base, target) if base else self.new(target)
            seconds, outcomes = pull(store)
            shutil.rmtree(target)
            if number:
                took.append(seconds)
                said += outcomes
        return took, said


def end(processes):
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def in_turn(runs, ours, theirs):
    """What both give, `runs` times, each time the other way round, after one pair that is not counted."""
    found = ([], [])
    for number in range(runs + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            got = (ours, theirs)[which]()
            if number:
                found[which].append(got)
    return found
