"""Files and directories as values that can be compared."""
import hashlib
import os
import re
import stat

import numpy as np


def natural(path):
    """Sorts checkpoint-9 before checkpoint-10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def noise(size, seed=0):
    """Bytes that do not compress, the same for each seed."""
    return np.random.default_rng(seed).bytes(size)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def snapshot(path, times=True):
    """What is at `path`: for each relative name its kind, mode, mtime (for files) and content."""
    found = {}

    def add(full, name):
        info = os.lstat(full)
        if stat.S_ISLNK(info.st_mode):
            found[name] = ("link", os.readlink(full))
        elif stat.S_ISDIR(info.st_mode):
            found[name] = ("directory", stat.S_IMODE(info.st_mode))
            for child in sorted(os.listdir(full)):
                add(os.path.join(full, child), os.path.join(name, child))
        else:
            mtime = info.st_mtime_ns if times else None
            found[name] = ("file", stat.S_IMODE(info.st_mode), mtime, info.st_size, sha256(full))

    path = os.fsencode(path)
    add(path, os.path.basename(path))
    return found
