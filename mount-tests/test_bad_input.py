"""Hostile and broken files: given to `zspace commit` each is stored as the opaque file it is, in bounded time and memory,
and nothing runs; copied into staging, what is incomplete by its own structure waits."""
import json
import os
import pickle
import struct
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from doors import attribute
from files import sha256
from zspace import QUIET


def truncated_safetensors(path):
    save_file({"w": torch.arange(10_000.0)}, path)
    os.truncate(path, path.stat().st_size // 2)


def endless_header(path):
    path.write_bytes(struct.pack("<Q", 2**63) + b'{"w":{' + b" " * 1000)


def zip_bomb(path):
    """A gigabyte of zeros in a megabyte, named as a torch storage."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as bomb:
        bomb.writestr("archive/data.pkl", pickle.dumps({"x": 1}, 2))
        bomb.writestr("archive/byteorder", "little")
        with bomb.open("archive/data/0", "w", force_zip64=True) as member:
            for _ in range(1024):
                member.write(bytes(1 << 20))


def overlapping_bomb(path):
    """Many directory entries that name one and the same member."""
    with zipfile.ZipFile(path, "w") as bomb:
        bomb.writestr("archive/data.pkl", b"\x80\x02}.")
        bomb.writestr("archive/data/0", bytes(100_000))
    data = path.read_bytes()
    end = data.rindex(b"PK\x05\x06")
    start = struct.unpack("<I", data[end + 16 : end + 20])[0]
    entry = data[data.rindex(b"PK\x01\x02") : end]
    count = 60_000
    directory = entry * count
    path.write_bytes(
        data[:start] + directory + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
    )


class Command:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


def evil_pickle(path):
    torch.save({"w": torch.ones(3), "evil": Command(path.parent / "ran")}, path)


def evil_bare_pickle(path):
    path.write_bytes(pickle.dumps(Command(path.parent / "ran")))


def deep_pickle(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * 3_000_000 + b"a" * 2_999_999 + b".")


def laughing_pickle(path):
    """Each list holds the one before it ten times: 10^60 elements if expanded."""
    opcodes = b"\x80\x02]q\x00"
    for i in range(60):
        opcodes += b"](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1])
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", opcodes + b".")


def climbing_members(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../escaped", b"x" * 1000)
        archive.writestr("/etc/escaped", b"x" * 1000)


def empty_file(path):
    path.write_bytes(b"")


def lone_end_record(path):
    path.write_bytes(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, 0xFFFFFFF0, 0xFFFFFFF0, 0))


BAD = {
    "truncated.safetensors": truncated_safetensors,
    "endless.safetensors": endless_header,
    "bomb.pt": zip_bomb,
    "overlapping.pt": overlapping_bomb,
    "evil.pt": evil_pickle,
    "evil-bare.pt": evil_bare_pickle,
    "deep.pt": deep_pickle,
    "laughing.pt": laughing_pickle,
    "climbing.pt": climbing_members,
    "empty.safetensors": empty_file,
    "end.pt": lone_end_record,
    "..safetensors": truncated_safetensors,
    "a..b": endless_header,
}
# Odd but harmless: may be split by the tensors they hold.
MAY_PARSE = {"deep.pt", "laughing.pt", "climbing.pt"}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_stored_as_it_is(mount, tmp_path, name):
    path = tmp_path / "in" / name
    path.parent.mkdir()
    BAD[name](path)
    start = time.monotonic()
    made = mount.zspace.commit(path)
    assert time.monotonic() - start < 20
    version = mount.wait_for(1)
    assert made[0][:2] == ("main", 1)
    assert os.listdir(version) == [name]
    assert sha256(version / name) == sha256(path)
    if name not in MAY_PARSE:
        assert attribute(version / name, "format") == "opaque"
        assert mount.zspace.json_lines("tensors", f"main:{name}") == []
    mount.zspace.verify()
    for door in ("tensors", "arrays", "safetensors"):
        for found in mount.version(1, door=door).rglob("*"):
            if found.is_file():
                found.read_bytes()
    assert not (path.parent / "ran").exists(), "nothing of a pickle is ever called"


def test_tensor_names_cannot_climb(mount, tmp_path):
    names = ["../../../escaped", "/etc/escaped", "..", ".", "a/../b", "a\0b", "-rf"]
    torch.save({name: torch.tensor([float(i)]) for i, name in enumerate(names)}, tmp_path / "model.pt")
    mount.zspace.commit(tmp_path / "model.pt")
    mount.wait_for(1)
    directory = mount.version(1, door="tensors") / "model.pt"
    found = [p for p in directory.rglob("*") if p.is_file()]
    assert len(found) == len(names)
    for path in found:
        assert ".." not in path.relative_to(directory).parts
        assert path.resolve().is_relative_to(directory)
    values = sorted(torch.load(p, weights_only=True).item() for p in found)
    assert values == [float(i) for i in range(len(names))]


@pytest.mark.parametrize("path", ["../escape", "a/../../escape", "/etc/passwd", "..", ""])
def test_paths_on_the_command_line_cannot_climb(zspace, tmp_path, path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_text("x")
    zspace.commit(tmp_path / "a")
    done = zspace.run("cat", f"main:{path}", ok=False)
    assert done.returncode != 0 and done.stdout == ""


@pytest.mark.parametrize("name", ["truncated.safetensors", "endless.safetensors"])
def test_torn_safetensors_wait_in_staging(mount, tmp_path, name):
    BAD[name](tmp_path / name)
    data = (tmp_path / name).read_bytes()
    (mount.staging() / name).write_bytes(data)
    mount.wait_for_status(name, "waiting")
    time.sleep(QUIET)
    assert mount.versions() == []
    mount.zspace.commit(mount.staging() / name)
    assert (mount.wait_for(1) / name).read_bytes() == data


def test_torn_zip_waits_until_the_rest_arrives(mount, tmp_path):
    torch.save({"w": torch.randn(200, 200)}, tmp_path / "model.pt")
    data = (tmp_path / "model.pt").read_bytes()
    staged = mount.staging() / "model.pt"
    staged.write_bytes(data[:100_000])
    mount.wait_for_status("model.pt", "waiting")
    assert mount.versions() == []
    with open(staged, "ab") as rest:
        rest.write(data[100_000:])
    assert (mount.exactly(1) / "model.pt").read_bytes() == data


def test_index_with_a_missing_shard_waits_for_it(mount, tmp_path):
    staged = mount.staging() / "checkpoint"
    staged.mkdir()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {"a": shards[0], "b": shards[1]}}
    (staged / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.ones(10)}, staged / shards[0])
    line = mount.wait_for_status("checkpoint", "waiting")
    assert shards[1] in line or shards[1] in mount.status()
    assert mount.versions() == []
    save_file({"b": torch.ones(10)}, staged / shards[1])
    assert len(os.listdir(mount.exactly(1) / "checkpoint")) == 3


def test_bad_files_in_staging_do_no_harm(mount, tmp_path):
    """All of them at once, through the mount: what waits is told, what is committed is exact, and the mount lives."""
    staged = mount.staging() / "all"
    (tmp_path / "in").mkdir()
    for name, make in BAD.items():
        make(tmp_path / "in" / name)
    staged.mkdir()
    for name in BAD:
        (staged / name).write_bytes((tmp_path / "in" / name).read_bytes())
    mount.wait_for_status("all", "waiting", seconds=40)
    mount.zspace.commit(staged)
    version = mount.wait_for(1)
    for name in BAD:
        assert sha256(version / "all" / name) == sha256(tmp_path / "in" / name), name
    assert not (tmp_path / "in/ran").exists()
    mount.zspace.verify()
