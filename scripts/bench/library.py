#!/usr/bin/env python3
"""The compared ways that are Python packages, or that are described rather than shipped. One process for each command.

usage: library.py WAY save STORE NUMBER CHECKPOINT [BEFORE]     puts a checkpoint (a file or a directory) into the store
       library.py WAY load STORE NUMBER CHECKPOINT [--check]    rebuilds it in memory; --check compares it with CHECKPOINT

WAY is xor-chain, xor-8, zipnn, moonclip or hf-xet. BEFORE is the checkpoint before, which is what xor-* make the difference
to. Prints JSON: seconds (imports not counted), the peak memory in bytes (Python and its imports counted), and for hf-xet the
bytes that a server would have got.
"""
import json
import os
import resource
import struct
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CORES = os.cpu_count()


def paths(checkpoint):
    """Its files, in the order of their names."""
    return sorted(p for p in checkpoint.rglob("*") if p.is_file()) if checkpoint.is_dir() else [checkpoint]


def pieces(checkpoint):
    """All bytes of a checkpoint as [name, file, offset, length, dtype, shape]: each tensor, and what lies between them."""
    found = []
    for path in paths(checkpoint):
        place = f"{path.relative_to(checkpoint)}:" if checkpoint.is_dir() else ""
        at, total = 0, path.stat().st_size
        for name, start, length, dtype, shape in sorted(tensors(path), key=lambda t: t[1]):
            if start > at:
                found.append((f"{place}before {name}", path, at, start - at, None, None))
            found.append((place + name, path, start, length, dtype, shape))
            at = start + length
        if at < total:
            found.append((f"{place}rest", path, at, total - at, None, None))
    return found


def tensors(path):
    """(name, offset, length, dtype, shape) of the tensors of a file; a torch file's are its members, taken as float32."""
    with open(path, "rb") as file:
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            for name, t in header.items():
                if name != "__metadata__":
                    start, end = t["data_offsets"]
                    yield name, 8 + length + start, end - start, t["dtype"], t["shape"]
        elif zipfile.is_zipfile(file):
            for member in zipfile.ZipFile(file).infolist():
                file.seek(member.header_offset + 26)
                name, extra = struct.unpack("<HH", file.read(4))
                if "/data/" in member.filename and member.compress_type == 0 and member.file_size:
                    inside = member.filename.split("/", 1)[1]
                    kind, width = ("F32", 4) if member.file_size % 4 == 0 else ("U8", 1)
                    yield inside, member.header_offset + 30 + name + extra, member.file_size, kind, [member.file_size // width]


def read(path, offset, length):
    with open(path, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), length, offset)
        while len(data) < length:  # one read gives 2 GiB at most
            data += os.pread(file.fileno(), length - len(data), offset + len(data))
        return data


def write(path, parts):
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


class Xor:
    """Each tensor XORed with that of the same name of the checkpoint before, then zstd -3; tensors go to all cores."""

    def __init__(self, store, full_every):
        import numpy
        import zstandard

        self.store, self.full_every, self.numpy, self.zstd = store, full_every, numpy, zstandard

    def file(self, number):
        return self.store / f"{number:06}.xor"

    def index(self, number):
        """name → (offset, stored bytes, bytes, whether it is a difference)"""
        path = self.file(number)
        (length,) = struct.unpack("<Q", read(path, 0, 8))
        index = json.loads(self.zstd.ZstdDecompressor().decompress(read(path, 8, length)))
        at, found = 8 + length, {}
        for name, stored, raw, difference in index:
            found[name] = (at, stored, raw, difference)
            at += stored
        return found

    def xor(self, a, b):
        return self.numpy.frombuffer(a, self.numpy.uint8) ^ self.numpy.frombuffer(b, self.numpy.uint8)

    def save(self, number, checkpoint, before=None):
        bases = {}
        if before and not (self.full_every and number % self.full_every == 0):
            bases = {piece[0]: piece[1:4] for piece in pieces(before)}

        def encode(piece):
            name, path, offset, length, *_ = piece
            data, base = read(path, offset, length), bases.get(name)
            difference = base is not None and base[2] == length
            if difference:
                data = self.xor(data, read(*base)).tobytes()
            return name, self.zstd.ZstdCompressor(level=3).compress(data), length, difference

        with ThreadPoolExecutor(CORES) as pool:
            done = list(pool.map(encode, pieces(checkpoint)))
        index = json.dumps([[name, len(blob), length, difference] for name, blob, length, difference in done]).encode()
        index = self.zstd.ZstdCompressor(level=3).compress(index)
        write(self.file(number), [struct.pack("<Q", len(index)), index, *(blob for _, blob, *_ in done)])

    def load(self, number, _):
        """The pieces in any order, as (name, bytes)."""
        chain = [self.index(number)]
        names, at = list(chain[0]), number
        while at and any(piece[3] for piece in chain[-1].values()):
            at -= 1
            chain.append(self.index(at))

        def rebuild(name):
            data = None
            for depth, index in enumerate(chain):
                offset, stored, raw, difference = index[name]
                blob = read(self.file(number - depth), offset, stored)
                part = self.zstd.ZstdDecompressor().decompress(blob, max_output_size=raw)
                data = part if data is None else self.xor(data, part)
                if not difference:
                    return name, data
            raise ValueError(f"{name}: no full copy")

        with ThreadPoolExecutor(CORES) as pool:
            yield from pool.map(rebuild, names)


