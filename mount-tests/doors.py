"""The tensors of a checkpoint as each door of the mount shows them, to compare with the source's own."""
import os

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def flat(value, name=""):
    """The tensors of nested dicts and lists, with their keys joined by slashes."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    found = {}
    for key, inner in items:
        found |= flat(inner, f"{name}/{key}" if name else str(key))
    return found


def raw(tensor):
    """A tensor's dtype, shape and bytes in C order: equal only if all of them are, NaNs and signs of zero included."""
    data = tensor.detach().contiguous().flatten()
    return tensor.dtype, tuple(tensor.shape), data.view(torch.uint8).numpy().tobytes()


def same(got, want):
    """Both are dicts of tensors: names, dtypes, shapes and bytes must be equal."""
    assert got.keys() == want.keys()
    for name in want:
        assert raw(got[name]) == raw(want[name]), name


def load(path):
    """The tensors of a checkpoint file by its own loader; None if it holds none."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return flat(torch.load(path, weights_only=True))
    return None


def attribute(path, name):
    return os.getxattr(path, f"user.zspace.{name}").decode()


def files(directory):
    return sorted(p for p in directory.rglob("*") if p.is_file())


def torch_door(directory, **options):
    """The tensors below a checkpoint's directory in tensors/, by their true names."""
    return {attribute(p, "name"): torch.load(p, weights_only=True, **options) for p in files(directory)}


def numpy_door(directory, mmap_mode=None):
    """The arrays below a checkpoint's directory in arrays/, by their true names, as (dtype's name, shape, bytes)."""
    found = {}
    for path in files(directory):
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        found[attribute(path, "name")] = (attribute(path, "dtype"), array.shape, array.tobytes())
    return found


def safetensors_door(path):
    """The tensors of one file in safetensors/."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def check(mount, number, source, branch="main"):
    """Each door shows the tensors of version `number`, entry `source.name`, as the source has them. Returns how many."""
    checked = 0
    paths = [source] if source.is_file() else files(source)
    for path in paths:
        want = load(path)
        if want is None:
            continue
        inside = path.relative_to(source.parent)
        version = mount.version(number, branch)
        same(load(version / inside), want)
        if path.suffix != ".safetensors":
            same(flat(torch.load(version / inside, weights_only=True, mmap=True)), want)

        tensors = mount.version(number, branch, "tensors") / inside
        same(torch_door(tensors), want)
        same(torch_door(tensors, mmap=True), want)

        arrays = mount.version(number, branch, "arrays") / inside
        for mode in (None, "r"):
            got = numpy_door(arrays, mode)
            assert got.keys() == want.keys()
            for name, (_, shape, data) in got.items():
                assert (shape, data) == raw(want[name])[1:], name

        one = mount.version(number, branch, "safetensors") / inside
        same(safetensors_door(one if one.suffix == ".safetensors" else one.with_name(one.name + ".safetensors")), want)
        checked += len(want)
    return checked
