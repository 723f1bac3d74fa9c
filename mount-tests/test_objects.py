"""Exact byte objects through the command line, against a fold of our own that follows the words of docs/FORMAT.md."""
import hashlib
import re
import struct

import pytest

from files import noise


def blake(scale, payload):
    return hashlib.blake2b(bytes([scale]) + payload, digest_size=12).digest()


def fold(data):
    """The records of each scale, and the ids of the roots in order."""
    atoms = [data[at:at + 32].ljust(32, b"\0") for at in range(0, len(data), 32)]
    levels, roots = [[blake(0, atom) for atom in atoms]], []
    while levels[-1]:
        below, scale = levels[-1], len(levels)
        levels.append([blake(scale, b"".join(below[n:n + 3])) for n in range(0, len(below) - 2, 3)])
        roots = below[len(levels[-1]) * 3:] + roots
    return levels, roots


def object_id(data):
    _, roots = fold(data)
    return hashlib.sha256(b"zspace.object.1\0" + struct.pack("<Q", len(data)) + hashlib.sha256(data).digest() + b"".join(roots)).hexdigest()


def put(zspace, path):
    return zspace.out("object", "put", path).strip()


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 96, 32_768, 100_003])
def test_an_object_has_the_id_that_its_bytes_give_and_comes_back(zspace, tmp_path, size):
    data = noise(size, size)
    (tmp_path / "data").write_bytes(data)
    made = put(zspace, tmp_path / "data")
    assert made == object_id(data)
    assert zspace.run("object", "get", made[:8], text=False).stdout == data
    zspace.run("object", "get", made, "-o", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data
    assert "exists" in zspace.run("object", "get", made, "-o", tmp_path / "out", ok=False).stderr.lower()
    shown = zspace.json("object", "show", made)
    assert shown["roots"] == [root.hex() for root in fold(data)[1]]
    assert "1 objects" in zspace.verify()
    assert zspace.json_lines("object", "ls")[0]["id"] == made


def test_what_is_put_again_is_there_once(zspace, tmp_path):
    (tmp_path / "data").write_bytes(noise(200_000, 1))
    first = zspace.json("object", "put", tmp_path / "data")
    before = zspace.json("stats")["packs"]
    second = zspace.json("object", "put", tmp_path / "data")
    assert (first["new"], second["new"], second["stored"]) == (True, False, 0)
    assert zspace.json("stats")["packs"] == before
    assert len(zspace.json_lines("object", "ls")) == 1


def test_any_file_of_any_version_is_an_object(zspace, series):
    source = series("shipped")[0]
    zspace.commit(source)
    data = source.read_bytes()
    spec = f"main:{source.name}"
    assert zspace.json("object", "show", spec)["id"] == object_id(data)
    got = zspace.run("object", "range", spec, "1000..70000", text=False)
    assert got.stdout == data[1000:70_000]
    assert zspace.json_lines("object", "ls") == []
    # Now it is an object by its id, too, without a second copy.
    before = zspace.json("stats")["packs"]
    assert put(zspace, source) == object_id(data)
    assert zspace.json("stats")["packs"] - before < 1000


def test_a_proof_needs_no_store_and_says_what_it_proves(zspace, tmp_path):
    data = noise(32_768, 2)
    (tmp_path / "data").write_bytes(data)
    made, proof = put(zspace, tmp_path / "data"), tmp_path / "proof"
    said = zspace.run("object", "prove", made, "50..73", "-o", proof).stderr
    assert "2 leaves, 8 records, 384 bytes" in said
    elsewhere = type(zspace)(tmp_path / "no-store")
    got = elsewhere.run("object", "range", made, "50..73", "--proof", proof, text=False)
    assert got.stdout == data[50:73] and b"not the whole object" in got.stderr
    assert not (tmp_path / "no-store").exists()
    # More than it proves, and another object.
    missing = elsewhere.run("object", "range", made, "50..100", "--proof", proof, ok=False)
    assert missing.returncode == 1 and "is missing" in missing.stderr and missing.stdout == ""
    other = elsewhere.run("object", "range", object_id(b"x"), "0..1", "--proof", proof, ok=False)
    assert other.returncode == 3 and "is about the object" in other.stderr
    short = elsewhere.run("object", "range", made[:8], "50..73", "--proof", proof, ok=False)
    assert short.returncode == 64 and "64 hex digits" in short.stderr
    whole = tmp_path / "whole"
    zspace.run("object", "prove", made, f"0..{len(data)}", "-o", whole)
    assert whole.stat().st_size < 70_972 + 500
    got = elsewhere.run("object", "range", made, f"0..{len(data)}", "--proof", whole, text=False)
    assert got.stdout == data and b"the whole object is verified" in got.stderr


def test_every_flipped_byte_of_a_proof_is_found(zspace, tmp_path):
    (tmp_path / "data").write_bytes(noise(5000, 3))
    made = put(zspace, tmp_path / "data")
    zspace.run("object", "prove", made, "100..110", "-o", tmp_path / "proof")
    proof = bytearray((tmp_path / "proof").read_bytes())
    for at in range(0, len(proof), 7):
        bad = proof.copy()
        bad[at] ^= 1 << at % 8
        (tmp_path / "bad").write_bytes(bad)
        done = zspace.run("object", "range", made, "100..110", "--proof", tmp_path / "bad", ok=False)
        assert done.returncode in (1, 3) and done.stdout == "", (at, done)
    for length in (0, 1, 20, len(proof) - 1):
        (tmp_path / "bad").write_bytes(proof[:length])
        assert zspace.run("object", "range", made, "100..110", "--proof", tmp_path / "bad", ok=False).returncode in (1, 3)


def test_wrong_names_and_ranges_are_told(zspace, tmp_path):
    (tmp_path / "data").write_bytes(b"abc")
    made = put(zspace, tmp_path / "data")
    for arguments, code, text in (
        (["get", "0" * 64], 1, "no object"),
        (["range", made, "2..4"], 64, "not within"),
        (["prove", made, "4..9"], 64, "not within"),
        (["show", "main:x"], 1, "no version"),
        (["put", tmp_path], 64, "no regular file"),
        (["put", tmp_path / "none"], 1, "none"),
    ):
        done = zspace.run("object", *arguments, ok=False)
        assert done.returncode == code and text in done.stderr, (arguments, done)


def test_standard_input_can_be_put(zspace):
    data = noise(70_000, 5)
    done = zspace.run("object", "put", "-", input=data, text=False)
    assert done.stdout.decode().strip() == object_id(data)
    assert not list(zspace.store.glob("input-*"))


def test_damage_of_an_object_is_named(zspace, tmp_path):
    data = noise(300_000, 6)
    (tmp_path / "data").write_bytes(data)
    made = put(zspace, tmp_path / "data")
    pack = next((zspace.store / "packs").iterdir())
    raw = bytearray(pack.read_bytes())
    raw[len(raw) // 2] ^= 1
    pack.write_bytes(raw)
    done = zspace.run("verify", ok=False)
    assert done.returncode == 3 and f"object {made[:8]}" in done.stdout
    assert zspace.run("object", "get", made, "-o", tmp_path / "out", ok=False).returncode == 3
    assert not (tmp_path / "out").exists()


def test_a_kept_fold_is_used_and_never_believed(zspace, tmp_path):
    data = noise(3_000_000, 7)
    (tmp_path / "data").write_bytes(data)
    made = put(zspace, tmp_path / "data")
    first = zspace.run("object", "prove", made, "2000000..2000023", text=False).stdout
    [kept] = (zspace.store / "folds").iterdir()
    assert re.fullmatch(rf"{hashlib.sha256(data).hexdigest()}-3000000", kept.name)
    assert kept.stat().st_size < 3_000_000 * 0.0008
    assert zspace.run("object", "prove", made, "2000000..2000023", text=False).stdout == first
    raw = bytearray(kept.read_bytes())
    raw[100] ^= 1
    kept.write_bytes(raw)
    assert zspace.run("object", "prove", made, "2000000..2000023", text=False).stdout == first
