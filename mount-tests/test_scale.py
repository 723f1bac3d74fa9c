"""What a file costs does not depend on how many there are: counted in what the mount reads and writes, not timed."""
import os
import subprocess

import pytest

FEW, MANY = 60, 480
STEPS = {
    "copy in": "cp -r {source} {staged}",
    "list": "ls -lR {staged}",
    "remove": "rm -r {staged}",
    "list a version": "ls -lR {version}",
    "read a version": "cat {version}/*",
}


def traffic(mount):
    """System calls that read or wrote, and bytes that they read, of the mount's process so far."""
    lines = open(f"/proc/{mount.process.pid}/io").read().split("\n")
    io = {key: int(value) for key, value in (line.split(": ") for line in lines if line)}
    return io["syscr"] + io["syscw"], io["rchar"]


def costs(mount, tmp_path, count, number):
    """Calls and bytes for each of `count` files, step by step; the committed directory is removed again."""
    source = tmp_path / f"source-{count}"
    source.mkdir()
    for n in range(count):
        (source / f"file-{n:06}.json").write_bytes(os.urandom(500))
    staged = mount.staging() / f"d{count}"
    places = {"source": source, "staged": staged, "version": mount.version(number) / staged.name}
    found = {}

    def cost(step, work):
        before = traffic(mount)
        work()
        found[step] = [(b - a) / count for a, b in zip(before, traffic(mount))]

    def shell(step):
        subprocess.run(["sh", "-ec", STEPS[step].format(**places)], check=True, stdout=subprocess.DEVNULL)

    for step in ("copy in", "list"):
        cost(step, lambda: shell(step))
    cost("commit", lambda: mount.zspace.commit(staged))
    for step in ("list a version", "read a version", "remove"):
        cost(step, lambda: shell(step))
    assert not staged.exists()
    return found


@pytest.fixture
def mount(mounts):
    return mounts(**{"settle": 600, "settle-dir": 600})


def test_a_file_costs_the_same_among_many(mount, tmp_path):
    few, many = costs(mount, tmp_path, FEW, 1), costs(mount, tmp_path, MANY, 2)
    for step, (calls, read) in few.items():
        assert many[step][0] <= calls * 1.3 + 1, f"calls for each file, {step}: {few} with {FEW}, {many} with {MANY}"
        assert many[step][1] <= read * 1.3 + 100, f"bytes for each file, {step}: {few} with {FEW}, {many} with {MANY}"
