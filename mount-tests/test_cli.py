"""The command line without a mount."""
import json
import os
import shutil
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from files import noise, sha256, snapshot
from zspace import BINARY, eventually, is_mounted


@pytest.fixture
def run(zspace, series):
    """A store with the shipped series, and its sources."""
    sources = series("shipped")
    for source in sources:
        zspace.commit(source)
    return sources


def test_init_makes_a_store(zspace):
    zspace.run("init")
    assert (zspace.store / "FORMAT").is_file()
    zspace.verify()
    zspace.run("log")


def test_commit_makes_the_store_and_prints_what_it_made(zspace, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.txt").write_text("c")
    made = zspace.commit(tmp_path / "a.txt", tmp_path / "b")
    assert [m[:2] for m in made] == [("main", 1), ("main", 2)]
    assert all(len(m[2]) == 64 for m in made)


def test_the_environment_names_the_store(zspace, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    environment = os.environ | {"ZSPACE_STORE": str(zspace.store)}
    subprocess.run([BINARY, "commit", tmp_path / "a.txt"], env=environment, check=True, capture_output=True)
    assert zspace.out("cat", "main:a.txt") == "a"


def test_cat_and_ranges(zspace, run):
    want = run[1].read_bytes()
    path = f"main/2:{run[1].name}"
    assert zspace.run("cat", path, text=False).stdout == want
    for start, end in ((0, 10), (100_000, 100_023), (len(want) - 5, len(want)), (7, 7)):
        assert zspace.run("cat", path, "--range", f"{start}..{end}", text=False).stdout == want[start:end]


def test_ls_and_tensors(zspace, run):
    assert run[2].name in zspace.out("ls", "main")
    table = zspace.out("tensors", f"main/1:{run[0].name}")
    assert "gpt_neox.embed_in.weight" in table
    listed = zspace.json_lines("tensors", "main/1")
    assert {t["name"] for t in listed} == set(load_file(run[0]))
    assert all(t["dtype"] == "bfloat16" and t["depth"] == 0 for t in listed)
    files = zspace.json_lines("ls", "main/3")
    assert [(f["path"], f["bytes"], f["sha256"]) for f in files] == [(run[2].name, run[2].stat().st_size, sha256(run[2]))]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_export_is_what_went_in(zspace, run, tmp_path, number):
    zspace.run("export", f"main/{number}", tmp_path / "out")
    source = run[number - 1]
    assert snapshot(tmp_path / "out" / source.name) == snapshot(source)


def test_diff_tells_what_changed(zspace, tmp_path):
    base = {"same": torch.ones(1000), "half": torch.zeros(1000), "gone": torch.ones(5)}
    save_file(base, tmp_path / "m.safetensors")
    zspace.commit(tmp_path / "m.safetensors")
    changed = {"same": base["same"], "half": torch.cat([torch.zeros(500), torch.ones(500)]), "new": torch.ones(5)}
    save_file(changed, tmp_path / "m.safetensors")
    zspace.commit(tmp_path / "m.safetensors")
    lines = zspace.out("diff", "main/1", "main/2").splitlines()
    assert any("half" in l and "50" in l for l in lines), lines
    assert any("gone" in l and "removed" in l for l in lines), lines
    assert any("new" in l and "added" in l for l in lines), lines


def test_diff_of_equal_versions_is_short(zspace, run):
    zspace.commit(run[2])
    zspace.commit(run[2])
    lines = zspace.out("diff", "main/4", "main/5").splitlines()
    assert len(lines) == 1 and "the same" in lines[0], lines


def interrupted(zspace, verb, *args, until):
    """Runs a verb and sends it SIGINT once it is under way."""
    process = subprocess.Popen([BINARY, "--store", zspace.store, verb, *args], stderr=subprocess.PIPE, text=True)
    eventually(until, f"{verb} is under way")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    return process.returncode, told


def test_an_interrupted_commit_leaves_nothing(zspace, run, tmp_path):
    large = tmp_path / "large"
    large.write_bytes(noise(400_000_000))
    packs = zspace.store / "packs"
    before = snapshot(packs)
    under_way = lambda: sum(f.stat().st_size for f in packs.iterdir()) > 5_000_000
    code, told = interrupted(zspace, "commit", large, until=under_way)
    assert code == 130 and "nothing was committed" in told
    assert snapshot(packs) == before
    assert zspace.json("stats")["versions"] == len(run)
    # Killed, it can clean up nothing: the next repack does.
    process = subprocess.Popen([BINARY, "--store", zspace.store, "commit", large])
    eventually(under_way, "the commit is under way")
    process.kill()
    process.wait()
    assert zspace.json("stats")["unused"] > 1_000_000
    assert "repack" in zspace.out("stats")
    assert "interrupted" in zspace.out("repack")
    assert zspace.json("stats")["unused"] == 0
    zspace.verify()


def test_an_interrupted_export_leaves_no_torn_file(zspace, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "dir").mkdir(exist_ok=True)
        (tmp_path / "dir" / name).write_bytes(noise(300_000_000, seed=ord(name)))
    zspace.commit(tmp_path / "dir")
    out = tmp_path / "out"
    code, told = interrupted(zspace, "export", "main", out, until=lambda: any(out.glob("dir/.*")))
    assert code == 130, told
    for left in out.rglob("*"):
        assert left.is_dir() or left.read_bytes() == (tmp_path / "dir" / left.name).read_bytes(), left


def test_stats_adds_up(zspace, run):
    stats = zspace.json("stats")
    assert stats["raw"] == sum(p.stat().st_size for p in run)
    assert 0 < stats["stored"] < stats["raw"] / 3
    on_disk = sum(f.stat().st_size for f in zspace.store.rglob("*") if f.is_file())
    assert on_disk < 1.1 * stats["stored"] + 100_000, "the figure is not far below what the store takes"


def test_committing_the_same_again_costs_next_to_nothing(zspace, run):
    before = zspace.stored()
    zspace.commit(run[2])
    assert zspace.stored() - before < 5000


@pytest.mark.parametrize("args", [[], ["nonsense"], ["tag", "latest", "main"], ["tag", "123", "main"], ["branch", "-x"], ["cat"]])
def test_wrong_usage_exits_with_64(zspace, run, args):
    assert zspace.run(*args, ok=False).returncode == 64


@pytest.mark.parametrize(
    "args", [["cat", "main:absent"], ["ls", "main/9"], ["ls", "absent"], ["commit", "/absent"], ["umount", "/nowhere"]]
)
def test_failure_exits_with_1_and_says_why(zspace, run, args):
    done = zspace.run(*args, ok=False)
    assert done.returncode == 1 and done.stderr.strip()
    assert "panicked" not in done.stderr


def test_help_and_version(zspace):
    for verb in "init mount umount status commit log branch tag ls tensors cat export diff verify stats".split():
        assert verb in zspace.out("--help")
        assert zspace.out(verb, "--help")
    assert zspace.out("--version").startswith("zspace ")


def test_shells_complete_and_man_shows(zspace, tmp_path):
    zspace.run("man", tmp_path / "man1")
    pages = {page.name for page in (tmp_path / "man1").iterdir()}
    assert {"zspace.1", "zspace-commit.1", "zspace-object-prove.1"} <= pages, pages
    if shutil.which("man"):
        page = subprocess.run(["man", "-l", tmp_path / "man1/zspace-commit.1"], capture_output=True, text=True)
        assert "--branch" in page.stdout
    (tmp_path / "zspace.bash").write_text(zspace.out("completions", "bash"))
    complete = f"source {tmp_path}/zspace.bash; COMP_WORDS=(zspace commi); COMP_CWORD=1; _zspace zspace commi zspace; echo ${{COMPREPLY[@]}}"
    assert subprocess.run(["bash", "-c", complete], capture_output=True, text=True).stdout.split() == ["commit"]
    for shell in ("zsh", "fish"):
        assert "commit" in zspace.out("completions", shell)
    assert zspace.run("completions", "cmd", ok=False).returncode == 64
    assert zspace.run("man", "/proc/nothing", ok=False).returncode == 1


def test_damage_is_found_and_named(zspace, run):
    zspace.verify()
    pack = max((f for f in (zspace.store / "packs").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    done = zspace.run("verify", ok=False)
    assert done.returncode == 3
    assert "step-0000" in done.stdout + done.stderr
    # Only what depends on the damaged bytes is lost, and it is an error, never wrong bytes.
    for number, source in enumerate(run, 1):
        got = zspace.run("cat", f"main/{number}:{source.name}", ok=False, text=False)
        assert got.returncode != 0 or got.stdout == source.read_bytes()


@pytest.mark.parametrize("which", ["00000001", "00000001.copy"])
def test_a_torn_journal_tail_is_forgotten(zspace, run, which):
    """What a crash can leave behind the last durable record does not count."""
    with open(zspace.store / "journal" / which, "ab") as tail:
        tail.write(b"\x07" * 11)
    for number, source in enumerate(run, 1):
        assert zspace.run("cat", f"main/{number}:{source.name}", text=False).stdout == source.read_bytes()
    assert zspace.commit(run[0])[0][1] == 4
    zspace.verify()


def test_the_index_is_rebuilt_from_the_packs(zspace, run):
    index = zspace.store / "index"
    for file in [f for f in index.rglob("*") if f.is_file()]:
        file.unlink()
    zspace.verify()
    assert zspace.run("cat", f"main/3:{run[2].name}", text=False).stdout == run[2].read_bytes()


def test_daemon_returns_when_the_mount_is_usable(zspace, run, tmp_path):
    mnt = tmp_path / "mnt"
    mnt.mkdir()
    try:
        zspace.run("mount", mnt, "--daemon", "--settle", "0.3", timeout=30, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, capture_output=False)  # fmt: skip
        assert sha256(mnt / "versions/main/latest" / run[2].name) == sha256(run[2])
        zspace.run("umount", mnt)
        eventually(lambda: not is_mounted(mnt), "unmounted")
    finally:
        if is_mounted(mnt):
            subprocess.run(["umount", "-l", mnt], check=True)


def test_a_mount_inside_its_own_store_is_refused(zspace):
    zspace.run("init")
    inside = zspace.store / "mnt"
    inside.mkdir()
    done = zspace.run("mount", inside, ok=False, timeout=20)
    assert done.returncode != 0 and done.stderr.strip()
    assert not is_mounted(inside)


def test_umount_of_a_busy_mount_says_who_holds_it(mount, zspace, run):
    with open(mount.wait_for(1) / run[0].name, "rb"):
        done = zspace.run("umount", mount.path, ok=False)
        assert done.returncode == 1
        assert str(os.getpid()) in done.stderr
    mount.stop()


def test_status_as_json(mount, zspace):
    with open(mount.staging() / "half.bin", "wb") as half:
        half.write(b"x")
        half.flush()
        text = json.dumps(zspace.json("status", mount.path))
    assert "half.bin" in text and "writing" in text
