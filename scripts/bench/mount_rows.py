"""The rows of the benchmark of the mount. Each generator works in an empty directory and gives the rows of one subject."""
import json
import os
import shutil
import struct
from pathlib import Path

from measure import Failed, files, same_files, warm
from mount_tools import Row, cached, client, dirty, in_turn, mounted, must_be_cached, prepare, say, timed

BLOCK = 16 << 20
# Seconds that a commit of the big file may take.
PATIENCE = 600


def random_file(path, size):
    with open(path, "wb") as file:
        for at in range(0, size, BLOCK):
            file.write(os.urandom(min(BLOCK, size - at)))
    os.sync()
    return path


def touch(size):
    """Half of what is free, at most: what others have in the page cache is left alone."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    prepare("touch", min(size, int(fields["MemFree"].split()[0]) * 512))


def stage(mount, source):
    """Copies a file into staging, and waits for its version; its path there, and a copy on the disk instead of the file.

    The page cache keeps what was written in large writes in large pages, which are read and mapped far faster: both copies are
    written alike.
    """
    beside = source.with_name(f"beside-{source.name}")
    for target in (beside, mount.staging() / source.name):
        timed(["cp", "--reflink=never", source, target])
    source.unlink()
    return mount.wait_for(1, seconds=PATIENCE) / source.name, beside


def whole_file(store, size):
    """The file in STORE/cache that holds a version's only file; it comes there right after the commit."""
    from zspace import eventually

    cache = store / "cache"
    found = eventually(
        lambda: [p for p in cache.glob("*") if p.name != "lock" and p.stat().st_size == size],
        f"{cache} has a file of {size} bytes: the version lies whole in it",
    )
    return found[0]


def keep_in_small_pages(path):
    """Has the page cache hold a file, which is clean, in single pages: so they come where they are read one by one."""
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset in range(0, os.fstat(file.fileno()).st_size, 4096):
            os.pread(file.fileno(), 4096, offset)


def is_through(path):
    """After a read: the kernel read the backing file, so the mount's own inode has nothing in the page cache."""
    if cached(path) > 0.01:
        raise Failed(f"{path}: the mount's own pages were read, this is no passthrough")


def hot(what, path, pages, **options):
    """Runs a client on a file whose pages, which are those of the file `pages`, are all in the page cache."""
    warm(pages)
    must_be_cached(pages)
    return client(what, path, **options)


def warm_rows(head, path, pages, source, options, goals):
    """Sequential reads and a summed mapping of a warm version against the same file on the disk."""
    size = source.stat().st_size
    for what, name, goal in (("read", "read() by 1 MiB", goals[0]), ("map-sum", "mapped and summed", goals[1])):
        found = in_turn(options.runs, lambda: hot(what, path, pages), lambda: hot(what, source, source))
        yield Row(f"{head}, {shown(size)}: {name}", "the file on disk, cached", goal, "speed", *found, size=size)


def big(work, options):
    """Rows 1 and 2: a large version of random bytes, warm."""
    source, store, mnt = random_file(work / "big.bin", options.size), work / "store", work / "mnt"
    touch(2 * options.size)
    with mounted(store, mnt) as mount:
        path, beside = stage(mount, source)
        if "1" in options.only:
            whole = whole_file(store, options.size)
            yield from warm_rows("1. whole in the cache, passthrough", path, whole, beside, options, (0.82, 0.8))
            is_through(path)
    if "2" in options.only:
        shutil.rmtree(store / "cache")  # as much of the page cache is needed otherwise
        with mounted(store, mnt, no_passthrough=True, cache=0) as mount:
            path = mount.version(1) / source.name
            head = "2. no passthrough, kernel's cache"
            yield from warm_rows(head, path, path, beside, options, (0.7, 0.7))
            # The kernel keeps a disk's file in large folios if memory allows, a FUSE file's never; a mapping costs less of the former.
            keep_in_small_pages(beside)
            found = in_turn(options.runs, lambda: hot("map-sum", path, path), lambda: hot("map-sum", beside, beside))
            name, other = "mapped and summed", "the file on disk, cached in pages of 4 KiB"
            yield Row(f"{head}, {shown(options.size)}: {name}", other, 0.7, "speed", *found, size=options.size)


def shown(size):
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 1e6:.3g} MB" if size >= 1e5 else f"{size / 1e3:.3g} kB"


def history(work, options):
    """A store with a series, each checkpoint a version; made once if it is to be kept. (store, checkpoints)"""
    from zspace import Zspace

    store, checkpoints = options.store or work / "series", options.series.checkpoints()
    zspace = Zspace(store)
    done = len(zspace.out("log", "main", "--json").splitlines()) if (store / "journal").exists() else 0
    for number, checkpoint in enumerate(checkpoints[done:], done + 1):
        say(f"commit {number} of {len(checkpoints)}")
        zspace.run("commit", checkpoint, timeout=PATIENCE)
    return zspace, checkpoints


def warm_packs(store):
    packs = files(store / "packs")
    warm(store / "packs")
    must_be_cached(*(p for p in packs if p.stat().st_size))


