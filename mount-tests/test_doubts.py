"""Work that may be torn stays so wherever it goes, until it is done over."""
import os
import shutil
import signal
import subprocess
import time

import pytest

from files import noise
from test_killed_writers import killed_between_two_files, lines, python
from zspace import SETTLE_DIR, Mount, Zspace, eventually


@pytest.mark.parametrize("place", ["b2/entry", "b2/outer/inner", "main/outer/inner", "main/outer/deep/inner"])
def test_a_directory_whose_writer_was_killed_waits_wherever_it_is_moved(mount, place):
    directory = mount.staging() / "checkpoint-1"
    writer = killed_between_two_files(directory)
    to = mount.path / "staging" / place
    (mount.path / "staging/b2").mkdir()
    to.parent.mkdir(parents=True, exist_ok=True)
    os.rename(directory, to)
    branch, entry = place.split("/")[:2]
    eventually(lambda: [l for l in lines(mount, branch) if entry in l and "waiting" in l], mount.status)
    time.sleep(3 * SETTLE_DIR)
    [line] = [l for l in lines(mount, branch) if entry in l]
    assert "was killed" in line and str(writer.pid) in line
    assert mount.versions() == [] and mount.versions("b2") == []
    mount.zspace.commit(mount.path / "staging" / branch / entry)
    assert mount.versions(branch) == [1]


def test_what_is_moved_out_of_such_a_directory_waits_and_so_does_the_rest(mount):
    directory, outer = mount.staging() / "checkpoint-1", mount.staging() / "outer"
    killed_between_two_files(directory)
    mount.wait_for_status("checkpoint-1", "waiting")
    (outer / "in").mkdir(parents=True)
    os.rename(directory / "a", outer / "in/a")
    mount.wait_for_status("outer", "waiting")
    os.rename(directory / "b", outer / "in/b")
    time.sleep(7 * SETTLE_DIR)
    assert mount.versions() == []
    assert "all files in it were removed" in mount.wait_for_status("checkpoint-1", "waiting")
    os.rmdir(directory)
    shutil.rmtree(outer)
    (mount.staging() / "new").mkdir()
    (mount.staging() / "new/file").write_bytes(b"1")
    mount.wait_for(1)


def test_another_name_of_a_torn_file_waits_too(mount):
    torn = mount.staging() / "model.bin"
    script = "import sys, time\nf = open(sys.argv[1], 'wb'); f.write(b'x' * 100000); f.flush(); time.sleep(100)"
    writer = python(script, torn)
    eventually(lambda: torn.is_file() and torn.stat().st_size == 100_000, "it writes")
    writer.kill()
    writer.wait()
    mount.wait_for_status("model.bin", "waiting")
    (mount.staging() / "entry").mkdir()
    os.link(torn, mount.staging() / "entry/copy.bin")
    os.link(torn, mount.staging() / "loose.bin")
    for name in ("entry", "loose.bin"):
        line = mount.wait_for_status(name, "waiting")
        assert "is the same file as main/model.bin" in line and "was killed" in line
    torn.unlink()
    # A name less says nothing of the file: it is still asked about.
    (mount.staging() / "other").mkdir()
    (mount.staging() / "other/file").write_bytes(b"1")
    mount.wait_for(1)
    time.sleep(2 * SETTLE_DIR)
    assert os.listdir(mount.version(1)) == ["other"] and mount.versions() == [1]


@pytest.mark.parametrize("how", [["-a"], ["-a", "--inplace"], ["-a", "--partial"]], ids=" ".join)
def test_an_rsync_that_was_broken_off_and_then_ends_is_a_version(mount, tmp_path, how):
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    for n in range(6):
        (source / f"{n}.bin").write_bytes(noise(300_000, n))
    staged = mount.staging() / "checkpoint-1"
    first = subprocess.Popen(["rsync", *how, "--bwlimit=1000", f"{source}/", f"{staged}/"])
    eventually(lambda: (staged / "1.bin").is_file(), "it is under way")
    first.send_signal(signal.SIGINT)
    assert first.wait() != 0
    mount.wait_for_status("checkpoint-1", "waiting")
    subprocess.run(["rsync", *how, f"{source}/", f"{staged}/"], check=True)
    version = mount.wait_for(1) / "checkpoint-1"
    assert {p.name: p.read_bytes() for p in version.iterdir()} == {p.name: p.read_bytes() for p in source.iterdir()}


def test_a_directory_that_is_being_taken_apart_is_left_alone_for_longer(mount):
    directory, elsewhere = mount.staging() / "checkpoint-1", mount.path / "staging/b2"
    elsewhere.mkdir()
    (elsewhere / "kept.tmp").mkdir()
    directory.mkdir()
    for name in "abc":
        (directory / name).write_bytes(b"1")
    for name in "ab":
        os.rename(directory / name, elsewhere / "kept.tmp" / name)
        time.sleep(2.5 * SETTLE_DIR)
        assert mount.versions() == []
    assert os.listdir(mount.wait_for(1) / "checkpoint-1") == ["c"]


def test_the_cache_gives_way_on_a_disk_that_fills_up(small_disk, tmp_path):
    mount = Mount(Zspace(small_disk / "store"), tmp_path / "mnt").start()
    try:
        # What is as easily packed as zeros leaves the disk to the cache.
        for n in range(1, 8):
            (mount.staging() / f"{n}.bin").write_bytes(bytes([n]) * (12 << 20))
            mount.wait_for(n)
        cache = small_disk / "store/cache"
        kept = lambda: sum(p.stat().st_size for p in cache.iterdir())
        free = lambda: os.statvfs(small_disk).f_bavail * 4096
        eventually(lambda: 0 < kept() <= free(), lambda: f"{kept()} kept, {free()} free")
        (mount.staging() / "8.bin").write_bytes(noise(30 << 20, 8))
        mount.wait_for(8, seconds=30)
        mount.zspace.verify()
    finally:
        mount.close()


def test_a_copy_that_fits_is_not_torn_where_every_write_is_seen(small_disk, tmp_path):
    mount = Mount(Zspace(small_disk / "store"), tmp_path / "mnt", **{"no-passthrough": True}).start()
    try:
        left = os.statvfs(small_disk).f_bavail * 4096
        (small_disk / "ballast").write_bytes(bytes(left - (900 << 10)))
        (mount.staging() / "small.txt").write_bytes(b"1" * 1000)
        assert (mount.wait_for(1) / "small.txt").read_bytes() == b"1" * 1000
    finally:
        mount.close()
