"""Full disks, large trees, clocks that are wrong; the numbers are the cases of the project's collection."""
import errno
import os
import shutil
import subprocess
import time

import pytest

from files import noise, sha256, snapshot
from zspace import SETTLE, Mount, Zspace, eventually


# C24: a full disk


def test_c24_a_full_disk_is_reported_and_nothing_is_torn(small_disk, tmp_path):
    mount = Mount(Zspace(small_disk / "store"), tmp_path / "mnt").start()
    try:
        first, second = tmp_path / "first.bin", tmp_path / "second.bin"
        first.write_bytes(noise(20 << 20, 1))
        second.write_bytes(noise(120 << 20, 2))
        shutil.copy(first, mount.staging())
        assert sha256(mount.wait_for(1) / "first.bin") == sha256(first)
        there, here = os.statvfs(mount.path), os.statvfs(small_disk)
        assert (there.f_blocks * there.f_frsize, there.f_bsize) == (here.f_blocks * here.f_frsize, here.f_bsize)
        with pytest.raises(OSError) as full:
            shutil.copy(second, mount.staging())
        assert full.value.errno == errno.ENOSPC
        line = mount.wait_for_status("second.bin", "waiting")
        assert "No space" in line or "space" in line.lower()
        time.sleep(4 * SETTLE)
        assert mount.versions() == [1]
        refused = mount.zspace.run("commit", second, ok=False)
        assert refused.returncode != 0 and "space" in refused.stderr.lower(), refused.stderr
        assert mount.versions() == [1]
        # With room again, all goes on.
        os.unlink(mount.staging() / "second.bin")
        eventually(lambda: os.statvfs(small_disk).f_bavail * 4096 > 30 << 20, "room again")
        shutil.copy(first, mount.staging() / "third.bin")
        assert sha256(mount.wait_for(2) / "third.bin") == sha256(first)
        mount.zspace.verify()
    finally:
        mount.close()


# C30: large trees


@pytest.mark.timeout(300)
def test_c30_many_files_in_one_directory_and_in_many(mounts, tmp_path):
    mount = mounts()
    source = tmp_path / "tree"
    (source / "flat").mkdir(parents=True)
    for i in range(2_000):
        (source / "flat" / f"{i:06}").write_bytes(b"%d" % i)
    for i in range(100):
        directory = source / "deep" / f"{i:03}"
        directory.mkdir(parents=True)
        for j in range(20):
            (directory / f"{j}").write_bytes(b"%d %d" % (i, j))
    mount.zspace.commit(source)
    version = mount.wait_for(1) / "tree"
    assert len(os.listdir(version / "flat")) == 2_000
    assert snapshot(version) == snapshot(source)
    subprocess.run(["cp", "-a", source, mount.staging() / "again"], check=True)
    assert snapshot(mount.wait_for(2, seconds=60) / "again") == {
        name.replace(b"tree", b"again", 1): found for name, found in snapshot(source).items()
    }


# C38: clocks


@pytest.mark.parametrize("order", [("+2h", "+0", "-1d"), ("-1d", "+2h", "+0")], ids=" ".join)
def test_c38_history_follows_parents_whatever_the_clock_says(mount, tmp_path, order):
    for number, offset in enumerate(order, 1):
        path = tmp_path / "model.bin"
        path.write_bytes(noise(10_000, number))
        subprocess.run(["faketime", "-f", offset, *mount.zspace.command("commit", path)], check=True, capture_output=True)
    mount.wait_for(3)
    for number in (1, 2, 3):
        assert (mount.version(number) / "model.bin").read_bytes() == noise(10_000, number)
    assert os.readlink(mount.path / "versions/main/latest").endswith("000003")
    assert [v["version"] for v in mount.zspace.json_lines("log")] == ["main/000003", "main/000002", "main/000001"]
