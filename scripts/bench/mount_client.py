#!/usr/bin/env python3
"""What a program does with a file, timed from inside, after its imports.

usage: mount_client.py WHAT FILL PATH [MORE]   prints {"seconds": …, "seen": …} as JSON; "seen" is the same for the same bytes
       mount_client.py make-torch|make-npy FROM TO   the tensors of a safetensors file in another format
       mount_client.py touch BYTES                   has the machine back so much memory with real pages

A new process for each: nothing of an earlier run is left in it. FILL bytes of memory are touched before, for what it loads.
"""
import json
import mmap
import sys
import time

BUFFER = 1 << 20
STEP = 64 << 20


def touch(size):
    """Fills anonymous memory and gives it back: a page's first use can cost more than what is measured."""
    while size > 0:
        now = min(size, STEP * 16)
        with mmap.mmap(-1, now) as area:
            for at in range(0, now, mmap.PAGESIZE):
                area[at] = 1
        size -= now


def total(array):
    """All bytes of a NumPy array, added up as 64-bit numbers (what is left behind the last of them aside)."""
    import numpy

    flat = numpy.asarray(array).reshape(-1).view(numpy.uint8)
    return int(flat[: len(flat) // 8 * 8].view(numpy.uint64).sum())


def tensor_total(tensor):
    import torch

    return total(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def read(path):
    """read() from start to end with one buffer; the length."""
    buffer, length = bytearray(BUFFER), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            length += count
    return length


def map_sum(path):
    import numpy

    return total(numpy.memmap(path, dtype=numpy.uint8, mode="r"))


def torch_load(path, **options):
    import torch

    tensors = torch.load(path, **options)
    return sum(t.numel() for t in tensors.values())


def torch_load_map(path):
    return torch_load(path, mmap=True)


def torch_load_map_sum(path):
    import torch

    return sum(map(tensor_total, torch.load(path, mmap=True).values()))


def safe_open_all(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())


def safe_open_sum(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return sum(tensor_total(file.get_tensor(name)) for name in file.keys())


def safe_open_one(path, name):
    """One tensor, every byte of it looked at (safe_open itself only maps it)."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return tensor_total(file.get_tensor(name))


def np_load_map_sum(path):
    import numpy

    return total(numpy.load(path, mmap_mode="r"))


def np_load(path):
    import numpy

    return total(numpy.load(path))


DEEDS = {
    "read": (read, ""),
    "map-sum": (map_sum, "numpy"),
    "torch-load": (torch_load, "torch"),
    "torch-load-map": (torch_load_map, "torch"),
    "torch-load-map-sum": (torch_load_map_sum, "torch"),
    "safe-open-all": (safe_open_all, "torch safetensors"),
    "safe-open-sum": (safe_open_sum, "torch safetensors"),
    "safe-open-one": (safe_open_one, "torch safetensors"),
    "np-load-map-sum": (np_load_map_sum, "numpy"),
    "np-load": (np_load, "numpy"),
}

def make_torch(source, target):
    import safetensors.torch
    import torch

    torch.save(safetensors.torch.load_file(source), target)


def make_npy(source, target):
    import numpy

    data = numpy.memmap(source, dtype=numpy.uint8, mode="r")
    numpy.save(target, data[: len(data) // 2048 * 2048].view(numpy.uint16).reshape(-1, 1024))


def main():
    what, *args = sys.argv[1:]
    if what == "touch":
        return touch(int(args[0]))
    if what in ("make-torch", "make-npy"):
        return (make_torch if what == "make-torch" else make_npy)(*args)
    deed, imports = DEEDS[what]
    for module in imports.split():
        __import__(module)
    if "torch" in imports:
        import torch

        # One thread, as the bytes that are looked at come from one place; what starts up at the first use has started up.
        torch.set_num_threads(1)
        tensor_total(torch.ones(8))
    if "safetensors" in imports:
        import safetensors.torch  # noqa: F401
    fill, *args = args
    touch(int(fill))
    begin = time.perf_counter()
    seen = deed(*args)
    print(json.dumps({"seconds": time.perf_counter() - begin, "seen": seen}))


if __name__ == "__main__":
    sys.exit(main())
