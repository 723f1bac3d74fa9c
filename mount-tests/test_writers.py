"""Whatever program writes a checkpoint into staging, it is committed by itself, once, and whole."""
import json
import os
import shutil
import subprocess
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from files import snapshot
from zspace import SETTLE, SETTLE_DIR


def state(seed=0, size=64):
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.weight": torch.randn(size, size, generator=generator) for i in range(4)}


@pytest.fixture
def file(tmp_path):
    """A checkpoint file outside the mount."""
    path = tmp_path / "source/model.safetensors"
    path.parent.mkdir()
    save_file(state(), path)
    path.chmod(0o640)
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    return path


@pytest.fixture
def directory(tmp_path):
    """A checkpoint directory outside the mount: files, a subdirectory, links, odd modes, an attribute."""
    path = tmp_path / "source-dir/checkpoint-5"
    (path / "logs/empty").mkdir(parents=True)
    save_file(state(), path / "model.safetensors")
    torch.save({"step": 5, "state": state(1)}, path / "optimizer.pt")
    (path / "config.json").write_text("{}")
    (path / "logs/run.txt").write_text("loss 1.0\n")
    (path / "logs/run.txt").chmod(0o600)
    (path / "latest.pt").symlink_to("optimizer.pt")
    os.link(path / "config.json", path / "config-copy.json")
    os.setxattr(path / "config.json", "user.origin", b"test")
    os.utime(path / "model.safetensors", ns=(1_500_000_000_000_000_001, 1_500_000_000_000_000_001))
    return path


def sh(*command, **options):
    subprocess.run([str(c) for c in command], check=True, **options)


# Programs that copy one file ...

FILE_WRITERS = {
    "cp": lambda source, staging: sh("cp", source, staging),
    "cp -p": lambda source, staging: sh("cp", "-p", source, staging),
    "mv": lambda source, staging: sh("mv", source, staging),
    "rsync": lambda source, staging: sh("rsync", "-a", source, staging),
    "rsync --inplace": lambda source, staging: sh("rsync", "-a", "--inplace", source, staging),
    "install": lambda source, staging: sh("install", "-m", "600", source, staging),
    "dd": lambda source, staging: sh("dd", f"if={source}", f"of={staging / source.name}", "bs=7k", "status=none"),
    "shell": lambda source, staging: sh("sh", "-c", 'cat "$0" > "$1"', source, staging / source.name),
    "shutil.copy2": lambda source, staging: shutil.copy2(source, staging),
    "temp then rename": lambda source, staging: (
        shutil.copy(source, staging / "model.tmp"),
        time.sleep(2 * SETTLE),
        os.rename(staging / "model.tmp", staging / source.name),
    ),
    "dot temp then rename": lambda source, staging: (
        shutil.copy(source, staging / f".{source.name}.a1b2"),
        time.sleep(2 * SETTLE),
        os.rename(staging / f".{source.name}.a1b2", staging / source.name),
    ),
}


@pytest.mark.parametrize("how", FILE_WRITERS)
def test_file_writer(mount, file, how):
    data = file.read_bytes()
    want = snapshot(file)
    FILE_WRITERS[how](file, mount.staging())
    version = mount.exactly(1)
    assert os.listdir(version) == [file.name]
    assert (version / file.name).read_bytes() == data
    if how in ("cp -p", "mv", "rsync", "rsync --inplace", "shutil.copy2"):
        assert snapshot(version / file.name) == want


# ... and a directory.

DIRECTORY_WRITERS = {
    "cp -r": lambda source, staging: sh("cp", "-r", source, staging),
    "cp -a": lambda source, staging: sh("cp", "-a", source, staging),
    "mv": lambda source, staging: sh("mv", source, staging),
    "rsync": lambda source, staging: sh("rsync", "-aHX", source, staging),
    "tar x": lambda source, staging: sh(
        "sh", "-c", 'tar -C "$0" --xattrs -cf - "$2" | tar --xattrs -C "$1" -xf -', source.parent, staging, source.name
    ),
    "copytree": lambda source, staging: shutil.copytree(source, staging / source.name, symlinks=True),
    "temp then rename": lambda source, staging: (
        sh("cp", "-a", source, staging / "tmp-checkpoint"),
        time.sleep(2 * SETTLE_DIR),
        os.rename(staging / "tmp-checkpoint", staging / source.name),
    ),
}


