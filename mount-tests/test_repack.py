"""Repack while a mount serves and takes versions, and when it is killed: the bytes stay, the space comes back."""
import os
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest

from files import sha256
from zspace import ROOT, eventually


def packs(zspace):
    return sorted(p.name for p in (zspace.store / "packs").iterdir())


def size(zspace):
    return sum(p.stat().st_size for p in (zspace.store / "packs").iterdir())


def commit_blindly(zspace, paths):
    """Commits all at once, so that hardly one knows of another when it looks for a base; the paths in the order of versions."""
    started = [subprocess.Popen(zspace.command("commit", p), stdout=subprocess.PIPE, text=True) for p in paths]
    numbers = [int(p.communicate()[0].split()[0].split("/")[1]) for p in started]
    return [path for _, path in sorted(zip(numbers, paths))]


def check(mount, order, first=1):
    for n, path in enumerate(order, first):
        assert sha256(mount.version(n) / path.name) == sha256(path)


@pytest.fixture
def loose(zspace, series):
    """A store with versions that were stored with hardly a base, and the files in their order."""
    zspace.run("init")
    return commit_blindly(zspace, series("long"))


def test_repack_under_a_mount(mounts, zspace, loose):
    mount = mounts(memory="1M")
    open_files = [open(mount.version(n) / p.name, "rb") for n, p in enumerate(loose, 1)]
    starts = [f.read(5000) for f in open_files]
    before = size(zspace)
    dry = zspace.json("repack", "--dry-run")
    assert (size(zspace), dry["before"]) == (before, before)

    done = zspace.json("repack")
    assert done["rewritten"] == dry["rewritten"] > 0
    assert done["damage"] == [] and done["busy"] == 0 and not done["stopped"]
    # How much there is to gain depends on how many of the commits knew of others.
    assert done["after"] == size(zspace) < before
    assert len(packs(zspace)) == 1

    for file, start, path in zip(open_files, starts, loose):
        with file:
            assert start + file.read() == path.read_bytes()
    check(mount, loose)
    assert zspace.json("verify")["damage"] == []
    # What was written twice on the way stays while it is little.
    assert zspace.json("stats")["superseded"] * 8 < done["after"]
    again = zspace.json("repack")
    assert (again["rewritten"], again["moved"]) == (0, 0)


def test_repack_while_staging_commits_and_readers_read(mounts, zspace, loose, series):
    mount = mounts(memory="1M")
    ended, failures = threading.Event(), []

    def read():
        while not ended.is_set():
            n = random.randrange(len(loose))
            if sha256(mount.version(n + 1) / loose[n].name) != sha256(loose[n]):
                failures.append(n + 1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    more = series("shipped")
    for n, path in enumerate(more, len(loose) + 1):
        shutil.copy(path, mount.path / "staging/main")
        zspace.run("repack")
        mount.wait_for(n)
    ended.set()
    for thread in readers:
        thread.join()
    assert failures == []
    zspace.run("repack")
    check(mount, loose + more)
    assert zspace.json("verify")["damage"] == []


def test_repack_is_killed_at_any_time(mounts, zspace, loose):
    kept = zspace.store.with_name("kept")
    shutil.copytree(zspace.store, kept)
    began = time.monotonic()
    zspace.run("repack")
    takes, best = time.monotonic() - began, size(zspace)
    for share in range(1, 10):
        shutil.rmtree(zspace.store)
        shutil.copytree(kept, zspace.store)
        running = subprocess.Popen(zspace.command("repack"), stdout=subprocess.DEVNULL)
        time.sleep(takes * share / 10)
        running.kill()
        running.wait()
        assert zspace.json("verify")["damage"] == []
        zspace.run("repack")
        assert zspace.json("verify")["damage"] == []
        unused = zspace.json("stats")["unused"]  # what a killed writer leaves stays
        assert size(zspace) - unused < best * 1.05
    check(mounts(), loose)


def test_interrupted_repack_keeps_what_it_did(zspace, loose):
    running = subprocess.Popen(zspace.command("repack", "--json"), stdout=subprocess.PIPE, text=True)
    time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    running.communicate()
    assert running.returncode in (0, 130, -signal.SIGINT)  # the last if it came before anything had begun
    assert zspace.json("verify")["damage"] == []
    zspace.run("repack")
    assert zspace.json("verify")["damage"] == []


def test_two_repacks_do_not_meet(zspace, loose):
    running = subprocess.Popen(zspace.command("repack"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    second = eventually(lambda: zspace.run("repack", ok=False), "a second repack ends")
    assert running.wait() == 0 or second.returncode == 0
    assert zspace.json("verify")["damage"] == []


def test_a_store_of_the_first_format_is_repacked(zspace, mounts, tmp_path):
    shutil.copytree(ROOT / "src/store/golden/v1", zspace.store)
    before = {n: zspace.run("cat", n, text=False).stdout for n in files_of(zspace)}
    mount = mounts()
    zspace.run("repack")
    assert before and before == {n: zspace.run("cat", n, text=False).stdout for n in files_of(zspace)}
    for name, content in before.items():
        rev, path = name.split(":")
        branch, number = rev.split("/")
        assert (mount.version(int(number), branch) / path).read_bytes() == content


def files_of(zspace):
    """REV:PATH of each file of each version."""
    found = []
    for branch in zspace.json("stats")["branches"]:
        for n in range(1, branch["versions"] + 1):
            rev = f"{branch['branch']}/{n}"
            found += [f"{rev}:{l['path']}" for l in zspace.json_lines("ls", rev) if l["kind"] == "file"]
    return found
