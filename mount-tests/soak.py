"""What test_soak.py starts many times over: writers that are killed at any moment, and readers that check what they find.

usage: soak.py write MNT SEED BRANCH NAME | soak.py read MNT SEED

Every file tells by itself whether it is whole (it begins with the SHA-256 of its rest), and the files of one checkpoint tell
whether they belong together (their number is in their names, the save that wrote them follows the hash)."""
import hashlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HASH, SAVE = 32, 16
# Parts of a checkpoint directory.
PARTS = 4
# Directories that a writer keeps, as trainers do with save_total_limit.
KEPT = 3


class Torn(Exception):
    """A version that nobody meant to write."""


def content(save, part, rng):
    """Bytes of a part: as from training, the most of one save is as in the one before."""
    noise = np.random.default_rng(part).integers(0, 256, (1 + part) * 300_000, dtype=np.uint8)
    changed = np.random.default_rng(rng.getrandbits(32)).integers(0, len(noise), len(noise) // 50)
    noise[changed] += 1
    rest = save + noise[: rng.randint(len(noise) // 2, len(noise))].tobytes()
    return hashlib.sha256(rest).digest() + rest


def check(data, path):
    """The save that wrote the file."""
    if hashlib.sha256(data[HASH:]).digest() != data[:HASH]:
        raise Torn(f"{path}: {len(data)} bytes that were never written together")
    return data[HASH:][:SAVE]


def check_version(version, rng):
    for entry in version.iterdir():
        files = sorted(entry.iterdir()) if entry.is_dir() else [entry]
        if entry.is_dir() and [f.name for f in files] != names():
            raise Torn(f"{entry}: only {[f.name for f in files]}")
        rng.shuffle(files)
        saves = {check(read(f, rng), f) for f in files}
        if len(saves) > 1:
            raise Torn(f"{entry} mixes {len(saves)} saves")


def names():
    return [f"part-{n}-of-{PARTS}" for n in range(PARTS)]


def read(path, rng):
    with open(path, "rb", buffering=0) as file:
        how = rng.randrange(3)
        if how == 0:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                return mapped[:]
        pieces = []
        while piece := file.read(1 << 20 if how == 1 else rng.randint(1, 100_000)):
            pieces.append(piece)
        return b"".join(pieces)


def write_file(path, data, rng):
    """One file, in one of the ways of libraries."""
    how = rng.randrange(4)
    if how == 0:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(data)
        os.rename(temporary, path)
    elif how == 1:
        with open(path, "wb") as file:
            for start in range(0, len(data), 70_000):
                file.write(data[start : start + 70_000])
                file.flush()
            os.fsync(file.fileno())
    elif how == 2:
        with open(path, "wb+") as file:
            file.truncate(len(data))
            with mmap.mmap(file.fileno(), len(data)) as mapped:
                mapped[:] = data
    else:
        with open(path, "wb") as file:
            file.write(bytes(HASH) + data[HASH:])
            file.seek(0)
            file.write(data[:HASH])


def save_directory(directory, rng):
    save = rng.randbytes(SAVE)
    directory.mkdir(exist_ok=True)
    for n, name in enumerate(names()):
        write_file(directory / name, content(save, n, rng), rng)


def write(branch, name, rng):
    """Saves until it is killed. What others write into the branch has not this name."""
    branch.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        while True:
            how = rng.randrange(5)
            if how == 0:
                write_file(branch / f"{name}.bin", content(rng.randbytes(SAVE), 2, rng), rng)
            elif how == 1:
                save_directory(branch / name, rng)
            elif how == 2:
                save_directory(branch / f"{name}-{rng.getrandbits(40)}", rng)
            else:
                source = Path(scratch, f"{name}-{rng.getrandbits(40)}")
                save_directory(source, rng)
                copy = ["cp", "-a"] if how == 3 else ["rsync", "-a"]
                subprocess.run([*copy, source, branch], stderr=subprocess.DEVNULL)
                shutil.rmtree(source)
            old = sorted(branch.glob(f"{name}-*"), key=lambda p: p.stat().st_mtime)
            for directory in old[:-KEPT]:
                shutil.rmtree(directory)


def look(mnt, rng):
    """Reads versions until it is ended."""
    seen = 0
    while True:
        for branch in sorted(p for p in (mnt / "versions").iterdir()):
            versions = [p for p in branch.iterdir() if p.name.isdigit()]
            # The newest, and any.
            for version in {max(versions), rng.choice(versions)} if versions else ():
                check_version(version, rng)
                seen += 1
        print(seen, flush=True)


if __name__ == "__main__":
    verb, mnt, seed, *more = sys.argv[1:]
    if verb == "write":
        write(Path(mnt, "staging", more[0]), more[1], random.Random(int(seed)))
    else:
        look(Path(mnt), random.Random(int(seed)))
