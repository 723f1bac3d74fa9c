#!/usr/bin/env python3
"""A client of the peer protocol (PROTOCOL.md) with nothing but the standard library: it decodes no codec and needs no store.

It audits replicas, and pulls objects and files of versions. What it is given is checked against the digest that was asked for; no
peer is believed. PEER is DIR, HOST:DIR or ssh://HOST[:PORT]/DIR, unix:SOCKET, tcp:127.0.0.1:PORT or tls:HOST:PORT.
"""
import argparse
import collections
import contextlib
import hashlib
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

# Also where Python looks nowhere but in its own library.
sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))

from peer_wire import (  # noqa: E402
    FRAME, LINE, TREE, PIECE, REFS, LOG, OBJECT, RECORDS, READ, CHECK, REFS_ARE, LOG_IS, OBJECT_IS, RECORDS_ARE, BYTES,
    STATE, Failure, Absent, Wrong, Usage, shown, varint, Reader, Peer, way, described,
)


def digest(tag, data):
    return hashlib.sha256(tag + b"\0" + data).digest()


def record_id(scale, payload):
    return hashlib.blake2b(bytes([scale]) + payload, digest_size=12).digest()


class Fold:
    """The records' ids of bytes that come in order: what is not in a record above is a root."""

    def __init__(self):
        self.atom, self.levels = b"", [[]]

    def update(self, data):
        data = self.atom + data
        whole = len(data) // 32 * 32
        self.atom = data[whole:]
        self.levels[0] += [record_id(0, data[at:at + 32]) for at in range(0, whole, 32)]
        scale = 0
        while len(self.levels[scale]) >= 3:
            level, scale = self.levels[scale], scale + 1
            if scale == len(self.levels):
                self.levels.append([])
            whole = len(level) // 3 * 3
            self.levels[scale] += [record_id(scale, b"".join(level[at:at + 3])) for at in range(0, whole, 3)]
            del level[:whole]

    def roots(self):
        if self.atom:
            self.update(bytes(32 - len(self.atom)))
        return [root for level in reversed(self.levels) for root in level]


