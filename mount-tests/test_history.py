"""A directory of versions is the history: order, names, attributes, and that nothing in it can be changed."""
import errno
import os
import re
import subprocess
import time

import pytest

from doors import attribute
from files import sha256


@pytest.fixture
def three(mount, tmp_path):
    """Three versions of one file on main, with their ids."""
    ids = []
    for number in (1, 2, 3):
        source = tmp_path / "notes.txt"
        source.write_text(f"version {number}\n" * number)
        ids += [made[2] for made in mount.zspace.commit(source, "--message", f"the {number}th")]
    mount.wait_for(3)
    return ids


def error(expected, action, *args, **options):
    with pytest.raises(OSError) as caught:
        action(*args, **options)
    assert caught.value.errno == expected, os.strerror(caught.value.errno)


def test_empty_store_has_main(mount):
    assert sorted(os.listdir(mount.path)) == ["arrays", "safetensors", "staging", "tensors", "versions"]
    for door in os.listdir(mount.path):
        assert os.listdir(mount.path / door) == ["main"]
        assert os.listdir(mount.path / door / "main") == []


def test_versions_are_listed_oldest_first(mount, three):
    main = mount.path / "versions/main"
    listing = subprocess.run(["ls", "-U", main], check=True, capture_output=True, text=True).stdout.split()
    assert listing == ["000001", "000002", "000003", "latest"]
    assert os.readlink(main / "latest") == "000003"
    assert (main / "latest/notes.txt").read_text() == "version 3\n" * 3
    now = time.time()
    times = [os.stat(main / n).st_mtime for n in listing[:3]]
    assert times == sorted(times) and now - 60 < times[0] and times[-1] <= now + 1
    assert [os.stat(main / n).st_size for n in listing[:3]] == [10, 20, 30]


def test_latest_follows_new_versions(mount, three, tmp_path):
    latest = mount.path / "versions/main/latest/notes.txt"
    assert latest.read_text().startswith("version 3")
    (tmp_path / "notes.txt").write_text("version 4")
    mount.zspace.commit(tmp_path / "notes.txt")
    mount.wait_for(4)
    assert latest.read_text() == "version 4"


@pytest.mark.parametrize("door", ["versions", "tensors", "arrays", "safetensors"])
def test_names_open_without_being_listed(mount, three, door):
    main = mount.path / door / "main"
    mount.zspace.run("tag", "best", "main/2")
    wanted = os.stat(main / "000002")
    for name in ("best", three[1], three[1][:8], three[1][:13]):
        assert os.path.samestat(os.stat(main / name), wanted), name
        assert os.path.samestat(os.stat(mount.path / door / name), wanted), name
    assert sorted(os.listdir(main)) == ["000001", "000002", "000003", "latest"]
    assert os.listdir(mount.path / door) == ["main"]
    for name in ("worst", three[1][:7], "0" * 8, "000004", "4", "0"):
        assert not os.path.exists(main / name), name


def test_a_moved_tag_is_seen_at_once(mount, three):
    tagged = mount.path / "versions/main/best/notes.txt"
    assert not tagged.exists()
    mount.zspace.run("tag", "best", "main/1")
    assert tagged.read_text() == "version 1\n"
    assert mount.zspace.run("tag", "best", "main/2", ok=False).returncode == 1
    mount.zspace.run("tag", "best", "main/2", "--force")
    assert tagged.read_text() == "version 2\n" * 2


def test_attributes(mount, three):
    version = mount.version(2)
    assert attribute(version, "id") == three[1]
    assert attribute(version, "label") == "the 2th"
    assert attribute(version / "notes.txt", "sha256") == sha256(version / "notes.txt")
    assert attribute(version / "notes.txt", "format") == "opaque"
    assert int(attribute(version / "notes.txt", "stored")) >= 0
    assert "user.zspace.id" in os.listxattr(version)
    error(errno.ENODATA, os.getxattr, version, "user.zspace.nothing")
    error(errno.ENODATA, os.getxattr, version, "user.other")


