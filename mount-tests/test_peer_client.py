"""scripts/peer.py, a client in another language that was written from PROTOCOL.md alone, against real servers and false ones."""
import contextlib
import hashlib
import os
import socket
import struct
import subprocess
import threading

import pytest

from files import noise
from peers import BINARY, Proxy, certificate, openssh, store
from zspace import ROOT

WAYS = ["directory", "unix", "tcp", "tls", "ssh"]
SIZES = [0, 1, 33, 32_768, 3_000_001]
HELLO, REFS_ARE, LOG_IS, MISSING, OBJECT_IS, RECORDS_ARE, BYTES, STATE = 0x01, 0x20, 0x21, 0x24, 0x25, 0x27, 0x29, 0x2A


def peer(*args, env=None, **options):
    """The client, with a store's program and nothing of this environment's Python."""
    command = ["/usr/bin/env", "python3", "-I", str(ROOT / "scripts/peer.py"), *map(str, args)]
    options = {"capture_output": True, "text": True, "timeout": 100} | options
    done = subprocess.run(command, env=os.environ | {"ZSPACE_BIN": str(BINARY)} | (env or {}), **options)
    assert "Traceback" not in str(done.stderr), done.stderr
    return done


def fails(code, text, *args, **options):
    """It must fail with one line that has `text` in it, and write nothing else."""
    done = peer(*args, **options)
    assert done.returncode == code and done.stdout == "", done
    assert done.stderr.startswith("peer.py: ") and done.stderr.count("\n") == 1 and text in done.stderr, done.stderr


class Liar(Proxy):
    """Passes the frames of a server on, changed: `change(type, body)` gives a body, or all bytes to send with True, or None."""

    def __init__(self, address, change):
        self.change = change
        super().__init__(address)

    def connect(self, client, server):
        threading.Thread(target=self.there, args=(client, server), daemon=True).start()
        threading.Thread(target=self.back, args=(server, client), daemon=True).start()

    @staticmethod
    def there(client, server):
        try:
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def back(self, server, client):
        try:
            with server.makefile("rb") as frames:
                while head := frames.read(5):
                    length, kind = struct.unpack("<IB", head)
                    body = self.change(kind, frames.read(length - 1))
                    if isinstance(body, tuple):
                        client.sendall(body[0])
                    elif body is not None:
                        client.sendall(struct.pack("<IB", len(body) + 1, kind) + body)
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # to close is not enough while another thread reads


def flipped(kind, at=-1):
    """Flips a bit of every frame of a type."""

    def change(found, body):
        if found != kind:
            return body
        body = bytearray(body)
        body[at] ^= 4
        return bytes(body)

    return change


def instead(kind, data):
    """Sends other bytes in place of the frames of a type."""
    return lambda found, body: (data,) if found == kind else body


def hang_up(kind, body):
    if kind == REFS_ARE:
        raise OSError
    return body


@pytest.fixture
def lie(tcp):
    running = []

    def start(change):
        running.append(Liar(tcp, change))
        return running[-1].address

    yield start
    for liar in running:
        liar.close()


@pytest.fixture
def there(zspace, tmp_path):
    """A store with an object of each size, and versions: main/1 a directory, main/2 and main/3 files, fork/1."""
    tree = tmp_path / "model"
    (tree / "a b/deep").mkdir(parents=True)
    (tree / "a b/deep/größe.bin").write_bytes(noise(3_000_001, 9))
    (tree / "config.json").write_bytes(b"{}")
    (tree / "empty").write_bytes(b"")
    (tree / "link").symlink_to("config.json")
    zspace.objects = {}
    for size in SIZES:
        (tmp_path / f"{size}").write_bytes(noise(size, size))
        zspace.objects[size] = zspace.out("object", "put", tmp_path / f"{size}").strip()
    zspace.ids = [made[0][2] for made in (zspace.commit(tree), zspace.commit(tmp_path / "33"), zspace.commit(tmp_path / "1"))]
    zspace.run("tag", "best", "main/2")
    zspace.run("branch", "fork", "main/1")
    zspace.run("commit", "--branch", "fork", tmp_path / "32768")
    zspace.fork = zspace.json_lines("log", "fork")[0]["id"]
    return zspace


