"""Staging as a disk: what people's writers have publicly run into elsewhere; the numbers are the cases of the project's collection."""
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from files import noise, sha256
from zspace import SETTLE, Mount, eventually


# C14: a temporary name, then a rename


def test_c14_save_file_is_complete_and_leaves_no_temporary_file(mount):
    tensors = {f"layer.{i}": torch.randn(1024, 1024, generator=torch.Generator().manual_seed(i)) for i in range(16)}
    save_file(tensors, mount.staging() / "model.safetensors")
    version = mount.exactly(1)
    assert os.listdir(version) == ["model.safetensors"]
    back = load_file(version / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_c14_a_file_reopened_after_its_rename_is_always_whole(mount):
    data = noise(1 << 20)
    target = mount.staging() / "archive.bin"
    for i in range(50):
        temporary = mount.staging() / f"archive.{i}.tmp"
        want = i.to_bytes(8, "little") + data
        with open(temporary, "wb") as file:
            file.write(want)
        temporary.chmod(0o640)
        os.rename(temporary, target)
        assert target.read_bytes() == want
        assert stat.S_IMODE(os.stat(target).st_mode) == 0o640
    mount.wait_for_status("archive.bin", "committed")
    number = max(mount.versions())
    assert (mount.version(number) / "archive.bin").read_bytes() == want
    for n in mount.versions():
        assert os.listdir(mount.version(n)) == ["archive.bin"]
        assert (mount.version(n) / "archive.bin").stat().st_size == len(want)


# C16: overwritten while it is mapped


def test_c16_saving_over_a_mapped_checkpoint(mount):
    first = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    second = {"w": torch.arange(1 << 20, dtype=torch.float32) + 1}
    torch.save(first, mount.staging() / "model.pt")
    version = mount.wait_for(1)
    committed = torch.load(version / "model.pt", mmap=True)
    with pytest.raises((OSError, RuntimeError)):
        torch.save(second, version / "model.pt")
    assert torch.equal(committed["w"], first["w"])
    # In staging a new file under the old name is as on a disk: whoever mapped the old one keeps it.
    staged = torch.load(mount.staging() / "model.pt", mmap=True)
    torch.save(second, mount.staging() / "model.pt.tmp")
    os.rename(mount.staging() / "model.pt.tmp", mount.staging() / "model.pt")
    assert torch.equal(staged["w"], first["w"])
    del staged
    assert torch.equal(torch.load(mount.wait_for(2) / "model.pt")["w"], second["w"])
    assert torch.equal(torch.load(mount.version(1) / "model.pt")["w"], first["w"])


# C18: a mapping that is written and grows


@pytest.mark.parametrize("open_at_commit", [False, True], ids=["closed", "open"])
def test_c18_what_was_flushed_from_a_mapping_is_there(mount, open_at_commit):
    path = mount.staging() / "grown.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(8 << 20,))
    array[:] = 3
    array[-1] = 4
    array.flush()
    if open_at_commit:
        # A mapping counts as open for writing: nothing settles, but it can be asked for.
        time.sleep(3 * SETTLE)
        assert mount.versions() == []
        mount.zspace.commit(path)
    else:
        del array
    back = np.load(mount.wait_for(1) / "grown.npy", mmap_mode="r")
    assert back[0] == 3 and back[-1] == 4 and back.shape == (8 << 20,)
    if open_at_commit:
        del array
    grown = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(16 << 20,))
    grown[:] = 5
    grown.flush()
    del grown
    number = eventually(lambda: max(mount.versions()) > 1 and max(mount.versions()), "a further version")
    back = np.load(mount.version(number) / "grown.npy", mmap_mode="r")
    assert back.shape == (16 << 20,) and int(back.min()) == int(back.max()) == 5


# C20: seeking back, cutting, patching


def test_c20_a_patched_version_costs_about_a_chunk(mount):
    data = noise(24 << 20)
    path = mount.staging() / "big.bin"
    path.write_bytes(data)
    mount.wait_for(1)
    before = mount.zspace.stored()
    with open(path, "r+b") as file:
        file.seek(7 << 20)
        file.write(b"ABCDEFGH")
    want = bytearray(data)
    want[7 << 20 : (7 << 20) + 8] = b"ABCDEFGH"
    assert (mount.wait_for(2) / "big.bin").read_bytes() == want
    assert mount.zspace.stored() - before < 5 << 20


def test_c20_header_written_last_and_cut_both_ways(mount):
    path = mount.staging() / "stream.bin"
    with open(path, "wb") as file:
        file.write(bytes(64))
        file.write(noise(300_000, 1))
        file.seek(0)
        file.write(b"HEADER" + bytes(58))
        file.truncate(200_000)
        file.truncate(400_000)
    want = (b"HEADER" + bytes(58) + noise(300_000, 1))[:200_000].ljust(400_000, b"\0")
    assert path.read_bytes() == want
    assert (mount.wait_for(1) / "stream.bin").read_bytes() == want


# C22: rsync that is killed and resumed


