"""Unusual files that people have publicly run into; the numbers are the cases of the project's collection."""
import errno
import io
import json
import os
import struct
import subprocess
import time
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import doors
from files import sha256, snapshot


def check_file(mount, path, number=1):
    """Commits a file and compares what comes back. Returns its path in the version."""
    mount.zspace.commit(path)
    back = mount.wait_for(number) / path.name
    assert sha256(back) == sha256(path)
    return back


def safetensors(header, data=b"", pad=True):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8) if pad else b""
    return struct.pack("<Q", len(text)) + text + data


# C01: tensors without elements


def test_c01_zero_size_tensors(mount, tmp_path):
    tensors = {"a": torch.zeros(2, 0), "b": torch.zeros(0), "c": torch.tensor(1.5), "d": torch.ones(3), "e": torch.zeros(0, 7)}
    save_file(tensors, tmp_path / "zero.safetensors")
    back = check_file(mount, tmp_path / "zero.safetensors")
    doors.same(load_file(back), tensors)
    assert doors.check(mount, 1, tmp_path / "zero.safetensors") == 5


def test_c01_zero_size_tensors_in_torch(mount, tmp_path):
    tensors = {"a": torch.zeros(2, 0), "b": torch.zeros(0, dtype=torch.bfloat16), "c": torch.tensor(1.5), "d": torch.ones(3)}
    torch.save(tensors, tmp_path / "zero.pt")
    check_file(mount, tmp_path / "zero.pt")
    assert doors.check(mount, 1, tmp_path / "zero.pt") == 4


def test_c01_metadata_alone(mount, tmp_path):
    path = tmp_path / "meta.safetensors"
    path.write_bytes(safetensors({"__metadata__": {"format": "pt"}}))
    assert load_file(check_file(mount, path)) == {}


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "model.npy", "model"])
def test_c01_empty_file(mount, tmp_path, name):
    (tmp_path / name).touch()
    assert os.stat(check_file(mount, tmp_path / name)).st_size == 0


def test_c01_empty_file_and_directory_through_staging(mount):
    (mount.staging() / "empty.bin").touch()
    assert (mount.wait_for(1) / "empty.bin").read_bytes() == b""
    (mount.staging() / "empty-dir").mkdir()
    time.sleep(3)
    if mount.versions() == [1, 2]:
        assert os.listdir(mount.version(2) / "empty-dir") == []


# C03: files that the loader refuses