@pytest.fixture
def tcp(there, serve):
    return serve(there, "--tcp", "127.0.0.1:0").address


@pytest.fixture
def way(there, serve, tmp_path):
    """What a peer is called over a way, and the environment that it needs."""

    def get(name):
        if name == "directory":
            return there.store, {}
        if name == "unix":
            return serve(there, "--unix", tmp_path / "socket").address, {}
        if name == "tcp":
            return serve(there, "--tcp", "127.0.0.1:0").address, {}
        if name == "ssh":
            strange = tmp_path / "it's $HOME"
            strange.symlink_to(there.store)
            return f"localhost:{strange}", {"ZSPACE_SSH": openssh(tmp_path), "ZSPACE_REMOTE": str(BINARY)}
        certs = {who: certificate(tmp_path / who, who) for who in ("server", "friend")}
        (tmp_path / "server/peers.pem").write_text(certs["friend"])
        (tmp_path / "friend/peers.pem").write_text(certs["server"])
        address = serve(there, "--tls-listen", "127.0.0.1:0", "--tls", tmp_path / "server").address
        return address, {"ZSPACE_TLS": str(tmp_path / "friend")}

    return get


@pytest.mark.parametrize("name", WAYS)
def test_every_way(there, way, tmp_path, name):
    address, env = way(name)
    listed = peer("refs", address, env=env)
    assert listed.returncode == 0, listed.stderr
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["tag", "best", there.ids[1]], ["branch", "fork", there.fork, "1"], ["branch", "main", there.ids[2], "3"]]  # fmt: skip
    got = peer("object", address, there.objects[3_000_001], env=env, text=False)
    assert got.stdout == noise(3_000_001, 3_000_001), got.stderr
    got = peer("file", address, "main/1:model/a b/deep/größe.bin", "-o", tmp_path / "out", env=env)
    assert got.returncode == 0 and (tmp_path / "out").read_bytes() == noise(3_000_001, 9), got.stderr
    if name == "ssh":
        assert peer("refs", f"ssh://localhost{there.store}", env=env).stdout == listed.stdout
    # Words of checks are divided by blanks.
    plain = f"localhost:{there.store}" if name == "ssh" else address
    (tmp_path / "checks").write_text(f"# all\n\nobject {there.objects[33]} {plain} # one\n")
    audited = peer("audit", tmp_path / "checks", env=env)
    assert audited.returncode == 0 and audited.stdout.startswith(f"verified object {there.objects[33][:8]} "), audited
    # What it could not do anything with.
    fails(1, "not there", "object", address, "0" * 64, env=env)
    fails(1, "no version", "file", address, f"{'0' * 64}:x", env=env)


def test_who_is_at_work_is_waited_for(there, lie, tmp_path):
    still = struct.pack("<IB", 1, 2)

    def busy(kind, body):
        return (3 * still if kind != HELLO else b"") + struct.pack("<IB", len(body) + 1, kind) + body,

    ident = there.objects[33]
    assert peer("object", lie(busy), ident, text=False).stdout == noise(33, 33)
    (tmp_path / "checks").write_text(f"object {ident} {lie(busy)}\n")
    assert peer("audit", tmp_path / "checks").returncode == 0
    assert there.run("audit", tmp_path / "checks").returncode == 0
    fails(1, "out of turn", "object", lie(lambda kind, body: body if kind == HELLO else (still[:4] + b"\3",)), ident)


def test_objects_of_all_sizes(there, tmp_path):
    for size, ident in there.objects.items():
        assert peer("object", there.store, ident, text=False).stdout == noise(size, size)
        (tmp_path / "out").write_bytes(b"before")
        assert peer("object", there.store, ident, "-o", tmp_path / "out").stdout == ""
        assert (tmp_path / "out").read_bytes() == noise(size, size)
    assert not (tmp_path / "out.part").exists()


