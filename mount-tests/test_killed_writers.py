"""Whatever writes into staging, killed at any moment: nothing torn is committed unasked, and what is left can be removed."""
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainers as t
from files import noise
from zspace import SETTLE_DIR, eventually

# How often each writer is killed, each time in a branch of its own.
ROUNDS = 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Three checkpoint directories, and an archive of them. Their files are no checkpoints by their structure, so that it
    cannot tell that they are torn."""
    top = tmp_path_factory.mktemp("sources")
    for step in (1, 2, 3):
        for part in range(4):
            path = top / f"checkpoint-{step}" / ("logs" if part == 3 else "") / f"part-{part}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(noise(2 * MIB, 10 * step + part))
    subprocess.run(["tar", "-C", top, "-cf", top / "all.tar", *(f"checkpoint-{n}" for n in (1, 2, 3))], check=True)
    yield top
    shutil.rmtree(top)


def checkpoints(top):
    return sorted(top.glob("checkpoint-*"))


# What is copied, where to. "over" writes over older files of these names.
WRITERS = {
    "cp": lambda top, to: ["cp", *checkpoints(top)[0].glob("*.bin"), to],
    "cp over": lambda top, to: ["cp", *checkpoints(top)[0].glob("*.bin"), to],
    "cp -a": lambda top, to: ["cp", "-a", checkpoints(top)[0], to],
    "cp -r of many": lambda top, to: ["cp", "-r", *checkpoints(top), to],
    "mv": lambda top, to: ["mv", *checkpoints(top), to],
    "rsync": lambda top, to: ["rsync", "-a", *checkpoints(top), to],
    "rsync --inplace over": lambda top, to: ["rsync", "--inplace", *checkpoints(top)[0].glob("*.bin"), to],
    "rsync --partial": lambda top, to: ["rsync", "-a", "--partial", *checkpoints(top), to],
    "rsync --append-verify": lambda top, to: ["rsync", "-a", "--append-verify", *checkpoints(top), to],
    "tar x": lambda top, to: ["tar", "-C", to, "-xf", top / "all.tar"],
}


def size(path):
    """Bytes of all files below, as far as they can be seen while they come and go."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                pass
    return total


def files(top):
    return {p.relative_to(top): p.read_bytes() for p in top.rglob("*") if p.is_file()}


def lines(mount, branch):
    return [line for line in mount.status().splitlines() if line.startswith(f"{branch}/")]


@pytest.mark.parametrize("how", WRITERS)
def test_killed_at_any_moment(mount, sources, tmp_path, how):
    moment = random.Random(how)
    old = {}
    branches = [f"round-{n}" for n in range(ROUNDS)]
    for branch in branches:
        mount.staging(branch).mkdir()
        if how.endswith("over"):
            for path in checkpoints(sources)[0].glob("*.bin"):
                old[path.relative_to(path.parent)] = noise(2 * MIB, 99)
                (mount.staging(branch) / path.name).write_bytes(noise(2 * MIB, 99))
    if old:
        mount.settled(branches)
    before = {branch: mount.versions(branch) for branch in branches}
    for branch in branches:
        top = sources
        if how == "mv":
            top = tmp_path / branch
            shutil.copytree(sources, top)
        to = mount.staging(branch)
        start = size(to) if not how.endswith("over") else None
        writer = subprocess.Popen(WRITERS[how](top, to), start_new_session=True, stderr=subprocess.DEVNULL)
        while writer.poll() is None and size(to) == start:
            pass
        time.sleep(moment.uniform(0, 0.03))
        os.killpg(writer.pid, signal.SIGKILL) if writer.poll() is None else None
        writer.wait()
    mount.settled(branches)
    want = files(sources) | {p.relative_to(p.parent): p.read_bytes() for p in checkpoints(sources)[0].glob("*.bin")}
    for branch in branches:
        for number in mount.versions(branch):
            for name, data in files(mount.version(number, branch)).items():
                assert data in (want.get(name), old.get(name)), (branch, number, str(name), len(data))
            for entry in filter(Path.is_dir, mount.version(number, branch).iterdir()):
                assert files(entry).keys() == files(sources / entry.name).keys(), (branch, number)
        # What is not whole waits, and says so.
        for name, data in files(mount.staging(branch)).items():
            entry = name.parts[0]
            if data != want.get(name) and data != old.get(name):
                state = [l for l in lines(mount, branch) if l.split()[0] == f"{branch}/{entry}"]
                assert len(state) == 1 and "committed" not in state[0], (name, mount.status())
        for path in mount.staging(branch).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert lines(mount, branch) == []
        assert set(before[branch]) <= set(mount.versions(branch))