@pytest.mark.parametrize("how", DIRECTORY_WRITERS)
def test_directory_writer(mount, directory, how):
    exact = how in ("cp -a", "mv", "rsync", "tar x", "temp then rename")
    want = snapshot(directory, times=exact)
    DIRECTORY_WRITERS[how](directory, mount.staging())
    version = mount.exactly(1)
    assert os.listdir(version) == [directory.name]
    got = snapshot(version / directory.name, times=exact)
    if how == "cp -r":  # follows the umask
        got, want = ({name: what[-1] for name, what in tree.items()} for tree in (got, want))
    assert got == want
    if exact:
        assert os.stat(version / directory.name / "config.json").st_nlink == 2
        assert os.getxattr(version / directory.name / "config.json", "user.origin") == b"test"


def test_renamed_directory_settles_at_once(mounts, directory):
    mount = mounts(**{"settle-dir": 600})
    sh("cp", "-r", directory, mount.staging() / "checkpoint-5.tmp")
    time.sleep(1)
    assert mount.versions() == []
    os.rename(mount.staging() / "checkpoint-5.tmp", mount.staging() / "checkpoint-5")
    mount.wait_for(1, seconds=10)


# Libraries that save by themselves.


def test_torch_save(mount):
    torch.save(state(), mount.staging() / "model.pt")
    version = mount.exactly(1)
    back = torch.load(version / "model.pt", weights_only=True)
    assert all(torch.equal(back[k], v) for k, v in state().items())


def test_torch_save_in_the_legacy_format(mount):
    torch.save(state(), mount.staging() / "model.pt", _use_new_zipfile_serialization=False)
    back = torch.load(mount.exactly(1) / "model.pt", weights_only=True)
    assert all(torch.equal(back[k], v) for k, v in state().items())


def test_save_file(mount):
    save_file(state(), mount.staging() / "model.safetensors")
    version = mount.exactly(1)
    assert os.listdir(version) == ["model.safetensors"]


def test_np_save(mount):
    array = np.arange(100_000, dtype=np.float32).reshape(100, 1000)
    np.save(mount.staging() / "array.npy", array)
    assert np.array_equal(np.load(mount.exactly(1) / "array.npy", mmap_mode="r"), array)


def test_np_savez(mount):
    arrays = {"a": np.arange(30_000), "b": np.eye(50)}
    np.savez(mount.staging() / "arrays.npz", **arrays)
    back = np.load(mount.exactly(1) / "arrays.npz")
    assert all(np.array_equal(back[k], v) for k, v in arrays.items())


def small_model():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=256
    )
    return GPTNeoXForCausalLM(config)


def loads_again(path, model):
    from transformers import GPTNeoXForCausalLM

    back = GPTNeoXForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(back[k], v) for k, v in model.state_dict().items())


def test_save_pretrained(mount):
    model = small_model()
    model.save_pretrained(mount.staging() / "checkpoint-1", max_shard_size="200KB")
    version = mount.exactly(1)
    assert (version / "checkpoint-1/model.safetensors.index.json").is_file()
    loads_again(version / "checkpoint-1", model)


def test_save_pretrained_into_the_branch_itself(mount):
    """Loose shards, their index and config are one version."""
    model = small_model()
    model.save_pretrained(mount.staging(), max_shard_size="200KB")
    version = mount.exactly(1)
    assert "config.json" in os.listdir(version)
    loads_again(version, model)


def test_distributed_checkpoint(mount):
    """DCP writes `.metadata`, a dotfile that is content."""
    import torch.distributed.checkpoint as dcp

    want = state()
    dcp.save(want, checkpoint_id=mount.staging() / "dcp", no_dist=True)
    version = mount.exactly(1)
    assert ".metadata" in os.listdir(version / "dcp")
    back = {k: torch.zeros_like(v) for k, v in want.items()}
    dcp.load(back, checkpoint_id=version / "dcp", no_dist=True)
    assert all(torch.equal(back[k], v) for k, v in want.items())