def test_files_by_all_names_of_a_version(there):
    small = noise(33, 33)
    for spec, data in (
        ("main:1", noise(1, 1)), ("main/3:1", noise(1, 1)), ("main/2:33", small), ("best:33", small),
        (f"{there.ids[1]}:33", small),
        ("main/1:model/config.json", b"{}"), (f"{there.ids[0]}:model/empty", b""), ("fork:32768", noise(32_768, 32_768)),
        ("fork/1:32768", noise(32_768, 32_768)),
    ):  # fmt: skip
        got = peer("file", there.store, spec, text=False)
        assert got.returncode == 0 and got.stdout == data, (spec, got)
    for code, text, spec in (
        (1, "no version main/4", "main/4:1"), (1, "no version main/0", "main/0:1"), (1, "no version fork/2", "fork/2:x"),
        (1, "no version best/1", "best/1:33"), (1, "no branch or tag none", "none:x"), (1, "no x", "main:x"),
        (1, "is a directory", "main/1:model/a b"), (1, "symbolic link to config.json", "main/1:model/link"),
        (1, "no directory", "main:1/x"), (64, "REV:PATH", "main"), (64, "REV:PATH", "main:"), (64, "REV:PATH", "main:a//b"),
        (64, "REV:PATH", "main:../x"),
    ):  # fmt: skip
        fails(code, text, "file", there.store, spec)


def test_a_long_history_is_counted_back(zspace, tmp_path):
    for n in range(70):
        (tmp_path / "f").write_bytes(b"%d" % n)
        zspace.run("commit", "-m", "x" * 30_000, tmp_path / "f")
    for n in (1, 2, 35, 70):
        assert peer("file", zspace.store, f"main/{n}:f").stdout == str(n - 1)


