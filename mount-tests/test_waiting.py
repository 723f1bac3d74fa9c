"""Who uses the mount never hangs: not when its process dies, and not behind what takes long."""
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from files import noise
from zspace import is_mounted, mounts_below, python

MIB = 1 << 20


# ---- the process behind a mount dies -------------------------------------------------------------------------------

USERS = {
    "reads": """
fd = os.open(sys.argv[1], os.O_RDONLY)
print("go")
while True:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.pread(fd, 1 << 20, 0)""",
    "reads directly": """
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
block = mmap.mmap(-1, 1 << 20)
print("go")
while True:
    os.preadv(fd, [block], 0)""",
    "maps": """
fd = os.open(sys.argv[1], os.O_RDONLY)
print("go")
while True:
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        mapped[:: 4096]
        mapped.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)""",
    "writes": """
fd = os.open(sys.argv[2] + "/w.bin", os.O_RDWR | os.O_CREAT)
print("go")
while True:
    os.pwrite(fd, bytes(1 << 20), 0)""",
    "writes by a mapping": """
fd = os.open(sys.argv[2] + "/m.bin", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
print("go")
while True:
    with mmap.mmap(fd, 1 << 20) as mapped:
        mapped[:] = bytes([1]) * (1 << 20)
        mapped.flush()""",
    "syncs": """
fd = os.open(sys.argv[2] + "/s.bin", os.O_RDWR | os.O_CREAT)
print("go")
while True:
    os.pwrite(fd, b"x", 0)
    os.fsync(fd)""",
    "opens and closes": """
print("go")
while True:
    with open(sys.argv[2] + "/c.bin", "wb") as file:
        file.write(b"x")""",
    "lists": """
print("go")
while True:
    os.listdir(sys.argv[2]), os.stat(sys.argv[2] + "/..").st_size, os.listdir(sys.argv[2] + "/../../versions/main")""",
}


@pytest.mark.parametrize("through", [True, False], ids=["by itself", "asked"])
def test_kill_9_of_a_mount_gives_errors_and_hangs_nobody(mounts, zspace, tmp_path, through):
    mount = mounts() if through else mounts(**{"no-passthrough": True})
    big = tmp_path / "big.bin"
    big.write_bytes(noise(32 * MIB))
    zspace.commit(big)
    file = mount.wait_for(1) / "big.bin"
    users = {
        how: python(f"import mmap, os, sys\n{code}", file, mount.staging())
        for how, code in USERS.items()
    }  # fmt: skip
    try:
        for how, user in users.items():
            assert user.stdout.readline() == "go\n", (how, user.stderr.read())
        time.sleep(1)
        for how, user in users.items():
            assert user.poll() is None, (how, user.stderr.read())
        mount.kill()
        for how, user in users.items():
            if through and how in ("writes", "writes by a mapping"):
                # The kernel goes on with the file by itself.
                time.sleep(0.2)
                assert user.poll() is None, (how, user.stderr.read())
                continue
            try:
                code = user.wait(timeout=10)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"who {how} hangs") from None
            said = user.stderr.read()
            if code == -signal.SIGBUS and "map" in how:
                continue
            # Not connected, aborted, or I/O error; a new mapping is EINVAL.
            errors = (107, 103, 5, 22) if "map" in how else (107, 103, 5)
            assert code == 1 and any(f"Errno {e}]" in said for e in errors), (how, code, said)
    finally:
        for user in users.values():
            user.kill()
            user.wait()
    with pytest.raises(OSError, match="Errno 107"):
        os.statvfs(mount.path)
    mount.start()
    assert (mount.version(1) / "big.bin").read_bytes() == big.read_bytes()
    assert (mount.staging() / "s.bin").read_bytes() == b"x"
    assert len([line for line in mounts_below(tmp_path) if line == str(mount.path)]) == 1


def test_umount_clears_a_dead_mount(mount, zspace):
    mount.kill()
    assert "had ended" in zspace.out("umount", mount.path)
    assert not is_mounted(mount.path)


# ---- what takes long ----------------------------------------------------------------------------------------------


# Bytes of an entry that takes a while to bring back.
SLOW = 512 * MIB