def cold(zspace, checkpoints, work, options):
    """Row 3: the first read of a version after mounting against `zspace cat`."""
    last = len(checkpoints)
    for number in sorted({1, (last + 1) // 2, last}):
        checkpoint = checkpoints[number - 1]
        cat = zspace.command("cat", f"main/{number}:{checkpoint.name}")
        size = checkpoint.stat().st_size
        with mounted(zspace.store, work / "mnt", cache=0) as mount:
            same_files(mount.version(number) / checkpoint.name, checkpoint)

        def through():
            warm_packs(zspace.store)
            with mounted(zspace.store, work / "mnt", cache=0) as mount:
                return client("read", mount.version(number) / checkpoint.name)

        found = in_turn(options.runs, through, lambda: (timed(cat), size))
        what = f"3. cold read of version {number} of {last}, {shown(size)}"
        yield Row(what, "`zspace cat` > /dev/null", 0.7, "speed", *found, size=size)


def copies(work, options):
    """Row 4: cp into staging against cp to the same disk."""
    source, store, mnt, target = random_file(work / "big.bin", options.size), work / "store", work / "mnt", work / "copy.bin"
    touch(3 * options.size)
    left = []
    with mounted(store, mnt, settle=PATIENCE) as mount:
        staged = mount.staging() / source.name

        def copy(to):
            warm(source)
            to.unlink(missing_ok=True)
            os.sync()
            left.append(dirty())
            seconds = timed(["cp", "--reflink=never", source, to])
            seen = to.stat().st_size
            to.unlink()
            return seconds, seen

        found = in_turn(options.runs, lambda: copy(staged), lambda: copy(target))
    row = Row(f"4. cp into staging, {shown(options.size)}", "cp to the same disk", 0.9, "speed", *found, size=options.size)
    row.notes.append(f"row 4: at most {max(left) / 1e6:.0f} MB were dirty in the page cache before a copy, after `sync`")
    yield row


# What row 5 loads: deed, name, of what the time may be so many times that of the file on disk, memory filled for each byte.
LOADS = {
    "pt": [
        ("torch-load", "torch.load", 1.25, 1),
        ("torch-load-map", "torch.load(mmap=True)", 1.25, 0),
        ("torch-load-map-sum", "the same, every byte summed", 1.6, 0),
    ],
    "safetensors": [
        ("safe-open-all", "safe_open, all tensors", 1.25, 0),
        ("safe-open-sum", "the same, every byte summed", 1.6, 0),
    ],
    "npy": [("np-load-map-sum", 'np.load(mmap_mode="r").sum()', 1.6, 0)],
}


def loads(work, options):
    """Row 5: what loads a checkpoint, on a warm version and on the file on disk."""
    checkpoint = options.series.checkpoints()[-1]
    for suffix, deeds in LOADS.items():
        here = work / suffix
        here.mkdir()
        source, store = here / f"model.{suffix}", here / "store"
        make = {"pt": "make-torch", "npy": "make-npy"}.get(suffix)
        prepare(make, checkpoint, source) if make else shutil.copyfile(checkpoint, source)
        size = source.stat().st_size
        touch(2 * size)
        with mounted(store, here / "mnt") as mount:
            path, beside = stage(mount, source)
            whole = whole_file(store, size)
            for what, name, goal, fill in deeds:
                fills = fill * size
                found = in_turn(
                    options.runs,
                    lambda: hot(what, path, whole, fill=fills),
                    lambda: hot(what, beside, beside, fill=fills),
                )
                is_through(path)
                title = f"5. warm .{suffix}, {shown(size)}: {name}"
                yield Row(title, "the file on disk, cached", goal, "time", *found)
        shutil.rmtree(here)


def spans(checkpoint):
    """A small, a middle and a large tensor of a safetensors file: (name, from, to) in the file."""
    with open(checkpoint, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    every = sorted((b - a, name, 8 + length + a, 8 + length + b) for name, t in header.items() for a, b in [t["data_offsets"]])
    half, below, middle = sum(one[0] for one in every) / 2, 0, None
    # The middle one: half of all bytes are in those that are smaller.
    for one in every:
        below += one[0]
        if below >= half:
            middle = one
            break
    chosen = [next(one for one in every if one[0]), middle, every[-1]]
    return [one[1:] for one in dict.fromkeys(chosen)]


def one_tensor(zspace, checkpoints, work, options):
    """Row 6: one tensor of the last version right after mounting against the rebuild of its chunks alone."""
    last, checkpoint = len(checkpoints), checkpoints[-1]
    entry = f"main/{last}:{checkpoint.name}"

    def rebuild(begin, end):
        """What the range adds to a process that rebuilds none of it: the least of three, as either is short."""
        least = [
            min(timed(zspace.command("cat", entry, "--range", f"{begin}..{to}")) for _ in range(3)) for to in (begin, end)
        ]
        return least[1] - least[0]

    for name, begin, end in spans(checkpoint):
        whole, seen = client("safe-open-one", checkpoint, name)
        ways = {
            "safe_open().get_tensor(), summed": ("safe-open-one", "versions", checkpoint.name, [name]),
            "np.load(), summed": ("np-load", "arrays", f"{checkpoint.name}/{name}.npy", []),
        }
        for title, (what, door, path, more) in ways.items():

            def through():
                warm_packs(zspace.store)
                with mounted(zspace.store, work / "mnt", cache=0) as mount:
                    return client(what, mount.version(last, door=door) / path, *more, fill=2 * (end - begin))

            found = in_turn(options.runs, through, lambda: (rebuild(begin, end), seen))
            title = f"6. one tensor of {shown(end - begin)} of version {last}, cold: {title}"
            yield Row(title, "rebuilding its chunks", 0.02, "plus", *found)