def test_tar_killed_half_way(mount, sources):
    """At a moment that is known: within the third file of the second directory."""
    archive = (sources / "all.tar").read_bytes()
    tar = subprocess.Popen(["tar", "-C", mount.staging(), "-xf", "-"], stdin=subprocess.PIPE)
    tar.stdin.write(archive[: 13 * MIB])
    tar.stdin.flush()
    second = mount.staging() / "checkpoint-2"
    eventually(lambda: second.is_dir() and size(second) > 4 * MIB, "tar is at the second directory")
    tar.kill()
    tar.wait()
    tar.stdin.close()
    assert "was killed" in mount.wait_for_status("main/checkpoint-2", "waiting")
    mount.settled(["main"])
    # Its writer had no time to leave the first directory alone for long enough: that waits, too, unless it was slow.
    assert [os.listdir(mount.version(n)) for n in mount.versions()] in ([], [["checkpoint-1"]])
    subprocess.run(["tar", "-C", mount.staging(), "-xf", sources / "all.tar"], check=True)
    mount.settled(["main"])
    want, have = files(sources), {}
    del want[(sources / "all.tar").relative_to(sources)]
    for number in mount.versions():
        held = files(mount.version(number))
        assert held.items() <= want.items(), os.listdir(mount.version(number))
        have |= held
    assert have.keys() == want.keys(), mount.status()