def test_a_large_directory(zspace, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for n in range(8000):
        (many / f"{n:0250}").write_bytes(b"")
    (many / "z").write_bytes(b"last")
    zspace.commit(many)
    assert peer("file", zspace.store, "main:many/z").stdout == "last"


def test_wrong_usage(there, tmp_path):
    ident = there.objects[1]
    for text, args in (
        ("required", []), ("invalid", ["push"]), ("64 hex digits", ["object", there.store, ident[:8]]),
        ("plain TCP", ["refs", "tcp:192.0.2.1:7000"]), ("plain TCP", ["refs", "tcp:0.0.0.0:7000"]),
        ("HOST:PORT", ["refs", "tcp:x"]),
        ("plain TCP", ["refs", "tcp:localhost:7000"]),
        ("HOST:DIR", ["refs", "--", "-oProxyCommand=x:/dir"]), ("no PEER", ["refs", ""]),
        ("--tls", ["refs", "tls:localhost:1"]), ("timeout", ["--timeout", "0", "refs", there.store]),
    ):  # fmt: skip
        fails(64, text, *args, env={"ZSPACE_TLS": ""})
    for checks in ("object", f"object {ident}", f"thing {ident} x", "object 12 x", "# nothing", f"object {ident} -x:y"):
        fails(64, "", "audit", "-", input=f"{checks}\n")
    fails(1, "No such file", "audit", tmp_path / "none")
    fails(1, "no store", "refs", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    fails(1, "", "refs", "unix:/nowhere")
    fails(1, "No such file", "refs", there.store, env={"ZSPACE_BIN": "/nowhere/zspace"})
    fails(1, "it says why", "refs", there.store, env={"ZSPACE_BIN": script(tmp_path, "echo it says why >&2; exit 3")})
    fails(1, "is silent", "--timeout", 1, "refs", there.store, env={"ZSPACE_BIN": script(tmp_path, "exec sleep 60")})
    fails(1, "Is a directory", "object", there.store, ident, "-o", tmp_path / "model")


def script(tmp_path, text):
    path = tmp_path / f"program-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_tls_takes_only_whom_it_knows(there, serve, tmp_path):
    certs = {name: certificate(tmp_path / name, name) for name in ("server", "friend", "stranger")}
    (tmp_path / "server/peers.pem").write_text(certs["friend"])
    for name in ("friend", "stranger"):
        (tmp_path / name / "peers.pem").write_text(certs["server"])
    address = serve(there, "--tls-listen", "127.0.0.1:0", "--tls", tmp_path / "server").address
    assert peer("--tls", tmp_path / "friend", "refs", address).returncode == 0
    fails(1, "", "--tls", tmp_path / "stranger", "refs", address)
    fails(1, "No such file", "--tls", tmp_path / "nobody", "refs", address)
    (tmp_path / "friend/peers.pem").write_text(certs["stranger"])
    fails(1, "certificate", "--tls", tmp_path / "friend", "refs", address)


def test_an_audit_tells_replicas_apart(there, serve, lie, tcp, tmp_path):
    ident, version = there.objects[3_000_001], there.ids[0]
    empty, damaged = store(tmp_path / "empty"), store(tmp_path / "damaged")
    for other in (empty, damaged):
        other.run("init")
    damaged.run("pull", there.store, "--object", ident)
    damaged.run("pull", there.store)
    for pack in (damaged.store / "packs").iterdir():
        raw = bytearray(pack.read_bytes())
        for at in range(5000, len(raw), 100_000):
            raw[at] ^= 1
        pack.write_bytes(raw)
    nobody = f"unix:{tmp_path}/nobody"
    says_so = lie(lambda kind, body: b"\0" if kind == STATE else body)
    checks = f"object {ident} {there.store} {tcp}\nversion {version} {tcp} # and\nobject {there.objects[0]} {there.store}\n"
    done = peer("audit", "-", input=checks)
    short = f"verified object {ident[:8]}", f"verified version {version[:8]}", f"verified object {there.objects[0][:8]}"
    assert done.returncode == 0, done
    assert done.stdout == f"{short[0]} {there.store}\n{short[0]} {tcp}\n{short[1]} {tcp}\n{short[2]} {there.store}\n"
    # Something is not known.
    done = peer("--timeout", 3, "audit", "-", input=f"object {ident} {nobody} {tcp}\nversion {version} {nobody}\n")
    assert done.returncode == 2, done
    first, second, third = done.stdout.splitlines()
    assert first.startswith(f"unknown object {ident[:8]} {nobody} ")
    assert third.startswith(f"unknown version {version[:8]} {nobody} ")
    assert second == f"{short[0]} {tcp}"
    # Something is stale, whatever else is not known; who says that he has it must show it.
    fake = "5" * 64
    checks = f"object {ident} {damaged.store} {empty.store} {nobody}\n"
    checks += f"version {version} {damaged.store} {empty.store} {there.store}\n"
    done = peer("audit", "-", input=checks + f"object {fake} {says_so}\nversion {fake} {says_so}\n")
    assert done.returncode == 3, done
    lines = [line.split()[0] for line in done.stdout.splitlines()]
    assert lines == ["stale", "stale", "unknown", "stale", "stale", "verified", "stale", "stale"], done.stdout
    assert "is damaged" in done.stdout.splitlines()[0] and "is not there" in done.stdout.splitlines()[1]


def test_who_lies_in_an_audit_is_found(there, lie):
    ident, version = there.objects[3_000_001], there.ids[0]
    checks = []
    for what, reason, change in (
        ("object", "manifest", flipped(OBJECT_IS)), ("object", "record", flipped(RECORDS_ARE)),
        ("object", "record", flipped(RECORDS_ARE, 3)),
        ("object", "record", flipped(RECORDS_ARE, 0)), ("object", "not there", instead(RECORDS_ARE, b"\2\0\0\0\x24\0")),
        ("version", "version", flipped(LOG_IS)), ("version", "tree", flipped(BYTES)),
        ("version", "not found", instead(LOG_IS, b"\4\0\0\0\x2f\3\1x")),
    ):  # fmt: skip
        checks.append((what, "stale", reason, lie(change)))
    for what, reason, change in (
        ("object", "too short", lambda kind, body: body[:-1] if kind == RECORDS_ARE else body),
        ("object", "too long", lambda kind, body: body + b"x" if kind == RECORDS_ARE else body),
        ("object", "silent", lambda kind, body: None if kind == RECORDS_ARE else body),
        ("object", "out of turn", instead(STATE, b"\2\0\0\0\x28\0")), ("object", "malformed", instead(STATE, b"\2\0\0\0\x2a\3")),
        ("version", "busy: later", instead(STATE, b"\x0a\0\0\0\x2f\6\7la\x1bter\n")),
    ):  # fmt: skip
        checks.append((what, "unknown", reason, lie(change)))
    lines = [f"{what} {ident if what == 'object' else version} {address}\n" for what, _, _, address in checks]
    done = peer("--timeout", 3, "audit", "-", input="".join(lines))
    assert done.returncode == 3
    for line, (what, state, reason, address) in zip(done.stdout.splitlines(), checks, strict=True):
        assert line.split()[0] == state and reason in line.split(address)[1], (line, state, reason)


def test_who_lies_gives_nothing(there, lie, tmp_path):
    ident, out = there.objects[3_000_001], tmp_path / "out"
    file = "main/1:model/a b/deep/größe.bin"
    bytes_of_a_file = lambda kind, body: body[:-1] + b"x" if kind == BYTES and len(body) > 100_000 else body
    for text, args, change in (
        ("manifest", ["object", ident], flipped(OBJECT_IS)), ("SHA-256", ["object", ident], flipped(BYTES)),
        ("version", ["file", file], flipped(LOG_IS)), ("tree", ["file", file], flipped(BYTES)),
        ("SHA-256", ["file", file], bytes_of_a_file),
    ):  # fmt: skip
        for to in ([], ["-o", out]):
            fails(3, text, args[0], lie(change), args[1], *to)
            assert not out.exists() and not (tmp_path / "out.part").exists()
    for text, args, change in (
        ("a frame of 0 bytes", ["refs"], instead(HELLO, bytes(4))),
        ("a frame of 1048577 bytes", ["refs"], instead(REFS_ARE, struct.pack("<I", (1 << 20) + 1))),
        ("greeting", ["refs"], flipped(HELLO, 3)), ("too long", ["refs"], lambda kind, body: body + b"x"),
        ("a name that cannot be", ["refs"], lambda kind, body: body.replace(b"best", b"../t")),
        ("wrong order", ["refs"], lambda kind, body: body.replace(b"best", b"zest")),
        ("versions 2 to 3", ["refs"], lambda kind, body: body[:12] + b"\2\0\3\0" + body[16:] if kind == HELLO else body),
        ("malformed", ["refs"], instead(REFS_ARE, b"\3\0\0\0\x20\1\0")),
        ("malformed", ["refs"], instead(REFS_ARE, b"\4\0\0\0\x20\0\x80\0")),
        ("than the protocol allows", ["refs"], instead(REFS_ARE, b"\6\0\0\0\x20\0\x81\x80\x80\x7f")),
        ("hung up", ["refs"], hang_up),
        ("busy: x", ["refs"], instead(HELLO, b"\4\0\0\0\x2f\6\1x")),
        ("than the protocol allows", ["refs"], instead(REFS_ARE, struct.pack("<IB", 1005, 0x2F) + b"\6\xe9\7" + b"x" * 1001)),
        ("utf-8", ["refs"], instead(REFS_ARE, b"\4\0\0\0\x2f\6\1\xff")),
        ("silent", ["object", there.objects[33]], lambda kind, body: (b"\x10",) if kind == BYTES else body),
        ("in place of", ["object", ident], lambda kind, body: body[:-1] if kind == BYTES else body),
        ("coding", ["object", ident], lambda kind, body: b"\1" + body[1:] if kind == BYTES else body),
    ):  # fmt: skip
        fails(1, text, "--timeout", 2, args[0], lie(change), *args[1:], *(["-o", out] if args[1:] else []))
        assert not out.exists() and not (tmp_path / "out.part").exists()