class ZipNN:
    """The package's ZipNN(input_format="byte"), each file at once, on all cores; bfloat16 or float32 as the file has it."""

    def __init__(self, store):
        import zipnn

        self.store, self.zipnn = store, zipnn

    def codec(self, path):
        bf16 = any(t[3] == "BF16" for t in tensors(path))
        return self.zipnn.ZipNN(bytearray_dtype="bfloat16" if bf16 else "float32", threads=CORES)

    def save(self, number, checkpoint, _=None):
        for i, path in enumerate(paths(checkpoint)):
            data = read(path, 0, path.stat().st_size)
            data += bytes(-len(data) % 4)  # it writes past its buffers at other lengths
            write(self.store / f"{number:06}-{i}.znn", [self.codec(path).compress(data)])

    def load(self, number, checkpoint):
        for i, path in enumerate(paths(checkpoint)):
            stored = self.store / f"{number:06}-{i}.znn"
            data = self.codec(path).decompress(read(stored, 0, stored.stat().st_size))
            yield path, memoryview(data)[: path.stat().st_size]


class Moonclip:
    """MoonclipManager as it comes, but waiting for each save and never dropping an old one. Keeps tensors, not files."""

    def __init__(self, store):
        from moonclip import MoonclipManager

        keep = {"max_full_snapshots": 10**6, "max_total_snapshots": 10**7}
        self.store, self.manager = store, MoonclipManager(str(store), async_save=False, **keep)

    def save(self, number, checkpoint, _=None):
        every = {name: (shape, dtype, read(*place)) for name, *place, dtype, shape in pieces(checkpoint) if dtype}
        self.manager.save_tensors(number, every)
        self.manager.flush()

    def load(self, number, _):
        snapshot = next(s["id"] for s in self.manager.list_snapshots() if s["step"] == number)
        yield from self.manager.load(str(snapshot)).items()


class Xet:
    """An XetSession against a server that is a directory (endpoint local://…)."""

    def __init__(self, store):
        import hf_xet

        self.store, self.xet, self.session = store, hf_xet, hf_xet.XetSession()
        self.endpoint = f"local://{store}"

    def save(self, number, checkpoint, _=None):
        found, sent = [], 0
        for path in paths(checkpoint):
            commit = self.session.new_upload_commit(endpoint=self.endpoint)
            commit.start_upload_file(str(path))
            report = commit.wait_to_finish()
            sent += report.dedup_metrics.xorb_bytes_uploaded + report.dedup_metrics.shard_bytes_uploaded
            (upload,) = report.uploads.values()
            found.append((upload.xet_info.hash, upload.xet_info.file_size))
        (self.store / f"{number:06}.json").write_text(json.dumps(found))
        return {"sent": sent}

    def load(self, number, checkpoint):
        group = self.session.new_download_stream_group(endpoint=self.endpoint)
        for path, info in zip(paths(checkpoint), json.loads((self.store / f"{number:06}.json").read_text())):
            yield path, list(group.download_stream(self.xet.XetFileInfo(*info)))


WAYS = {
    "xor-chain": lambda store: Xor(store, 0),
    "xor-8": lambda store: Xor(store, 8),
    "zipnn": ZipNN,
    "moonclip": Moonclip,
    "hf-xet": Xet,
}


def compare(got, checkpoint):
    """What was rebuilt must be all pieces, or all files, of the checkpoint. For Moonclip, all tensors."""
    want = {name: place for name, *place, _, _ in pieces(checkpoint)}
    want |= {place[0]: (place[0], 0, place[0].stat().st_size) for place in want.values()}
    seen = 0
    for name, data in got:
        data = b"".join(data) if isinstance(data, list) else bytes(data)
        assert data == read(*want[name]), f"{name} is not what was saved"
        seen += len(data)
    total = sum(p.stat().st_size for p in paths(checkpoint))
    assert total * 0.95 < seen <= total, f"{seen} bytes of {total}"


def main(way, verb, store, number, checkpoint, *more):
    store, checkpoint = Path(store), Path(checkpoint)
    way = WAYS[way](store)
    start, said = time.perf_counter(), {}
    if verb == "save":
        said = way.save(int(number), checkpoint, *map(Path, more)) or {}
    else:
        got = way.load(int(number), checkpoint)
        if more == ("--check",):
            compare(got, checkpoint)
        else:
            for _ in got:
                pass
    seconds = time.perf_counter() - start
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "memory": memory} | said))


if __name__ == "__main__":
    main(*sys.argv[1:])