def test_killed_while_it_makes_a_file(mount):
    """The kernel gives up an open(2) half way if its process is killed: the file is there, empty, and nobody ever had it open."""
    moment = random.Random(2)
    branch = mount.staging("many")
    branch.mkdir()
    for number in range(40):
        directory = branch / f"d{number}"
        directory.mkdir()
        child = os.fork()
        if child == 0:
            for n in range(100_000):
                file = os.open(directory / f"f{n}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                os.write(file, bytes(5000))
                os.close(file)
            os._exit(0)
        time.sleep(moment.uniform(0.01, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    mount.settled(["many"])
    for number in mount.versions("many"):
        torn = [str(p) for p in mount.version(number, "many").rglob("*") if p.is_file() and p.stat().st_size != 5000]
        assert torn == []


@pytest.mark.parametrize("library", ["torch.save", "save_file"])
def test_a_library_killed_while_it_saves_over_an_old_file(mount, trainers, library):
    """What was there before is a version; what is torn waits, and a whole file takes its place."""
    name = "model.pt" if library == "torch.save" else "model.safetensors"
    staged = mount.staging() / name
    trainers.run(t.save_large, library, staged, 1)
    first = (mount.wait_for(1) / name).read_bytes()
    before = staged.stat().st_mtime_ns
    process = trainers.start(t.save_large, library, staged, 2)
    temporary = lambda: [p for p in mount.staging().iterdir() if p.name != name]
    eventually(lambda: temporary() or staged.stat().st_mtime_ns != before, "the file is being written")
    process.kill()
    process.join()
    mount.settled(["main"])
    for number in mount.versions():
        assert len((mount.version(number) / name).read_bytes()) == len(first)
    assert (mount.version(1) / name).read_bytes() == first
    waiting = [line for line in lines(mount, "main") if "committed" not in line]
    if len(mount.versions()) == 1:
        assert len(waiting) == 1, mount.status()
    for path in temporary():
        path.unlink()
    number = max(mount.versions()) + 1
    trainers.run(t.save_large, library, staged, 3)
    assert (mount.wait_for(number) / name).read_bytes() not in (b"", first)
    assert all("committed" in line for line in lines(mount, "main"))


def python(script, *args):
    return subprocess.Popen([sys.executable, "-c", script, *map(str, args)])


WRITE = "import os, sys, time, shutil\nd = sys.argv[1]; os.makedirs(d)\nfor n in 'ab': open(d + '/' + n, 'wb').write(n.encode() * 5000)\n"


def killed_between_two_files(directory):
    """The process that wrote what is there."""
    writer = python(WRITE + "time.sleep(100)", directory)
    eventually(lambda: (directory / "b").is_file() and (directory / "b").stat().st_size == 5000, "both files")
    writer.kill()
    writer.wait()
    return writer


def test_a_directory_whose_writer_is_killed_between_two_files_waits(mount):
    directory = mount.staging() / "checkpoint-1"
    writer = killed_between_two_files(directory)
    line = mount.wait_for_status("checkpoint-1", "waiting")
    assert "was killed" in line and str(writer.pid) in line
    time.sleep(3 * SETTLE_DIR)
    assert mount.versions() == []
    mount.zspace.commit(directory)
    assert mount.versions() == [1]


def test_what_a_killed_writer_left_waits_until_others_have_done_all_of_it_over(mount):
    directory = mount.staging() / "checkpoint-1"
    killed_between_two_files(directory)
    mount.wait_for_status("checkpoint-1", "waiting")
    (directory / "a").write_bytes(b"c")
    (directory / "more").write_bytes(b"c")
    os.rename(directory, mount.staging() / "renamed")
    time.sleep(3 * SETTLE_DIR)
    assert "was killed" in mount.wait_for_status("renamed", "waiting")
    assert mount.versions() == []
    (mount.staging() / "renamed/b").unlink()
    assert sorted(os.listdir(mount.wait_for(1) / "renamed")) == ["a", "more"]


def test_a_writer_that_is_killed_after_its_directory_has_settled_does_not_count(mount):
    writer = python(WRITE + "time.sleep(100)", mount.staging() / "checkpoint-1")
    mount.wait_for(1)
    writer.kill()
    writer.wait()
    assert "waiting" not in mount.status()


def test_a_checkpoint_that_its_trainer_removes_before_it_settles_is_a_version(mounts):
    mount = mounts(**{"settle-dir": 5})
    rotating = "time.sleep(1.5)\nshutil.rmtree(d)\n"
    assert python(WRITE + rotating, mount.staging() / "checkpoint-1").wait() == 0
    assert not (mount.staging() / "checkpoint-1").exists()
    version = mount.wait_for(1)
    assert [(version / "checkpoint-1" / n).read_bytes() for n in "ab"] == [b"a" * 5000, b"b" * 5000]
    assert os.listdir(mount.zspace.store / "staging/rotated") == []


GONE = {"removed": "os.remove(file)", "moved away": "os.rename(file, file[:-14] + '.a.tmp')"}


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("how", GONE)
def test_who_is_killed_while_he_removes_a_checkpoint_leaves_no_version_of_the_half(mount, committed, how):
    directory = mount.staging() / "checkpoint-1"
    assert python(WRITE, directory).wait() == 0
    mount.wait_for(1) if committed else None
    remover = python(f"import os, sys, time\nfile = sys.argv[1]\n{GONE[how]}\ntime.sleep(100)", directory / "a")
    eventually(lambda: not (directory / "a").exists(), "one of two files is gone")
    remover.kill()
    remover.wait()
    assert "was killed" in mount.wait_for_status("main/checkpoint-1", "waiting")
    time.sleep(3 * SETTLE_DIR)
    held = [sorted(os.listdir(mount.version(n) / "checkpoint-1")) for n in mount.versions()]
    assert held == [["a", "b"]] * committed
    shutil.rmtree(directory)
    assert "checkpoint-1" not in mount.status()


MAPPED = """import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 1 << 20)
at = libc.mmap(None, 1 << 20, 3, 1, file, 0)
os.close(file)
for n in range(256):
    ctypes.memset(at + n * 4096, 65, 4096)
    time.sleep(float(sys.argv[2]) / 256)
"""


@pytest.mark.parametrize("seconds", [0.4, 4], ids=["soon", "long"])
@pytest.mark.parametrize("options", [{}, {"no-passthrough": True}], ids=["by itself", "asked"])
def test_a_writer_killed_while_it_writes_through_a_mapping_leaves_no_version(mounts, options, seconds):
    mount = mounts(**options)
    (mount.staging() / "dir").mkdir()
    paths = [mount.staging() / "loose.bin", mount.staging() / "dir/file.bin"]
    writers = [python(MAPPED, path, 2 * seconds) for path in paths]
    eventually(lambda: all(p.exists() for p in paths), "both files")
    time.sleep(seconds)
    assert all(writer.poll() is None for writer in writers)
    for writer in writers:
        writer.kill()
        writer.wait()
    for name in ("loose.bin", "dir"):
        mount.wait_for_status(f"main/{name}", "waiting", "was killed")
    assert mount.versions() == []


def test_a_file_that_is_mapped_is_said_to_be_and_keeps_nobody_from_unmounting(mount):
    path = mount.staging() / "loose.bin"
    writer = python(MAPPED, path, 100)
    assert "still mapped" in mount.wait_for_status("main/loose.bin", "waiting")
    started = time.monotonic()
    mount.zspace.run("umount", mount.path, ok=False, timeout=15)
    assert time.monotonic() - started < 12
    writer.kill()
    writer.wait()


@pytest.mark.parametrize("how", ["its writer", "rsync"])
def test_a_directory_whose_writer_ended_with_an_error_waits(mount, sources, how):
    if how == "rsync":
        writer = subprocess.Popen(["rsync", "-a", "--bwlimit=8m", *checkpoints(sources), mount.staging()])
        eventually(lambda: size(mount.staging()) > 3 * MIB, "rsync is at it")
        writer.terminate()
        assert writer.wait() == 20
        name = "checkpoint-1"
    else:
        assert python(WRITE + "sys.exit(3)", mount.staging() / "failed").wait() == 3
        name = "failed"
    line = mount.wait_for_status(f"main/{name}", "waiting")
    assert "ended with an error (exit status" in line or "was killed" in line
    time.sleep(2 * SETTLE_DIR)
    assert mount.versions() == []


def test_what_somebody_else_removes_before_it_settles_is_gone(mounts):
    mount = mounts(**{"settle-dir": 4})
    directory = mount.staging() / "checkpoint-1"
    assert python(WRITE, directory).wait() == 0
    time.sleep(1.5)
    shutil.rmtree(directory)
    time.sleep(4)
    assert mount.versions() == []


def test_a_checkpoint_of_which_only_a_part_is_removed_settles_without_it(mounts):
    mount = mounts(**{"settle-dir": 3})
    assert python(WRITE + "time.sleep(1.5)\nos.remove(d + '/a')\n", mount.staging() / "checkpoint-1").wait() == 0
    assert os.listdir(mount.exactly(1) / "checkpoint-1") == ["b"]
    assert os.listdir(mount.zspace.store / "staging/rotated") == []
