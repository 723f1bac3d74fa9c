"""tensors/, arrays/ and safetensors/: one tensor of any checkpoint as a file of its own, and how the unusual ones look."""
import errno
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import doors


@pytest.fixture
def committed(mount, tmp_path):
    """Commits a value saved by torch.save, and gives the paths of its file behind each door."""

    def commit(value, name="model.pt", save=torch.save):
        save(value, tmp_path / name)
        (made,) = mount.zspace.commit(tmp_path / name)
        mount.wait_for(made[1])
        return {door: mount.version(made[1], door=door) / name for door in os.listdir(mount.path) if door != "staging"}

    return commit


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def values(dtype):
    base = torch.arange(24).reshape(2, 3, 4) % 2 if dtype == torch.bool else torch.arange(24).reshape(2, 3, 4)
    return base.to(dtype)


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_every_dtype(committed, form):
    want = {str(d).removeprefix("torch."): values(d) for d in DTYPES}
    if form == "safetensors":
        want.pop("complex64")
        paths = committed(want, "model.safetensors", save_file)
    else:
        paths = committed(want)
    doors.same(doors.torch_door(paths["tensors"]), want)
    doors.same(doors.torch_door(paths["tensors"], mmap=True), want)
    for name, (_, shape, data) in doors.numpy_door(paths["arrays"], "r").items():
        assert (shape, data) == doors.raw(want[name])[1:], name


def test_numpy_dtypes(committed):
    arrays = committed({str(d).removeprefix("torch."): values(d) for d in DTYPES})["arrays"]
    told = {p.stem: (np.load(p, mmap_mode="r").dtype.str, doors.attribute(p, "dtype")) for p in doors.files(arrays)}
    assert told["float32"][0] == "<f4" and told["int64"][0] == "<i8" and told["bool"][0] == "|b1"
    assert told["bfloat16"][0] == "<u2" and told["float8_e4m3fn"][0] == "|u1"
    assert told["bfloat16"][1] == "bfloat16"


def test_safetensors_of_a_torch_file(committed):
    want = {"model": {"w": torch.randn(30, 20), "b": torch.randn(30).to(torch.bfloat16)}, "step": 3}
    paths = committed(want)
    back = load_file(paths["safetensors"].with_name("model.pt.safetensors"))
    doors.same(back, {"model/w": want["model"]["w"], "model/b": want["model"]["b"]})


def test_safetensors_of_a_safetensors_file_is_the_file(committed):
    paths = committed({"w": torch.randn(30, 20)}, "model.safetensors", save_file)
    assert paths["safetensors"].read_bytes() == paths["versions"].read_bytes()


def test_strided_tensors(committed):
    base = torch.arange(10_000.0).reshape(100, 100)
    want = {"base": base, "transposed": base.t(), "column": base[:, 3], "block": base[10:20, 30:60], "odd": base[1::2, ::3]}
    paths = committed(want)
    got = doors.torch_door(paths["tensors"])
    doors.same(got, want)
    assert got["transposed"].stride() == (1, 100), "strides are kept"
    for name, (_, shape, data) in doors.numpy_door(paths["arrays"], "r").items():
        assert (shape, data) == doors.raw(want[name])[1:], name
    doors.same(load_file(paths["safetensors"].with_name("model.pt.safetensors")), want)


def test_expanded_tensor_is_kept_small_or_refused(committed):
    """A stride of zero: a terabyte's shape over four bytes."""
    paths = committed({"huge": torch.ones(1).expand(10**6, 10**6), "small": torch.ones(2)})
    (huge,) = (p for p in doors.files(paths["tensors"]) if doors.attribute(p, "name") == "huge")
    assert huge.stat().st_size < 10_000
    back = torch.load(huge, weights_only=True)
    assert back.shape == (10**6, 10**6) and back.stride() == (0, 0) and back[5, 5] == 1
    (array,) = (p for p in paths["arrays"].rglob("*") if p.name.startswith("huge"))
    with pytest.raises(OSError) as caught:
        array.read_bytes()
    assert caught.value.errno == errno.ENOTSUP
    assert doors.attribute(array, "refused")


def test_tied_tensors(committed):
    weight = torch.randn(200, 100)
    want = {"embed": weight, "head": weight, "part": weight[:10]}
    paths = committed(want)
    doors.same(doors.torch_door(paths["tensors"]), want)
    doors.same(load_file(paths["safetensors"].with_name("model.pt.safetensors")), want)


def test_nested_state(committed):
    model = torch.nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    want = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": [torch.ones(2), {"x": torch.zeros(3)}]}
    paths = committed(want)
    doors.same(doors.torch_door(paths["tensors"]), doors.flat(want))
    assert (paths["tensors"] / "optimizer/state/0/exp_avg.pt").is_file()
    assert torch.equal(torch.load(paths["tensors"] / "model/weight.pt", weights_only=True), model.weight)


def test_parameters_and_a_bare_tensor(committed):
    paths = committed({"p": torch.nn.Parameter(torch.randn(5, 5))})
    (found,) = doors.torch_door(paths["tensors"]).values()
    assert found.shape == (5, 5)
    paths = committed(torch.arange(7.0), "bare.pt")
    (found,) = doors.torch_door(paths["tensors"]).values()
    assert found.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_npy_and_npz(committed):
    array = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    paths = committed(array, "array.npy", lambda value, path: np.save(path, value))
    (found,) = doors.files(paths["arrays"])
    assert np.array_equal(np.load(found, mmap_mode="r"), array)
    (found,) = doors.torch_door(paths["tensors"]).values()
    assert np.array_equal(found.numpy(), array)
    paths = committed({"a": array, "f": np.asfortranarray(array)}, "arrays.npz", lambda value, path: np.savez(path, **value))
    got = {p.stem: np.load(p) for p in doors.files(paths["arrays"])}
    assert got.keys() == {"a", "f"} and all(np.array_equal(g, array) for g in got.values())


def test_files_without_tensors_are_absent(mount, tmp_path):
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/config.json").write_text("{}")
    torch.save({"w": torch.ones(3)}, tmp_path / "entry/model.pt")
    mount.zspace.commit(tmp_path / "entry")
    mount.wait_for(1)
    assert os.listdir(mount.version(1, door="tensors") / "entry") == ["model.pt"]
    assert os.listdir(mount.version(1, door="arrays") / "entry") == ["model.pt"]
    assert os.listdir(mount.version(1, door="safetensors") / "entry") == ["model.pt.safetensors"]


def test_a_view_is_random_access(committed):
    """A few elements out of the middle through each way of mapping."""
    weight = torch.randn(2000, 1000)
    paths = committed({"w": weight})
    array = np.load(paths["arrays"] / "w.npy", mmap_mode="r")
    assert np.array_equal(array[1234, 500:600], weight[1234, 500:600].numpy())
    tensor = torch.load(paths["tensors"] / "w.pt", weights_only=True, mmap=True)
    assert torch.equal(tensor[777], weight[777])
    with open(paths["arrays"] / "w.npy", "rb") as file:
        whole = file.read()
        for at, size in ((0, 10), (100, 50), (len(whole) - 5, 100), (4_000_000, 65_536)):
            assert os.pread(file.fileno(), size, at) == whole[at : at + size]
