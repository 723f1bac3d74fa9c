"""Files that the kernel reads and writes by itself, and files kept whole in STORE/cache."""
import hashlib
import mmap
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from files import noise
from zspace import SETTLE, eventually

MIB = 1 << 20


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@contextmanager
def stopped(mount):
    """Nothing that has to ask the mount is answered meanwhile."""
    mount.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        mount.process.send_signal(signal.SIGCONT)


def kept(mount):
    """The whole files in the cache, by name (their hash)."""
    return {p.name: p.stat() for p in (mount.zspace.store / "cache").iterdir() if p.name != "lock"}


def staged(mount, name="a.bin", size=3 * MIB, seed=0):
    """A file that is committed from staging, and its bytes."""
    data = noise(size, seed)
    (mount.staging() / name).write_bytes(data)
    mount.wait_for_status(name, "committed")
    return data


def whole(mount, data):
    """Waits until the file with these bytes lies in the cache."""
    return eventually(lambda: kept(mount).get(sha256(data)), lambda: f"whole in {kept(mount)}")


def read_past_the_cache(path):
    """Reads a file, and has the kernel forget what it read."""
    with open(path, "rb") as file:
        data = file.read()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return data


def test_staged_files_are_written_and_read_by_the_kernel_itself(mount):
    path = mount.staging() / "a.bin"
    with open(path, "w+b", buffering=0) as file:
        # Before its first write the kernel asks whether the file has capabilities.
        os.pwrite(file.fileno(), b"y", 0)
        with stopped(mount):
            file.write(b"x" * MIB)
            assert os.pread(file.fileno(), 10, MIB - 5) == b"xxxxx"
    assert path.stat().st_size == MIB


def test_without_passthrough_the_mount_is_asked(mounts):
    mount = mounts(**{"no-passthrough": True})
    data = staged(mount)
    with open(mount.version(1) / "a.bin", "rb", buffering=0) as file:
        done = subprocess.Popen(
            [sys.executable, "-c", "import os, sys; print(len(os.pread(int(sys.argv[1]), 100, 0)))", str(file.fileno())],
            pass_fds=[file.fileno()],
            stdout=subprocess.PIPE,
        )
        with stopped(mount):
            time.sleep(0.5)
        assert done.communicate(timeout=10)[0] == b"100\n"
        assert os.pread(file.fileno(), MIB, 2 * MIB) == data[2 * MIB :]


def test_what_was_staged_becomes_its_versions_file_without_a_copy_and_comes_back(mount):
    tree = mount.zspace.store / "staging/tree/main/a.bin"
    data = noise(3 * MIB)
    path = mount.staging() / "a.bin"
    path.write_bytes(data)
    number = tree.stat().st_ino
    mount.wait_for_status("a.bin", "committed")
    assert whole(mount, data).st_ino == number
    assert not tree.exists()
    before = path.stat()
    with open(path, "rb", buffering=0) as ours, open(mount.version(1) / "a.bin", "rb", buffering=0) as theirs:
        with stopped(mount):
            assert os.pread(ours.fileno(), MIB, MIB) == os.pread(theirs.fileno(), MIB, MIB) == data[MIB : 2 * MIB]
    # The kernel lets go of the version's file a moment after it is closed.
    time.sleep(0.3)
    with open(path, "r+b") as file:
        file.write(b"changed")
    assert tree.stat().st_ino == number
    assert kept(mount) == {}
    assert path.stat().st_ino == before.st_ino
    assert (mount.version(1) / "a.bin").read_bytes() == data
    assert (mount.wait_for(2) / "a.bin").read_bytes() == b"changed" + data[7:]


def test_a_reader_in_staging_sees_what_is_written_after_the_commit(mount):
    path = mount.staging() / "train.log"
    path.write_bytes(b"1\n" * MIB)
    with open(path, "rb", buffering=0) as early:
        mount.wait_for_status("train.log", "committed")
        with open(path, "rb", buffering=0) as late, open(path, "ab", buffering=0) as writer:
            writer.write(b"2\n")
            assert os.pread(early.fileno(), 10, 2 * MIB) == os.pread(late.fileno(), 10, 2 * MIB) == b"2\n"