@pytest.mark.parametrize("door", ["versions", "tensors", "arrays", "safetensors"])
def test_all_but_staging_is_read_only(mount, three, door, series, tmp_path):
    made = mount.zspace.commit(series("shipped")[0])
    mount.wait_for(made[0][1])
    version = mount.version(made[0][1], door=door)
    file = next(p for p in version.rglob("*") if p.is_file())
    before = sha256(file)
    error(errno.EROFS, open, file, "r+b")
    error(errno.EROFS, open, file, "wb")
    error(errno.EROFS, open, file, "ab")
    error(errno.EROFS, open, file.parent / "new", "wb")
    error(errno.EROFS, os.truncate, file, 0)
    error(errno.EROFS, os.unlink, file)
    error(errno.EROFS, os.rename, file, file.with_name("renamed"))
    error(errno.EROFS, os.chmod, file, 0o777)
    error(errno.EROFS, os.utime, file)
    error(errno.EROFS, os.setxattr, file, "user.mine", b"x")
    error(errno.EROFS, os.symlink, "x", file.parent / "link")
    error(errno.EROFS, os.mkdir, version / "directory")
    error(errno.EROFS, os.mkdir, mount.path / door / "branch")
    error(errno.EROFS, os.rmdir, version)
    error(errno.EROFS, os.rmdir, mount.path / door / "main")
    assert sha256(file) == before


def test_the_top_is_fixed(mount):
    for action in (os.rmdir, os.unlink):
        with pytest.raises(OSError):
            action(mount.path / "versions")
    with pytest.raises(OSError):
        os.mkdir(mount.path / "more")
    with pytest.raises(OSError):
        os.rename(mount.path / "staging", mount.path / "stage")


def test_branches_are_made_in_staging(mount, tmp_path):
    os.mkdir(mount.path / "staging/exp7")
    (mount.path / "staging/exp7/a.bin").write_bytes(b"on a branch")
    assert (mount.wait_for(1, "exp7") / "a.bin").read_bytes() == b"on a branch"
    assert mount.versions() == []
    assert sorted(os.listdir(mount.path / "versions")) == ["exp7", "main"]
    assert "exp7" in mount.zspace.out("branch").split()
    error(errno.EPERM, open, mount.path / "staging/loose.pt", "wb")
    error(errno.EPERM, os.rename, mount.path / "staging/exp7", mount.path / "staging/exp8")
    for name in ("-dash", "spa ce", "x" * 129):
        with pytest.raises(OSError):
            os.mkdir(mount.path / "staging" / name)


def test_an_emptied_branch_directory_can_be_removed_without_losing_versions(mount):
    staged = mount.path / "staging/exp7"
    staged.mkdir()
    (staged / "a.bin").write_bytes(b"kept")
    mount.wait_for(1, "exp7")
    (staged / "a.bin").unlink()
    staged.rmdir()
    assert (mount.version(1, "exp7") / "a.bin").read_bytes() == b"kept"


def test_log_and_branches_on_the_command_line(mount, three, tmp_path):
    log = mount.zspace.out("log")
    for number, version_id in enumerate(three, 1):
        assert re.search(rf"main/0*{number}\b", log) and version_id[:8] in log and f"the {number}th" in log
    mount.zspace.run("branch", "fork", "main/2")
    (tmp_path / "forked.txt").write_text("from 2")
    assert mount.zspace.commit(tmp_path / "forked.txt", "--branch", "fork")[0][:2] == ("fork", 1)
    assert (mount.wait_for(1, "fork") / "forked.txt").read_text() == "from 2"


def test_a_fresh_fork_shows_what_it_was_forked_off(mount, three):
    mount.zspace.run("branch", "fork", "main/2")
    assert (mount.path / "versions/fork/latest/notes.txt").read_text() == "version 2\n" * 2