# What settling means.


def test_an_open_file_is_not_settled(mount, file):
    data = file.read_bytes()
    with open(mount.staging() / "slow.safetensors", "wb", buffering=0) as slow:
        for at in range(0, len(data), len(data) // 4 + 1):
            slow.write(data[at : at + len(data) // 4 + 1])
            time.sleep(2 * SETTLE)
        assert mount.versions() == []
        assert "slow.safetensors" in mount.status()
    assert (mount.exactly(1) / "slow.safetensors").read_bytes() == data


def test_several_files_are_versions_in_order_of_closing(mount, tmp_path):
    for step in (30, 10, 20):
        save_file(state(step), tmp_path / f"step-{step}.safetensors")
        sh("cp", tmp_path / f"step-{step}.safetensors", mount.staging())
    mount.exactly(3)
    names = [os.listdir(mount.version(n))[0] for n in (1, 2, 3)]
    assert names == ["step-30.safetensors", "step-10.safetensors", "step-20.safetensors"]


def test_small_files_beside_a_checkpoint_go_with_it(mount, tmp_path):
    save_file(state(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("# A model\n")
    sh("cp", *(tmp_path / n for n in ("config.json", "model.safetensors", "README.md")), mount.staging())
    assert sorted(os.listdir(mount.exactly(1))) == ["README.md", "config.json", "model.safetensors"]


def test_overwriting_makes_the_next_version(mount, file):
    staged = mount.staging() / file.name
    for number in (1, 2, 3):
        save_file(state(number), file)
        sh("cp", file, staged)
        assert (mount.wait_for(number) / file.name).read_bytes() == file.read_bytes()
    mount.exactly(3)


def test_patching_eight_bytes_makes_the_next_version(mount, file):
    sh("cp", file, mount.staging())
    mount.wait_for(1)
    with open(mount.staging() / file.name, "r+b") as patch:
        patch.seek(5000)
        patch.write(b"ABCDEFGH")
    version = mount.exactly(2)
    want = bytearray(file.read_bytes())
    want[5000:5008] = b"ABCDEFGH"
    assert (version / file.name).read_bytes() == want
    assert (mount.version(1) / file.name).read_bytes() == file.read_bytes()


def test_changing_a_committed_directory_makes_the_next_version(mount, directory):
    sh("cp", "-a", directory, mount.staging())
    mount.wait_for(1)
    staged = mount.staging() / directory.name
    (staged / "more.txt").write_text("more")
    (staged / "logs/run.txt").unlink()
    version = mount.exactly(2)
    want = snapshot(directory)
    got = snapshot(version / directory.name)
    name = directory.name.encode()
    assert got.pop(name + b"/more.txt")[-1] == snapshot(staged / "more.txt")[b"more.txt"][-1]
    want.pop(name + b"/logs/run.txt")
    assert got == want


def test_a_committed_entry_stays_readable_in_staging(mount, file, directory):
    sh("cp", file, mount.staging())
    mount.wait_for(1)
    sh("cp", "-a", directory, mount.staging())
    mount.wait_for(2)
    for _ in range(2):
        assert sorted(os.listdir(mount.staging())) == sorted([file.name, directory.name])
        assert (mount.staging() / file.name).read_bytes() == file.read_bytes()
        assert snapshot(mount.staging() / directory.name) == snapshot(directory)
        mount.restart()
    held = sum(f.stat().st_size for f in (mount.zspace.store / "staging").rglob("*") if f.is_file())
    assert held < file.stat().st_size, "staging holds no second copy"


def test_deleting_from_staging_deletes_no_version(mount, file, directory):
    sh("cp", file, mount.staging())
    mount.wait_for(1)
    sh("cp", "-a", directory, mount.staging())
    mount.wait_for(2)
    sh("rm", "-r", mount.staging() / file.name, mount.staging() / directory.name)
    assert os.listdir(mount.staging()) == []
    mount.exactly(2)
    assert (mount.version(1) / file.name).read_bytes() == file.read_bytes()
    assert snapshot(mount.version(2) / directory.name) == snapshot(directory)


def test_unfinished_names_are_never_committed(mount, file):
    names = ["a.tmp", "b.part", "c.incomplete", "tmp-d", ".hidden.safetensors"]
    for name in names:
        shutil.copy(file, mount.staging() / name)
    time.sleep(SETTLE + 2)
    assert mount.versions() == []
    assert sorted(os.listdir(mount.staging())) == sorted(names)


def test_an_unfinished_name_inside_keeps_a_directory_from_settling(mount, directory):
    staged = mount.staging() / directory.name
    sh("cp", "-a", directory, mount.staging())
    (staged / "extra.pt.tmp").write_bytes(b"half")
    time.sleep(SETTLE_DIR + 2)
    assert mount.versions() == []
    os.rename(staged / "extra.pt.tmp", staged / "extra.pt")
    assert (mount.exactly(1) / directory.name / "extra.pt").read_bytes() == b"half"


def test_a_killed_writer_leaves_its_file_waiting(mount, file):
    target = mount.staging() / "killed.bin"
    writer = subprocess.Popen(["sh", "-c", 'exec > "$0"; cat "$1"; sleep 1000', target, file], start_new_session=True)
    time.sleep(0.5)
    os.killpg(writer.pid, 9)
    writer.wait()
    mount.wait_for_status("killed.bin", "waiting")
    assert mount.versions() == []
    sh("cp", file, target)  # written again, by a writer that lives
    assert (mount.exactly(1) / "killed.bin").read_bytes() == file.read_bytes()


def test_commit_of_a_staged_path_is_carried_out_by_the_mount(mounts, file):
    mount = mounts(settle=600)
    sh("cp", file, mount.staging())
    made = mount.zspace.commit(mount.staging() / file.name, "--message", "now")
    assert made[0][:2] == ("main", 1)
    assert (mount.wait_for(1) / file.name).read_bytes() == file.read_bytes()
    assert os.getxattr(mount.version(1), "user.zspace.label") == b"now"


def test_umount_commits_what_has_settled(mounts, file):
    mount = mounts(settle=1.5)
    sh("cp", file, mount.staging())
    mount.restart()
    assert (mount.wait_for(1, seconds=2) / file.name).read_bytes() == file.read_bytes()


def test_a_second_mount_shows_staging_read_only(mount, mounts, file):
    second = mounts("second")
    sh("cp", file, mount.staging())
    with pytest.raises(OSError):
        shutil.copy(file, second.staging() / "other.safetensors")
    mount.wait_for(1)
    assert (second.wait_for(1) / file.name).read_bytes() == file.read_bytes()


def test_staging_behaves_as_a_disk(mount):
    path = mount.staging() / "array.bin"
    with open(path, "w+b", buffering=0) as f:
        f.write(b"0123456789" * 1000)
        f.seek(5)
        f.write(b"patched")
        assert os.pread(f.fileno(), 12, 3) == b"34patched234"[:12]
        os.ftruncate(f.fileno(), 20_000)
        assert os.fstat(f.fileno()).st_size == 20_000
        os.ftruncate(f.fileno(), 9_000)
        os.pwrite(f.fileno(), b"end", 8_997)
        os.fsync(f.fileno())
        os.posix_fallocate(f.fileno(), 0, 10_000)
        assert os.fstat(f.fileno()).st_size == 10_000
    with open(path, "ab") as f:
        f.write(b"appended")
    mapped = np.memmap(path, dtype=np.uint8, mode="r+")
    mapped[:3] = 7
    mapped.flush()
    del mapped
    want = b"\7\7\7" + path.read_bytes()[3:]
    assert len(want) == 10_008 and want.endswith(b"appended") and want[5:12] == b"patched"
    assert (mount.exactly(1) / "array.bin").read_bytes() == want


def test_an_index_that_comes_long_before_its_shards_is_committed_with_them(mount):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = {"weight_map": {"w1": names[0], "w2": names[1]}}
    (mount.staging() / "model.safetensors.index.json").write_text(json.dumps(index))
    mount.wait_for_status("index.json", "waiting")
    for n, name in enumerate(names):
        save_file({f"w{n + 1}": torch.ones(1000)}, mount.staging() / name)
    assert sorted(os.listdir(mount.exactly(1))) == [*names, "model.safetensors.index.json"]