@pytest.mark.parametrize("how", ["in place", "append", "truncate"])
def test_a_version_that_is_being_read_never_changes(mount, how):
    data = staged(mount)
    path = mount.staging() / "a.bin"
    with open(mount.version(1) / "a.bin", "rb", buffering=0) as theirs, open(path, "rb", buffering=0) as ours:
        mapped = mmap.mmap(theirs.fileno(), 0, prot=mmap.PROT_READ)
        mode = {"in place": "r+b", "append": "ab", "truncate": "wb"}[how]
        with open(path, mode, buffering=0) as writer:
            writer.write(b"changed")
            want = {"in place": b"changed" + data[7:], "append": data + b"changed", "truncate": b"changed"}[how]
            assert path.read_bytes() == want
        assert os.pread(theirs.fileno(), len(data), 0) == data
        assert mapped[:] == data
        # Whoever has the staged file open from before sees either what was committed or what was written, and never an error.
        assert os.pread(ours.fileno(), 7, 0) in (data[:7], b"changed")
    assert (mount.wait_for(2) / "a.bin").read_bytes() == want
    assert (mount.version(1) / "a.bin").read_bytes() == data


def test_two_entries_of_the_same_bytes_are_changed_apart(mount):
    data = staged(mount, "a.bin")
    (mount.staging() / "b.bin").write_bytes(data)
    mount.wait_for_status("b.bin", "committed")
    with open(mount.staging() / "a.bin", "rb", buffering=0) as reader:
        with open(mount.staging() / "b.bin", "r+b") as writer:
            writer.write(b"changed")
        assert os.pread(reader.fileno(), 7, 0) == data[:7]
    assert (mount.staging() / "a.bin").read_bytes() == data
    assert (mount.staging() / "b.bin").read_bytes() == b"changed" + data[7:]


def test_the_quota_holds_and_the_oldest_goes(mounts):
    mount = mounts(cache="8M")
    made = []
    for i in range(4):
        made.append(staged(mount, f"{i}.bin", seed=i))
        eventually(lambda: sum(s.st_size for s in kept(mount).values()) <= 8 * MIB, "the quota")
    eventually(lambda: set(kept(mount)) == {sha256(d) for d in made[2:]}, lambda: f"{list(kept(mount))}")
    for i, data in enumerate(made):
        assert (mount.version(i + 1) / f"{i}.bin").read_bytes() == data
    staged(mount, "large.bin", 9 * MIB)
    assert set(kept(mount)) == {sha256(d) for d in made[2:]}
    assert "whole files 6.3 MB of 8.4 MB" in mount.status(), mount.status()


def test_the_cache_may_be_removed_at_any_time(mount):
    data = staged(mount)
    whole(mount, data)
    path = mount.version(1) / "a.bin"
    with open(path, "rb", buffering=0) as file:
        for p in kept(mount):
            (mount.zspace.store / "cache" / p).unlink()
        assert path.read_bytes() == data
        assert os.pread(file.fileno(), len(data), 0) == data
    assert path.read_bytes() == (mount.staging() / "a.bin").read_bytes() == data
    with open(mount.staging() / "a.bin", "r+b") as file:
        file.write(b"changed")
    assert (mount.wait_for(2) / "a.bin").read_bytes() == b"changed" + data[7:]


@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_a_file_that_was_changed_in_the_cache_is_never_served(mount, running):
    data = staged(mount)
    whole(mount, data)
    if not running:
        mount.stop()
    file = mount.zspace.store / "cache" / sha256(data)
    times = file.stat()
    with open(file, "r+b") as broken:
        broken.seek(MIB)
        broken.write(b"broken")
    if not running:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        mount.start()
    for _ in range(3):
        assert (mount.version(1) / "a.bin").read_bytes() == data
        time.sleep(0.3)
    # It is found out and made anew.
    eventually(lambda: file.exists() and sha256(file.read_bytes()) == file.name, "a right one in its place")


def test_a_file_that_is_there_after_a_restart_is_used_again(mount):
    data = staged(mount)
    number = whole(mount, data).st_ino
    mount.restart()
    assert (mount.version(1) / "a.bin").read_bytes() == data

    path = mount.version(1) / "a.bin"

    def by_itself():
        assert path.read_bytes() == data
        with open(path, "rb", buffering=0) as file:
            reader = subprocess.Popen(["dd", "of=/dev/null", "iflag=direct", "bs=1M", "status=none"], stdin=file)
            with stopped(mount):
                time.sleep(0.3)
                return reader.poll() == 0

    eventually(by_itself, "the kernel reads it by itself")
    assert whole(mount, data).st_ino == number


