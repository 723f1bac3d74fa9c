"""Reading versions in every way that loaders do; the numbers are the cases of the project's collection."""
import errno
import mmap
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from files import noise, sha256


@pytest.fixture
def version(mount, tmp_path):
    """A version of a few kinds of file, with their sources."""
    source = tmp_path / "run"
    source.mkdir()
    tensors = {f"layer.{i}": torch.randn(512, 512, generator=torch.Generator().manual_seed(i)) for i in range(6)}
    save_file(tensors, source / "model.safetensors")
    torch.save(tensors, source / "model.pt")
    np.save(source / "array.npy", np.arange(1 << 20, dtype=np.float32))
    (source / "odd.bin").write_bytes(noise((3 << 20) + 4097, 1))
    mount.zspace.commit(source)
    return mount.wait_for(1) / "run", source


# C26: mappings


def test_c26_every_loader_that_maps(version):
    there, source = version
    want = torch.load(source / "model.pt")
    mapped = torch.load(there / "model.pt", mmap=True)
    assert all(torch.equal(mapped[name], tensor) for name, tensor in want.items())
    with safe_open(there / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in want.items())
    for mode in ("r", "c"):
        array = np.load(there / "array.npy", mmap_mode=mode)
        assert array[-1] == (1 << 20) - 1 and float(array[:1000].sum()) == 499500
    with open(there / "odd.bin", "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            assert pages[-1] == (source / "odd.bin").read_bytes()[-1]
            assert pages[:] == (source / "odd.bin").read_bytes()


def test_c26_a_writable_mapping_is_refused(version):
    there, _ = version
    with pytest.raises(OSError) as refused:
        open(there / "odd.bin", "r+b")
    assert refused.value.errno in (errno.EROFS, errno.EACCES)
    with open(there / "odd.bin", "rb") as file:
        with pytest.raises(OSError) as refused:
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
        assert refused.value.errno in (errno.EROFS, errno.EACCES)


# C28: direct reads


@pytest.mark.parametrize("size", [512, 4096, 1 << 20, (1 << 20) + 512])
def test_c28_direct_reads(version, size):
    there, source = version
    want = (source / "odd.bin").read_bytes()
    descriptor = os.open(there / "odd.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        buffer = mmap.mmap(-1, size)  # aligned to a page
        got = bytearray()
        while n := os.preadv(descriptor, [buffer], len(got)):
            got += buffer[:n]
        assert got == want
        assert os.preadv(descriptor, [buffer], len(want)) == 0
        # Off every boundary: answered or refused, at once.
        try:
            n = os.preadv(descriptor, [buffer], 77)
            assert buffer[:n] == want[77 : 77 + n]
        except OSError as refused:
            assert refused.errno == errno.EINVAL
    finally:
        os.close(descriptor)


def test_c28_direct_reads_at_depth(version):
    from concurrent.futures import ThreadPoolExecutor

    there, source = version
    want = (source / "odd.bin").read_bytes()
    descriptor = os.open(there / "odd.bin", os.O_RDONLY | os.O_DIRECT)

    def read(at):
        buffer = mmap.mmap(-1, 4096)
        n = os.preadv(descriptor, [buffer], at)
        return buffer[:n] == want[at : at + 4096]

    try:
        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(read, range(0, len(want), 4096)))
    finally:
        os.close(descriptor)


# C09: more than 2³¹ bytes and elements


@pytest.mark.timeout(300)
def test_c09_more_than_two_to_the_31_elements(mounts, tmp_path):
    mount = mounts()
    size = (1 << 31) + 7
    path = tmp_path / "huge.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(size,))
    array[0], array[-1], array[1 << 31] = 1, 2, 3  # a sparse file: the rest takes no space
    array.flush()
    del array
    mount.zspace.commit(path)
    there = mount.wait_for(1) / "huge.npy"
    assert os.stat(there).st_size == os.stat(path).st_size
    back = np.load(there, mmap_mode="r")
    assert (back[0], back[-1], back[1 << 31], back[-2]) == (1, 2, 3, 0)
    descriptor = os.open(there, os.O_RDONLY)
    try:
        # As on a disk, one read gives at most 2 GiB less a page, and the next goes on.
        got = os.pread(descriptor, 64, size + 128 - 8)
        assert len(got) == 8 and got[-1] == 2
    finally:
        os.close(descriptor)
    assert sha256(there) == sha256(path)