@pytest.mark.parametrize("mode", ["--partial", "--inplace", "--append-verify"])
def test_c22_rsync_killed_half_way_and_resumed(mount, tmp_path, mode):
    source = tmp_path / "checkpoint.bin"
    source.write_bytes(noise(24 << 20))
    target = mount.staging() / source.name
    options = ["--inplace", "--append-verify"] if mode == "--append-verify" else [mode]
    half = subprocess.Popen(
        ["rsync", *options, "--bwlimit=8m", source, mount.staging()], start_new_session=True, stderr=subprocess.DEVNULL
    )
    time.sleep(1.5)
    os.killpg(half.pid, signal.SIGKILL)
    half.wait()
    time.sleep(4 * SETTLE)
    assert mount.versions() == [], mount.status()
    subprocess.run(["rsync", *options, source, mount.staging()], check=True)
    subprocess.run(["rsync", *options, source, mount.staging()], check=True)
    assert sha256(target) == sha256(source)
    # A patch on top of a torn file may not be taken for a whole one by itself; it may be asked for.
    if not mount.versions():
        time.sleep(3 * SETTLE)
    if not mount.versions():
        mount.zspace.commit(target)
    assert sha256(mount.wait_for(1) / source.name) == sha256(source)
    number = max(mount.versions())
    with open(source, "r+b") as file:
        file.seek(5 << 20)
        file.write(noise(1 << 20, 2))
    subprocess.run(["rsync", "--ignore-times", "--inplace", source, mount.staging()], check=True)
    assert sha256(mount.wait_for(number + 1) / source.name) == sha256(source)


# C32: locks

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
(fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["flock", "fcntl"])
def test_c32_locks_exclude_and_end_with_their_holder(mount, how):
    path = mount.staging() / "held.lock"
    path.write_bytes(b"x")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path, how], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    lock = fcntl.flock if how == "flock" else fcntl.lockf
    with open(path, "r+b") as file:
        with pytest.raises(BlockingIOError):
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.kill()
        holder.wait()
        eventually(lambda: lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None, "the lock is free")
    with open(path, "rb") as one, open(path, "rb") as two:
        fcntl.flock(one, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_c32_filelock(mount):
    from filelock import FileLock, Timeout

    name = str(mount.staging() / "run.lock")
    with FileLock(name):
        with pytest.raises(Timeout):
            FileLock(name, is_singleton=False).acquire(timeout=0.2)
    with FileLock(name, is_singleton=False).acquire(timeout=5):
        pass


# C36: other users, and sources that nobody may write

NOBODY = 65534


def as_nobody(code, *args):
    run = [sys.executable, "-c", f"import os, sys; os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}", *map(str, args)]
    return subprocess.run(run, capture_output=True, text=True)


def test_c36_a_read_only_source_is_copied_whole(mount, tmp_path):
    source = tmp_path / "sealed.bin"
    source.write_bytes(noise(100_000))
    source.chmod(0o400)
    subprocess.run(["cp", "-p", source, mount.staging()], check=True)
    back = mount.wait_for(1) / "sealed.bin"
    assert sha256(back) == sha256(source)
    assert stat.S_IMODE(os.stat(back).st_mode) == 0o400


def test_c36_other_users_get_in_only_if_told_so(zspace, tmp_path):
    # pytest's own directories are root's alone: the mount point is where everybody may go.
    place = Path(tempfile.mkdtemp(prefix="zspace-"))
    place.chmod(0o755)
    try:
        for shared in (False, True):
            mount = Mount(zspace, place / "mnt", **{"allow-other": True} if shared else {})
            mount.log = tmp_path / f"{shared}.log"
            mount.start()
            try:
                listed = as_nobody("print(os.listdir(sys.argv[1]))", mount.path)
                if not shared:
                    assert listed.returncode != 0 and "Permission denied" in listed.stderr
                    continue
                assert listed.returncode == 0 and "staging" in listed.stdout, listed.stderr
                (mount.staging() / "mine.bin").write_bytes(b"mine")
                (mount.staging() / "mine.bin").chmod(0o600)
                denied = as_nobody("open(sys.argv[1]).read()", mount.staging() / "mine.bin")
                assert denied.returncode != 0 and "Permission denied" in denied.stderr
            finally:
                mount.close()
    finally:
        shutil.rmtree(place)


def test_of_a_file_with_two_names_the_entry_that_was_named_is_committed(mounts):
    mount = mounts(settle=600, **{"settle-dir": 600})
    checkpoint = mount.staging() / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.pt").write_bytes(noise(1000))
    os.link(checkpoint / "model.pt", mount.staging() / "best.pt")
    assert [v[:2] for v in mount.zspace.commit(mount.staging() / "best.pt")] == [("main", 1)]
    assert os.listdir(mount.version(1)) == ["best.pt"]
    # A link from elsewhere means what it leads to.
    (mount.path.parent / "link").symlink_to(checkpoint / "model.pt")
    assert [v[:2] for v in mount.zspace.commit(mount.path.parent / "link")] == [("main", 2)]
    assert os.listdir(mount.version(2)) == ["checkpoint"]
