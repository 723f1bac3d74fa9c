"""Many writers and readers on one mount for a time, the writers killed at random: every version is whole.

ZSPACE_SOAK_SECONDS=600 makes it longer, ZSPACE_SOAK_SEED=7 repeats a run as far as time lets it."""
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import soak

SECONDS = float(os.environ.get("ZSPACE_SOAK_SECONDS") or 20)
SEED = int(os.environ.get("ZSPACE_SOAK_SEED") or time.time_ns() % 1_000_000)
WRITERS, READERS = (16, 16) if SECONDS >= 60 else (4, 4)
MEMORY_MIB = 256


def start(errors, *args):
    command = [sys.executable, soak.__file__, *map(str, args)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=errors)


def kill(process):
    """With what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it failed by itself
        pass
    process.wait()


def resident(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")) << 10


@pytest.mark.timeout(SECONDS * 3 + 300)
def test_writers_killed_among_readers(mounts, tmp_path):
    # So many processes leave each other alone for longer than the other tests wait.
    mount = mounts(memory=f"{MEMORY_MIB}M", cache="1G", **{"settle-dir": 2})
    rng = random.Random(SEED)
    # Two writers share each branch.
    branches = [f"run-{n // 2}" for n in range(WRITERS)]
    writers, readers, killed, most = {}, [], 0, 0
    with open(tmp_path / "errors", "ab") as errors:
        write = lambda n: start(errors, "write", mount.path, rng.getrandbits(32), branches[n], f"w{n}")
        try:
            for n in range(WRITERS):
                writers[n] = write(n)
            readers = [start(errors, "read", mount.path, rng.getrandbits(32)) for _ in range(READERS)]
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                time.sleep(rng.uniform(0, 8 / WRITERS))
                n = rng.choice(list(writers))
                assert writers[n].poll() is None, f"seed {SEED}: a writer failed\n{(tmp_path / 'errors').read_text()}"
                kill(writers[n])
                killed += 1
                writers[n] = write(n)
                most = max(most, resident(mount.process.pid))
                for reader in readers:
                    assert reader.poll() is None, f"seed {SEED}: a reader failed\n{(tmp_path / 'errors').read_text()}"
        finally:
            for process in [*writers.values(), *readers]:
                kill(process)
    mount.settled(branches, seconds=SECONDS + 60)
    count = check_all(mount, rng, set(branches))
    assert mount.zspace.verify()
    # The limit is that of rebuilt chunks. On top come twice 64 MiB of open files and directories, up to 128 chunks on their way
    # ahead and 64 in a commit (docs/ARCHITECTURE.md, "Memory").
    assert most < (MEMORY_MIB + 384 << 20), f"{most >> 20} MiB"
    # And from the store alone, once more.
    mount.stop()
    mount.options |= {"cache": "0"}
    mount.start()
    assert check_all(mount, rng, set(branches)) == count >= len(set(branches))
    print(f"{count} versions, {killed} writers killed, seed {SEED}, {most >> 20} MiB")


def check_all(mount, rng, branches):
    count = 0
    for branch in branches:
        for number in mount.versions(branch):
            soak.check_version(mount.version(number, branch), rng)
            count += 1
    return count