def test_a_version_that_is_read_often_is_kept_whole(mount, tmp_path):
    data = noise(3 * MIB)
    (tmp_path / "a.bin").write_bytes(data)
    mount.zspace.commit(tmp_path / "a.bin")
    path = mount.version(1) / "a.bin"
    assert read_past_the_cache(path) == data
    assert kept(mount) == {}
    for _ in range(2):
        assert read_past_the_cache(path) == data
        time.sleep(0.2)
    whole(mount, data)
    with open(path, "rb", buffering=0) as file, stopped(mount):
        assert os.pread(file.fileno(), len(data), 0) == data


def test_warm_keeps_a_version_whole(mount, tmp_path):
    (tmp_path / "d").mkdir()
    data = {name: noise(2 * MIB, i) for i, name in enumerate(["a.bin", "b.bin"])}
    for name, bytes in data.items():
        (tmp_path / "d" / name).write_bytes(bytes)
    (tmp_path / "d/config.json").write_text("{}")
    mount.zspace.commit(tmp_path / "d")
    assert "2 files of 4.2 MB" in mount.zspace.out("warm", "main/1")
    assert set(kept(mount)) == {sha256(d) for d in data.values()}
    assert mount.zspace.run("warm", "main/9", ok=False).returncode == 1
    for name, bytes in data.items():
        with open(mount.version(1) / "d" / name, "rb", buffering=0) as file, stopped(mount):
            assert os.pread(file.fileno(), len(bytes), 0) == bytes


def test_warm_says_when_there_is_no_room(mounts, tmp_path):
    mount = mounts(cache="1M")
    (tmp_path / "a.bin").write_bytes(noise(2 * MIB))
    mount.zspace.commit(tmp_path / "a.bin")
    done = mount.zspace.run("warm", "main", ok=False)
    assert done.returncode != 0 and "--cache" in done.stderr


def test_a_mapping_counts_as_open_after_its_descriptor_is_closed(mount):
    path = mount.staging() / "a.bin"
    path.write_bytes(bytes(2 * MIB))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, trackfd=False) if sys.version_info >= (3, 13) else mmap.mmap(file.fileno(), 0)
    if sys.version_info < (3, 13):
        # It keeps a descriptor of its own.
        own = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == str(path)]
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, int(own[0]))
        os.close(null)
    time.sleep(4 * SETTLE)
    assert mount.versions() == [], mount.status()
    mapped[MIB] = 7
    del mapped
    assert (mount.wait_for(1) / "a.bin").read_bytes()[MIB] == 7


def test_what_is_written_through_a_mapping_after_a_commit_on_request_is_not_lost(mount):
    path = mount.staging() / "a.bin"
    path.write_bytes(bytes(2 * MIB))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    mapped[0] = 1
    mount.zspace.commit(path)
    # The page is dirty already: this write changes no time of the file.
    mapped[0] = 2
    del mapped
    eventually(lambda: len(mount.versions()) == 2, lambda: mount.status())
    assert (mount.version(1) / "a.bin").read_bytes()[0] == 1
    assert (mount.version(2) / "a.bin").read_bytes()[0] == 2
    assert path.read_bytes()[0] == 2


def test_the_files_of_a_directory_are_kept_whole_too(mount):
    data = {name: noise(2 * MIB, i) for i, name in enumerate(["a.bin", "b.bin"])}
    (mount.staging() / "run").mkdir()
    for name, bytes in data.items():
        (mount.staging() / "run" / name).write_bytes(bytes)
    mount.wait_for_status("run", "committed")
    for name, bytes in data.items():
        whole(mount, bytes)
        assert (mount.staging() / "run" / name).read_bytes() == bytes


@pytest.mark.parametrize("how", ["wb", "r+b"])
def test_a_version_that_is_mapped_stays_what_it_is_when_its_staged_file_is_changed(mount, how):
    """torch maps a file and closes it: the mapping alone keeps the version's file."""
    staged = mount.staging() / "last/model.pt"
    staged.parent.mkdir()
    torch.save({"w": torch.ones(2_000_000)}, staged)
    mapped = torch.load(mount.wait_for(1) / "last/model.pt", mmap=True)["w"]
    assert mapped[:10].sum() == 10
    with open(staged, how) as file:
        file.seek(4096)
        file.write(bytes(8_000_000))
        file.flush()
        assert mapped.sum().item() == 2_000_000
    assert mapped.sum().item() == 2_000_000