ENTRY = b'"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
REFUSED = {
    "duplicate key": safetensors(b"{" + ENTRY + b"," + ENTRY + b"}", bytes(16)),
    "gap": safetensors(
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [20, 36]},
        },
        bytes(36),
    ),
    "overlap": safetensors(
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        },
        bytes(24),
    ),
    "number in the metadata": safetensors(b'{"__metadata__":{"step":5},' + ENTRY + b"}", bytes(16)),
    "trailing bytes": safetensors(b"{" + ENTRY + b"}", bytes(16) + b"t" * 1024),
    "unknown dtype": safetensors(b'{"w":{"dtype":"Q7","shape":[4],"data_offsets":[0,16]}}', bytes(16)),
    "shape times dtype is not the size": safetensors(b'{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}}', bytes(16)),
    "shape overflows": safetensors(
        b'{"w":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,16]}}', bytes(16)
    ),
    "not json": safetensors(b"{not json}", bytes(16)),
    "deep json": safetensors(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", bytes(16)),
    "not utf-8": safetensors(b'{"\xff\xfe":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_c03_refused_by_the_loader(mount, tmp_path, what):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(REFUSED[what])
    back = check_file(mount, path)
    assert doors.attribute(back, "format") == "opaque"
    mount.zspace.verify()


@pytest.mark.timeout(180)
def test_c03_a_header_of_108_megabytes(mount, tmp_path):
    """900,000 tensors: more than the reference implementation's limit for headers."""
    count = 900_000
    entries = (
        f'"model.layers.{i:07}.self_attention.projection.weight":{{"dtype":"F32","shape":[1],"data_offsets":[{4 * i},{4 * i + 4}]}}'
        for i in range(count)
    )
    path = tmp_path / "wide.safetensors"
    path.write_bytes(safetensors(("{" + ",".join(entries) + "}").encode(), np.arange(count, dtype=np.float32).tobytes()))
    assert path.stat().st_size > 100_000_000
    start = time.monotonic()
    check_file(mount, path)
    assert time.monotonic() - start < 60
    start = time.monotonic()
    mount.zspace.verify()
    assert time.monotonic() - start < 60


@pytest.mark.timeout(180)
def test_c03_many_tensors_below_the_limit(mount, tmp_path):
    """100,000 small tensors are legal: exact, and not slow to list or load."""
    count = 100_000
    path = tmp_path / "many.safetensors"
    save_file({f"t.{i:06}": torch.full((2,), float(i)) for i in range(count)}, path)
    start = time.monotonic()
    back = check_file(mount, path)
    assert time.monotonic() - start < 30
    assert load_file(back)["t.012345"].tolist() == [12345.0, 12345.0]
    directory = mount.version(1, door="tensors") / path.name
    assert torch.load(directory / "t.099999.pt", weights_only=True).tolist() == [99999.0, 99999.0]
    assert len(os.listdir(directory)) == count


# C05: the same weights in other bytes


def test_c05_same_weights_in_files_of_other_names(mount, tmp_path):
    """torch puts the file's name into the archive, which moves every storage: copies must stay cheap all the same."""
    generator = torch.Generator().manual_seed(5)
    weights = {f"w{i}": torch.randn(300, 700, generator=generator) for i in range(5)}
    stored = [0]
    for number, name in enumerate(["a.pt", "b.pt", "sub-ckpt-with-a-longer-name.pt"], 1):
        torch.save(weights, tmp_path / name)
        check_file(mount, tmp_path / name, number)
        stored.append(mount.zspace.stored())
    first, second, third = (b - a for a, b in zip(stored, stored[1:]))
    assert first > 3_000_000
    assert second < first / 50 and third < first / 50, (first, second, third)


def test_c05_same_weights_in_another_format(mount, tmp_path):
    weights = {f"w{i}": torch.randn(500, 1000, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    torch.save(weights, tmp_path / "model.pt")
    save_file(weights, tmp_path / "model.safetensors")
    check_file(mount, tmp_path / "model.pt")
    first = mount.zspace.stored()
    check_file(mount, tmp_path / "model.safetensors", 2)
    assert mount.zspace.stored() - first < first / 50


# C07: old and foreign torch files


def rewritten(path, change):
    """The archive with `change(name, data)` applied to every record; None drops it."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = change(info.filename, old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    path.write_bytes(out.getvalue())


def test_c07_legacy_file(mount, tmp_path):
    weights = {"w": torch.randn(100, 100), "b": torch.randn(100)}
    path = tmp_path / "legacy.pt"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    doors.same(torch.load(check_file(mount, path), weights_only=True), weights)


@pytest.mark.parametrize("order", [b"big", None], ids=["big", "record removed"])
def test_c07_byte_order(mount, tmp_path, order):
    path = tmp_path / "order.pt"
    torch.save({"w": torch.arange(1000, dtype=torch.float32)}, path)

    def change(name, data):
        if name.endswith("/byteorder"):
            return order
        return np.frombuffer(data, np.float32).byteswap().tobytes() if order and name.endswith("/data/0") else data

    rewritten(path, change)
    back = check_file(mount, path)
    assert torch.load(back, weights_only=True)["w"].tolist() == list(range(1000))
    # What tensors/ shows, if it shows any, has the values that torch sees.
    directory = mount.version(1, door="tensors") / path.name
    shown = doors.torch_door(directory) if directory.is_dir() else {}
    assert all(t.tolist() == list(range(1000)) for t in shown.values())
    if order == b"big":
        assert shown == {}, "no endian guessing"


# C11: trees of links


def hub_cache(root):
    """The layout of the Hugging Face cache, with links of every kind."""
    model = root / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    snapshot_dir = model / "snapshots/0123abcd"
    snapshot_dir.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("0123abcd")
    save_file({"w": torch.randn(50, 50)}, model / "blobs/aaaa")
    (model / "blobs/bbbb").write_text('{"hidden": 50}')
    (snapshot_dir / "model.safetensors").symlink_to("../../blobs/aaaa")
    (snapshot_dir / "config.json").symlink_to("../../blobs/bbbb")
    (snapshot_dir / "dangling.json").symlink_to("../../blobs/cccc")
    (snapshot_dir / "absolute").symlink_to("/etc/hostname")
    (snapshot_dir / "loop").symlink_to("loop")
    (snapshot_dir / "up").symlink_to("..")
    return model


@pytest.mark.parametrize("how", ["commit", "cp -a"])
def test_c11_a_tree_of_links(mount, tmp_path, how):
    model = hub_cache(tmp_path / "hub")
    if how == "commit":
        mount.zspace.commit(model)
    else:
        subprocess.run(["cp", "-a", model, mount.staging()], check=True)
    back = mount.wait_for(1) / model.name
    assert snapshot(back) == snapshot(model)
    within = back / "snapshots/0123abcd"
    doors.same(load_file(within / "model.safetensors"), load_file(model / "blobs/aaaa"))
    with pytest.raises(OSError) as caught:
        open(within / "loop")
    assert caught.value.errno == errno.ELOOP
    mount.zspace.run("export", "main", tmp_path / "out")
    assert snapshot(tmp_path / "out" / model.name) == snapshot(model)


def test_c11_links_out_of_the_entry_are_never_silently_empty(mount, tmp_path):
    """A snapshot directory alone, whose links lead out of it: kept as links, as `cp -a` would."""
    model = hub_cache(tmp_path / "hub")
    mount.zspace.commit(model / "snapshots/0123abcd")
    back = mount.wait_for(1) / "0123abcd"
    assert os.readlink(back / "model.safetensors") == "../../blobs/aaaa"
    assert snapshot(back) == snapshot(model / "snapshots/0123abcd")


# C12: names

NAMES = [
    b"-leading-dash", b"two words", b"new\nline", b"tab\t", "Grüße-🚀".encode(), "检查点".encode(), b"bad-\xff\xfe-utf8",
    b"quote'\"`$x", b"back\\slash", b"colon:star*?", b".hidden", b"percent%2Fencoded", b"latest", b"000001", b"con",
    b"n" * 255, "あ".encode() * 85, b"~", b"%", b"#", b"trailing.", b" ",
]  # fmt: skip


def odd_tree(root):
    tree = root / "tree"
    tree.mkdir()
    for name in NAMES:
        (tree / os.fsdecode(name)).mkdir()
        (tree / os.fsdecode(name) / os.fsdecode(name)).write_bytes(name)
    return tree


@pytest.mark.parametrize("how", ["commit", "cp -a"])
def test_c12_odd_names_inside(mount, tmp_path, how):
    tree = odd_tree(tmp_path)
    if how == "commit":
        mount.zspace.commit(tree)
    else:
        subprocess.run(["cp", "-a", tree, mount.staging()], check=True)
    back = mount.wait_for(1) / "tree"
    assert snapshot(back) == snapshot(tree)
    assert sorted(os.listdir(os.fsencode(back))) == sorted(NAMES)
    mount.zspace.run("export", "main/1", tmp_path / "out")
    assert snapshot(tmp_path / "out/tree") == snapshot(tree)
    mount.zspace.run("ls", "main")
    mount.zspace.verify()


def test_c12_odd_names_of_entries(mount, tmp_path):
    names = [n for n in NAMES if not n.startswith(b".")]
    for number, name in enumerate(names, 1):
        source = tmp_path / "source" / os.fsdecode(name)
        source.parent.mkdir(exist_ok=True)
        source.write_bytes(b"content of " + name)
        mount.zspace.commit("--", source)
    mount.wait_for(len(names))
    for number, name in enumerate(names, 1):
        version = os.fsencode(mount.version(number))
        assert os.listdir(version) == [name]
        assert open(os.path.join(version, name), "rb").read() == b"content of " + name


def test_c12_odd_names_of_entries_through_staging(mount, tmp_path):
    names = [n for n in NAMES if not n.startswith(b".")]
    directory = os.fsencode(mount.staging())
    for name in names:
        with open(os.path.join(directory, name), "wb") as file:
            file.write(b"content of " + name)

    def found():
        return {
            name: open(os.path.join(os.fsencode(mount.version(n)), name), "rb").read()
            for n in mount.versions()
            for name in os.listdir(os.fsencode(mount.version(n)))
        }

    end = time.monotonic() + 20
    while len(found()) < len(names) and time.monotonic() < end:
        time.sleep(0.1)
    assert found() == {name: b"content of " + name for name in names}


def test_c12_a_name_of_256_bytes_is_too_long(mount):
    for action in (lambda p: open(p, "wb"), os.mkdir, os.stat):
        with pytest.raises(OSError) as caught:
            action(mount.staging() / ("n" * 256))
        assert caught.value.errno == errno.ENAMETOOLONG
    with pytest.raises(OSError) as caught:
        os.stat(mount.path / "versions/main" / ("n" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


TENSOR_NAMES = [
    "plain", "a/b", "a", "a/b/c.pt", "a.pt", "a.npy", ".", "..", "", " ", ".hidden", "-dash", "new\nline", "x" * 300, "x" * 299 + "y",
    "Grüße-🚀", "检查点" * 60, "percent%2Fencoded", "a%2Fb", "%", "sla/sh/", "/lead", "nul\0byte", "back\\slash", "A", "0",
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_c12_odd_tensor_names(mount, tmp_path, suffix):
    path = tmp_path / f"names{suffix}"
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate(TENSOR_NAMES)}
    torch.save(tensors, path) if suffix == ".pt" else save_file(tensors, path)
    check_file(mount, path)
    want = {i: 3 for i in range(len(TENSOR_NAMES))}
    for door, load in (("tensors", lambda p: torch.load(p, weights_only=True)), ("arrays", np.load)):
        found = doors.files(mount.version(1, door=door) / path.name)
        assert len(found) == len(TENSOR_NAMES)
        assert {int(load(p)[0]): len(load(p)) for p in found} == want
        assert len({doors.attribute(p, "name") for p in found}) == len(TENSOR_NAMES), "true names tell them apart"
    one = mount.version(1, door="safetensors") / (path.name if suffix == ".safetensors" else f"{path.name}.safetensors")
    assert {int(t[0]): len(t) for t in load_file(one).values()} == want
    if suffix == ".safetensors":
        assert set(load_file(one)) == set(TENSOR_NAMES)
