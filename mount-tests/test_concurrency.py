"""Several processes on one store: nothing is lost, numbers have no gaps, and a mount sees it all."""
import os
import subprocess
import threading

import pytest
import torch
from safetensors.torch import save_file

from files import sha256


def sources(tmp_path, who, count):
    paths = []
    for i in range(count):
        path = tmp_path / f"{who}-{i:02}.safetensors"
        generator = torch.Generator().manual_seed(i)
        save_file({"w": torch.randn(200, 200, generator=generator)}, path, metadata={"who": who})
        paths.append(path)
    return paths


@pytest.mark.parametrize("branches", [("main", "main"), ("left", "right")], ids=["one branch", "two branches"])
def test_two_processes_commit_while_a_mount_watches(mount, zspace, tmp_path, branches):
    count = 12
    work = [sources(tmp_path, who, count) for who in ("left", "right")]
    failures = []

    def commit(paths, branch):
        for path in paths:
            done = zspace.run("commit", path, "--branch", branch, ok=False)
            if done.returncode != 0:
                failures.append(done.stderr)

    threads = [threading.Thread(target=commit, args=pair) for pair in zip(work, branches)]
    for thread in threads:
        thread.start()
    while any(t.is_alive() for t in threads):  # at no time a gap, a version without its file, or a file that is not whole
        for branch in set(branches):
            seen = mount.versions(branch)
            assert seen == list(range(1, len(seen) + 1))
            if seen:
                (name,) = os.listdir(mount.version(seen[-1], branch))
                assert sha256(mount.version(seen[-1], branch) / name) == sha256(tmp_path / name)
    for thread in threads:
        thread.join()
    assert failures == []

    for branch in set(branches):
        mount.wait_for(branches.count(branch) * count, branch)
    found = [
        (branch, name) for branch in set(branches) for n in mount.versions(branch)
        for name in os.listdir(mount.version(n, branch))
    ]  # fmt: skip
    want = [(branch, p.name) for paths, branch in zip(work, branches) for p in paths]
    assert sorted(found) == sorted(want)
    for branch in set(branches):
        for n in mount.versions(branch):
            (name,) = os.listdir(mount.version(n, branch))
            assert sha256(mount.version(n, branch) / name) == sha256(tmp_path / name)
    zspace.verify()


def test_staging_and_command_line_commit_at_once(mount, zspace, tmp_path):
    staged, given = sources(tmp_path, "staged", 6), sources(tmp_path, "given", 6)
    committing = threading.Thread(target=lambda: [zspace.commit(p) for p in given])
    committing.start()
    for path in staged:
        subprocess.run(["cp", path, mount.staging()], check=True)
    committing.join()
    mount.exactly(12)
    names = [os.listdir(mount.version(n))[0] for n in range(1, 13)]
    assert sorted(names) == sorted(p.name for p in staged + given)
    assert [n for n in names if n.startswith("given")] == [p.name for p in given]
    zspace.verify()


def test_many_processes_start_on_a_store_that_does_not_exist(zspace, tmp_path):
    paths = sources(tmp_path, "new", 4)
    running = [subprocess.Popen(zspace.command("commit", p), stdout=subprocess.DEVNULL) for p in paths]
    assert [process.wait(60) for process in running] == [0] * 4
    assert len(zspace.out("log").strip().splitlines()) >= 4
    zspace.verify()


def test_a_killed_commit_leaves_a_sound_store(zspace, tmp_path):
    zspace.commit(*sources(tmp_path, "first", 1))
    big = tmp_path / "big.bin"
    with open(big, "wb") as file:
        for _ in range(24):
            file.write(os.urandom(8 << 20))
    for wait in (0.02, 0.1, 0.25, 0.5):
        process = subprocess.Popen(zspace.command("commit", big), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        zspace.verify()
    zspace.commit(*sources(tmp_path, "after", 1))
    zspace.verify()


def test_readers_share_a_file(mount, zspace, series):
    source = series("shipped")[0]
    zspace.commit(source)
    path = mount.wait_for(1) / source.name
    results = []
    readers = [threading.Thread(target=lambda: results.append(sha256(path))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert results == [sha256(source)] * 8
