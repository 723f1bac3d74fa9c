#!/usr/bin/env python3
"""ZipNN on one thread: bytes in memory to bytes in memory, what lies behind the header of a .safetensors file.

usage: zipnn_alone.py FILE [bfloat16|float32]      prints JSON: raw, stored, encode and decode seconds (each the faster of two)
"""
import json
import sys
import time

from library import read, tensors
from pathlib import Path

from zipnn import ZipNN


def main(path, dtype="bfloat16"):
    places = sorted((offset, length) for _, offset, length, _, _ in tensors(Path(path)))
    data = b"".join(read(path, *place) for place in places)
    encoding, decoding = [], []
    for _ in range(2):
        scratch = bytearray(data)  # compress() reorders its input in place
        codec = ZipNN(bytearray_dtype=dtype, threads=1)
        start = time.perf_counter()
        stored = codec.compress(scratch)
        encoding.append(time.perf_counter() - start)
        codec = ZipNN(bytearray_dtype=dtype, threads=1)
        start = time.perf_counter()
        back = codec.decompress(stored)
        decoding.append(time.perf_counter() - start)
        assert back == data, "ZipNN did not give back what it was given"
    print(json.dumps({"raw": len(data), "stored": len(stored), "encode": min(encoding), "decode": min(decoding)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