@pytest.fixture
def mount(request, mounts):
    """With next to no memory where bringing something back is to take long."""
    return mounts(memory="1M") if "slow" in request.fixturenames else mounts()


@pytest.fixture
def slow(mount, zspace, tmp_path):
    """A committed entry that takes a while to bring back to disk, as any change of it does."""
    with open(tmp_path / "slow.bin", "wb") as file:
        for _ in range(SLOW // (32 * MIB)):
            file.write(noise(32 * MIB))
    shutil.copy(tmp_path / "slow.bin", mount.staging() / "slow.bin")
    zspace.commit(mount.staging() / "slow.bin")
    (mount.path / "staging/other").mkdir()
    # On a busy machine, who is to be interrupted must not be slower than the mount.
    for thread in os.listdir(f"/proc/{mount.process.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 19)
    # It lies whole in the cache, from where it would be back at once.
    for file in (zspace.store / "cache").iterdir():
        file.unlink() if file.name != "lock" else None
    return mount.staging() / "slow.bin"


def test_renaming_a_committed_entry_keeps_nobody_else_waiting(mount, slow):
    begin = time.monotonic()
    renaming = python("import os, sys\nprint('go')\nos.rename(sys.argv[1], sys.argv[1] + '2')", slow)
    renaming.stdout.readline()
    time.sleep(0.05)
    # Names that the kernel has not seen yet, more of them at once than there are threads for names.
    looks = [subprocess.Popen(["stat", mount.path / f"staging/other/{i}"], stderr=subprocess.DEVNULL) for i in range(6)]
    assert (mount.version(1) / "slow.bin").stat().st_size == SLOW
    for look in looks:
        look.wait(timeout=30)
    looked = time.monotonic() - begin
    assert renaming.poll() is None, "the rename was done before the looks: it did not take long"
    assert renaming.wait(timeout=60) == 0
    assert looked < (time.monotonic() - begin) / 2
    assert not slow.exists() and slow.with_name("slow.bin2").stat().st_size == SLOW


# What runs in the background ignores Ctrl-C.
INTERRUPTIBLE = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
CHANGES = {
    "open": "os.open(sys.argv[1], os.O_RDWR)",
    "truncate": "os.truncate(sys.argv[1], 100)",
    "chmod": "os.chmod(sys.argv[1], 0o600)",
    "rename": "os.rename(sys.argv[1], sys.argv[1] + '2')",
    "setxattr": "os.setxattr(sys.argv[1], 'user.note', b'1')",
}


@pytest.mark.parametrize("what, how", [*((w, signal.SIGKILL) for w in CHANGES), ("open", signal.SIGINT)])
def test_who_waits_for_an_entry_to_come_back_can_be_ended(mount, zspace, slow, what, how):
    changing = python(f"{INTERRUPTIBLE}\nimport os, sys\nprint('go')\n{CHANGES[what]}", slow)
    changing.stdout.readline()
    time.sleep(0.05)
    sent = time.monotonic()
    changing.send_signal(how)
    code = changing.wait(timeout=30)
    ended = time.monotonic() - sent
    assert code != 0 and (code == -how or "KeyboardInterrupt" in changing.stderr.read())
    # The entry is still being brought back: the next change waits for that.
    path = slow if slow.exists() else slow.with_name("slow.bin2")
    os.utime(path)
    assert ended < 0.5 * (time.monotonic() - sent), "it did not take long"
    # Nobody holds it any more: it settles.
    assert mount.exactly(2)
    mount.stop()


def test_who_is_replaced_by_another_program_may_have_files_open(mount):
    """execve(2) closes them, and until that is answered whoever asks /proc of the process waits: so we must not."""
    code = "import os, sys\nos.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), b'x')\nos.execv('/bin/true', ['true'])"
    replaced = subprocess.Popen([sys.executable, "-c", code, mount.staging() / "x"])
    try:
        assert replaced.wait(20) == 0
    finally:
        if replaced.poll() is None:  # nobody could look at it, or end, before the mount is gone
            mount.kill()
            replaced.wait()
    assert (mount.wait_for(1) / "x").read_bytes() == b"x"