class Manifest:
    """What pins an object. Its id is that of the whole of it."""

    def __init__(self, peer, ident):
        self.target = b"\0" + ident
        answer = peer.one(OBJECT, self.target, OBJECT_IS)
        raw = answer.rest()
        if hashlib.sha256(raw).digest() != ident:
            raise Wrong("the object's manifest is another one")
        answer = Reader(raw)
        answer.need(answer.take(16) == b"zspace.object.1\0", "no manifest of an object")
        self.length, self.sha256 = int.from_bytes(answer.take(8), "little"), answer.take(32)
        self.atoms = -(-self.length // 32)
        # The places (scale, index) of the roots, in their order.
        self.places = [(s, n) for s in range(37, -1, -1) for n in range(self.records(s + 1) * 3, self.records(s))]
        self.roots = [answer.take(12) for _ in self.places]
        answer.end()

    def records(self, scale):
        return self.atoms // 3**scale

    def challenge(self, peer):
        """Has the peer prove a few leaves that it could not know beforehand, each with all records up to its root."""
        wanted = {}
        for leaf in random.SystemRandom().sample(range(self.atoms), min(4, self.atoms)):
            place = (0, leaf)
            while place not in wanted:
                wanted[place] = None
                if place in self.places:
                    break
                place = (place[0] + 1, place[1] // 3)
        if not wanted:
            return
        asked = b"".join(bytes([scale]) + varint(index) for scale, index in wanted)
        answer = peer.one(RECORDS, self.target + varint(len(wanted)) + asked, RECORDS_ARE)
        for scale, index in wanted:
            raw = answer.take(49 if scale else 45)
            if raw[0] != scale or record_id(scale, raw[13:]) != raw[1:13]:
                raise Wrong(f"record {index} of scale {scale} is wrong")
            wanted[scale, index] = raw
        answer.end()
        roots = dict(zip(self.places, self.roots))
        for (scale, index), raw in wanted.items():
            at = 13 + index % 3 * 12
            above = roots.get((scale, index)) or wanted[scale + 1, index // 3][at:at + 12]
            if raw[1:13] != above:
                raise Wrong(f"record {index} of scale {scale} is not the one that the record above it, or the manifest, names")


def refs(peer):
    """(is a tag, name, version or None, how many of its own) of each, in the order of the names."""
    after, seen, more = "", 0, True
    while more:
        answer = peer.one(REFS, varint(len(after)) + after.encode(), REFS_ARE)
        more, count = answer.flag(), answer.count(LINE - seen)
        answer.need(count or not more)
        seen += count
        found = []
        for _ in range(count):
            tag, name = answer.flag(), answer.text(255)
            answer.need(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name), "a branch or tag with a name that cannot be")
            answer.need(name > after, "branches and tags in a wrong order")
            version = answer.take(32) if answer.flag() else None
            own, after = answer.count(LINE), name
            answer.need(not (own if tag or not version else 0) and (version or not tag))
            answer.blob(4096)  # a signature
            found.append((tag, name, version, own))
        answer.end()
        yield from found


def log(peer, head):
    """The root directory of a version, of the one before it, and so on."""
    while head:
        try:
            answer = peer.one(LOG, head + b"\0", LOG_IS)
        except Absent as absent:
            raise Absent(f"no version {head.hex()}: it {absent}") from None
        more, count = answer.flag(), answer.count(LINE)
        answer.need(count)
        found = []
        for _ in range(count):
            raw = answer.blob()
            answer.need(head, "a version that is nobody's parent")
            if digest(b"zspace.version.1", raw) != head:
                raise Wrong(f"version {head.hex()[:8]} is another one")
            version = Reader(raw)
            parents = [version.take(32) for _ in range(version.count(len(raw) // 32))]
            version.blob()
            version.time()
            version.text()
            found.append(version.take(32))
            version.varint()
            version.end()
            head = parents[0] if parents else None
        answer.end()
        answer.need(more == bool(head), "a history that does not go on as it says")
        yield from found


@contextlib.contextmanager
def tree(peer, ident):
    """(name, kind, what it is) of each entry of a directory."""
    hashed, total, size = hashlib.sha256(b"zspace.tree.1\0"), 0, 1_000_000
    with tempfile.SpooledTemporaryFile(FRAME) as file:
        while size == 1_000_000:
            answer = peer.one(READ, b"\2\4" + ident + varint(total) + varint(1_000_000) + b"\0", BYTES)
            answer.need(answer.u8() == 0 and answer.left <= 1_000_000)
            size, data = answer.left, answer.rest()
            total += size
            answer.need(total <= TREE, "a directory that is too large")
            hashed.update(data)
            file.write(data)
        if hashed.digest() != ident:
            raise Wrong(f"tree {ident.hex()[:8]} is another one")
        yield entries(Reader(file))


def entries(data):
    last = b""
    for _ in range(data.varint()):
        name = data.blob(255)
        data.need(name > last and name not in (b".", b"..") and not {b"/"[0], 0} & set(name), "a directory with wrong names")
        last, attribute = name, b""
        data.need(data.varint() <= 0o7777)
        data.time()
        for _ in range(data.varint()):
            before, attribute = attribute, data.blob()
            data.need(attribute > before)
            data.blob(TREE)
        kind = data.take(1)
        if kind == b"f":
            value = data.take(32), data.varint()
            data.varint()
        elif kind == b"d":
            value = data.take(32)
            data.varint()
        else:
            data.need(kind == b"l")
            value = data.blob()
        yield name, kind, value
    data.end()


def resolve(peer, rev):
    """The root directory of a version by its id, BRANCH, BRANCH/NUMBER or TAG."""
    if re.fullmatch(r"[0-9a-f]{64}", rev):
        return next(log(peer, bytes.fromhex(rev)))
    name, slash, number = rev.partition("/")
    for tag, found, version, own in refs(peer):
        if found != name:
            continue
        if slash and (tag or not number.isdecimal() or not 1 <= int(number) <= own):
            raise Failure(f"no version {shown(rev)}" + ("" if tag else f": {name} has {own} of its own"))
        if not version:
            raise Failure(f"{name} has no version")
        found = next(itertools.islice(log(peer, version), own - int(number) if slash else 0, None), None)
        if not found:
            raise Failure(f"{name} has not the {own} versions that it is said to have")
        return found
    raise Failure(f"no branch or tag {shown(name)}")


@contextlib.contextmanager
def output(path):
    """A file to write to, which comes to where it belongs only if nothing was wrong."""
    if path is None:
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    part = f"{path}.part"
    with open(part, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise


def pull(peer, target, length, sha256, path, roots=None):
    hashed, fold, pieces = hashlib.sha256(), Fold(), range(0, length, PIECE)
    sizes = lambda: (min(PIECE, length - at) for at in pieces)
    asked = ((READ, target + varint(at) + varint(size) + b"\0", BYTES) for at, size in zip(pieces, sizes()))
    with output(path) as file:
        for size, answer in zip(sizes(), peer.ask(asked)):
            answer.need(answer.u8() == 0, "bytes in a coding that was not asked for")
            answer.need(answer.left == size, f"{answer.left} bytes in place of {size}")
            data = answer.rest()
            hashed.update(data)
            if roots is not None:
                fold.update(data)
            file.write(data)
        if hashed.digest() != sha256:
            raise Wrong("the bytes have another SHA-256")
        if roots is not None and fold.roots() != roots:
            raise Wrong("the bytes have other records than the manifest says")


def do_object(peer, ident, path):
    manifest = Manifest(peer, ident)
    pull(peer, manifest.target, manifest.length, manifest.sha256, path, manifest.roots)


def do_file(peer, rev, names, path):
    kind, value = b"d", resolve(peer, rev)
    for name in names:
        if kind != b"d":
            raise Failure("a part of the path is no directory")
        with tree(peer, value) as found:
            kind, value = {n: (k, v) for n, k, v in found if n == name}.get(name, (None, None))
        if kind is None:
            raise Failure(f"no {shown(os.fsdecode(name))} in this version")
    if kind != b"f":
        raise Failure("it is a directory" if kind == b"d" else f"it is a symbolic link to {shown(os.fsdecode(value))}")
    sha256, length = value
    pull(peer, b"\1" + sha256 + varint(length), length, sha256, path)


def do_refs(peer):
    for tag, name, version, own in refs(peer):
        print("tag   " if tag else "branch", name, version.hex() if version else "-", *([] if tag else [own]))
    sys.stdout.flush()


def judge(check):
    """What a replica is, and why. That it says so itself is not enough."""
    kind, ident, _, connect, options = check
    try:
        with Peer(connect, options.timeout) as peer:
            answer = peer.one(CHECK, bytes([kind == "version"]) + ident, STATE)
            state = answer.u8()
            answer.need(state < 3)
            why = shown(answer.text()) if state == 2 else ""
            answer.end()
            if state:
                raise Absent(f"is damaged there: {why}" if state == 2 else "is not there")
            if kind == "object":
                Manifest(peer, ident).challenge(peer)
            else:
                with tree(peer, next(log(peer, ident))) as found:
                    collections.deque(found, 0)
    except (Absent, Wrong) as error:
        return "stale", str(error)
    except (Failure, OSError, ValueError) as error:
        return "unknown", described(error)
    return "verified", ""


def do_audit(options):
    with open(0 if options.checks == "-" else options.checks, encoding="utf-8", errors="surrogateescape") as file:
        lines = [line.split("#")[0].split() for line in file]
    checks = []
    for number, words in enumerate(lines, 1):
        if words and (len(words) < 3 or words[0] not in ("object", "version")):
            raise Usage(f"line {number}: `object ID PEER …` or `version ID PEER …` is needed")
        checks += [(words[0], identifier(words[1]), peer, way(peer, options), options) for peer in words[2:]]
    if not checks:
        raise Usage("nothing to check")
    states = set()
    with ThreadPoolExecutor(min(32, len(checks))) as pool:
        for (kind, ident, peer, *_), (state, why) in zip(checks, pool.map(judge, checks)):
            print(state, kind, ident.hex()[:8], peer, *([why] if why else []), flush=True)
            states.add(state)
    return 3 if "stale" in states else 2 if "unknown" in states else 0


def identifier(text):
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise Usage(f"{shown(text)}: an id has 64 hex digits")
    return bytes.fromhex(text)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Usage(message)


def seconds(text):
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError
    return value


def main():
    parser = Parser(prog="peer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=seconds, default=120, metavar="S", help="seconds that a peer may be silent")
    parser.add_argument("--tls", default=os.environ.get("ZSPACE_TLS"), metavar="DIR", help="cert.pem, key.pem and peers.pem")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("audit", help="check what replicas have: exit code 3 if something is stale, 2 if unknown")
    verb.add_argument("checks", metavar="CHECKS", help="a file, or -: lines `object ID PEER …`, `version ID PEER …`")
    for name, what, about in (("object", "ID", "pull an object"), ("file", "REV:PATH", "pull a file of a version")):
        verb = verbs.add_parser(name, help=about)
        verb.add_argument("peer", metavar="PEER")
        verb.add_argument("what", metavar=what)
        verb.add_argument("-o", dest="output", metavar="FILE")
    verbs.add_parser("refs", help="list branches and tags").add_argument("peer", metavar="PEER")
    try:
        sys.stdout.reconfigure(errors="surrogateescape")
        options = parser.parse_args()
        if options.verb == "audit":
            return do_audit(options)
        connect = way(options.peer, options)
        if options.verb == "object":
            what = [do_object, identifier(options.what), options.output]
        elif options.verb == "file":
            rev, colon, path = options.what.partition(":")
            names = [os.fsencode(name) for name in path.split("/")]
            if not rev or {b"", b".", b".."} & set(names):
                raise Usage(f"{shown(options.what)}: REV:PATH is needed")
            what = [do_file, rev, names, options.output]
        else:
            what = [do_refs]
        with Peer(connect, options.timeout) as peer:
            what[0](peer, *what[1:])
        return 0
    except KeyboardInterrupt:
        os._exit(130)  # without waiting for peers that are still asked
    except (Failure, OSError, ValueError) as error:
        print(f"peer.py: {described(error)}", file=sys.stderr)
        return getattr(error, "code", 1)


if __name__ == "__main__":
    sys.exit(main())
