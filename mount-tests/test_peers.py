"""Pull, push and serve between real processes: over every way, cut off, refused, and seen through a mount."""
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest
import torch

from files import noise, sha256
from peers import BINARY, Proxy, certificate, heads, openssh, store
from zspace import eventually


@pytest.fixture
def there(zspace, series, tmp_path):
    """A store with a series, and another to fill."""
    for path in series("shipped"):
        zspace.commit(path)
    return zspace


@pytest.fixture
def here(tmp_path):
    return store(tmp_path / "here")


def same(here, there):
    assert heads(here) == heads(there)
    here.verify()


def test_a_pull_is_seen_through_a_mount(there, here, series, tmp_path, mounts):
    here.run("init")
    there.run("tag", "best", "main/1")
    mount = mounts()
    other = store(tmp_path / "other")
    assert "new version" in other.out("pull", there.store)
    # Into the mounted store, from the one that has it from there.
    more = series("long")[0]
    other.commit(more)
    pulled = mount.zspace.json("pull", other.store)
    assert pulled["branches"][0]["new"] == 1
    latest = eventually(lambda: mount.versions()[len(series("shipped")):], "the pulled version is listed")
    assert sha256(mount.version(latest[-1]) / more.name) == sha256(more)
    assert os.readlink(mount.path / "versions/main/latest") == f"{latest[-1]:06}"
    same(mount.zspace, other)
    assert [line.split()[0] for line in other.out("tag").splitlines()] == ["best"]


def test_pull_and_push_over_ssh(there, here, tmp_path):
    os.environ["ZSPACE_SSH"] = openssh(tmp_path)
    os.environ["ZSPACE_REMOTE"] = str(BINARY)
    try:
        peer = f"localhost:{there.store}"
        assert "received" in here.out("pull", peer)
        same(here, there)
        (tmp_path / "more.bin").write_bytes(noise(50_000, 3))
        here.commit(tmp_path / "more.bin")
        here.run("push", peer)
        same(here, there)
        # Where there is no store one is made; where nothing can be made it says so.
        strange = f"localhost:{tmp_path}/it's a store"
        here.run("push", strange)
        same(store(tmp_path / "it's a store"), here)
        # Who only looks for one makes none.
        looked = store(tmp_path / "looked").run("pull", f"localhost:{tmp_path}/none", ok=False)
        assert looked.returncode == 1 and "no store" in looked.stderr and not (tmp_path / "none").exists()
        failed = here.run("push", "localhost:/proc/nowhere", ok=False)
        assert failed.returncode == 1 and "/proc/nowhere" in failed.stderr
        assert "nothing new" in here.out("pull", f"ssh://localhost{there.store}")
        # What may be the matter is told, and where.
        os.environ["ZSPACE_REMOTE"] = "zspace-that-is-nowhere"
        missing = here.run("pull", peer, ok=False)
        assert missing.returncode == 1 and "$ZSPACE_REMOTE" in missing.stderr and peer in missing.stderr
        os.environ["ZSPACE_REMOTE"] = f"echo Welcome; {BINARY}"
        noisy = here.run("pull", peer, ok=False)
        assert noisy.returncode == 1 and "print nothing at login" in noisy.stderr
    finally:
        del os.environ["ZSPACE_SSH"], os.environ["ZSPACE_REMOTE"]


def test_sockets(there, here, serve, tmp_path):
    unix = serve(there, "--unix", tmp_path / "s")
    assert oct((tmp_path / "s").stat().st_mode & 0o777) == "0o600"
    here.run("pull", unix.address)
    same(here, there)
    refused = here.run("push", unix.address, "main:latest", ok=False)
    assert refused.returncode != 0 and "latest" in refused.stderr
    messages = unix.stop()
    assert "hung up" in messages and not (tmp_path / "s").exists()
    tcp = serve(there, "--tcp", "127.0.0.1:0", "--read-only")
    assert "nothing new" in here.out("pull", tcp.address)
    (tmp_path / "x").write_bytes(b"x")
    here.commit(tmp_path / "x")
    refused = here.run("push", tcp.address, ok=False)
    assert refused.returncode == 1 and "read-only" in refused.stderr
    # Others than this machine could listen in.
    for address in ("tcp:192.0.2.1:7000", "tcp:0.0.0.0:7000"):
        assert "tls:" in here.run("pull", address, ok=False).stderr
    assert "plain TCP" in here.run("serve", "--tcp", "0.0.0.0:0", ok=False).stderr
    # A socket that a killed server left is taken over.
    left = serve(there, "--unix", tmp_path / "t")
    left.kill()
    serve(there, "--unix", tmp_path / "t")


def test_tls_takes_only_those_it_knows(there, here, serve, tmp_path):
    certs = {name: certificate(tmp_path / name, name) for name in ("server", "friend", "stranger")}
    (tmp_path / "server/peers.pem").write_text(certs["friend"])
    for name in ("friend", "stranger"):
        (tmp_path / name / "peers.pem").write_text(certs["server"])
    server = serve(there, "--tls-listen", "127.0.0.1:0", "--tls", tmp_path / "server")
    here.run("pull", server.address, "--tls", tmp_path / "friend")
    same(here, there)
    here.run("push", server.address, "--tls", tmp_path / "friend")
    for who, why in (("stranger", ""), ("nobody", "cert.pem")):
        refused = store(tmp_path / "empty").run("pull", server.address, "--tls", tmp_path / who, ok=False)
        assert refused.returncode in (1, 64) and why in refused.stderr, refused.stderr
    # One that says it is the server and is not.
    (tmp_path / "stranger/peers.pem").write_text(certs["friend"])
    false = serve(there, "--tls-listen", "127.0.0.1:0", "--tls", tmp_path / "stranger")
    refused = store(tmp_path / "empty").run("pull", false.address, "--tls", tmp_path / "friend", ok=False)
    assert refused.returncode == 1 and "certificate" in refused.stderr
    # Without TLS.
    plain = server.address.replace("tls:", "tcp:")
    assert store(tmp_path / "empty").run("pull", plain, "--timeout", 3, ok=False).returncode != 0
    assert heads(store(tmp_path / "empty")) == {"main": []}
    assert "hung up" in server.stop()


def test_who_went_another_way_is_told_what_to_do(there, here, tmp_path):
    here.run("pull", there.store)
    for which in (there, here):
        own = tmp_path / f"{which.store.name}.bin"
        own.write_bytes(noise(1000, len(str(which.store))))
        which.commit(own)
    before = heads(there), heads(here)
    for verb in ("pull", "push"):
        refused = here.run(verb, there.store, ok=False)
        assert refused.returncode == 1 and "another way" in refused.stderr
    assert (heads(there), heads(here)) == before
    here.run("pull", there.store, "main:theirs")
    assert here.json_lines("log", "theirs")[0]["id"] == there.json_lines("log", "main")[0]["id"]
    here.verify()
    wrong = here.run("pull", there.store, "main:other", "--expect", "0" * 64, ok=False)
    assert wrong.returncode == 1 and "expected" in wrong.stderr and "other" not in heads(here)


def test_one_refused_branch_does_not_keep_the_others(there, here, tmp_path):
    here.run("pull", there.store)
    for which in (there, here):
        own = tmp_path / f"{which.store.name}.bin"
        own.write_bytes(noise(1000, len(str(which.store))))
        which.commit(own)
    here.run("branch", "exp", "main/1")
    here.commit(own, "--branch", "exp")
    pushed = here.run("push", there.store, ok=False)
    assert pushed.returncode == 1 and "main: refused: " in pushed.stdout and "exp: at " in pushed.stdout
    assert heads(there)["exp"] == heads(here)["exp"]
    told = json.loads(here.run("push", there.store, "--json", ok=False).stdout)
    assert [b[0] for b in told["branches"]] == ["exp"] and [r[0] for r in told["refused"]] == ["main"]
    pulled = here.run("pull", there.store, ok=False)
    assert pulled.returncode == 1 and "name the other branches" in pulled.stderr
    # Where there was no store, it is told that one was made.
    assert "made a store" in here.run("push", tmp_path / "new").stderr


def test_who_waits_for_a_silent_peer_can_be_interrupted(here):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        process = subprocess.Popen(here.command("pull", address), stderr=subprocess.PIPE, text=True)
        client, _ = listener.accept()
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=30)
        assert process.returncode == 130 and time.monotonic() - start < 10, messages
        client.close()


def test_a_transfer_that_is_cut_goes_on(here, serve, series, tmp_path):
    there = store(tmp_path / "there")
    for n in range(4):
        (tmp_path / f"{n}.bin").write_bytes(noise(3_000_000, n))
        there.commit(tmp_path / f"{n}.bin")
    server = serve(there, "--tcp", "127.0.0.1:0")
    total = 0
    for n in range(3):
        proxy = Proxy(server.address, cut=3_500_000)
        cut = here.run("pull", proxy.address, ok=False)
        proxy.close()
        assert cut.returncode == 1 and "hung up" in cut.stderr, cut.stderr
        assert heads(here) == {"main": []}
        here.verify()
        total += 3_500_000
    last = here.json("pull", server.address)
    same(here, there)
    assert total + last["received"] < 12_000_000 * 1.3
    server.stop()


def test_a_killed_pull_leaves_nothing_half(here, serve, tmp_path):
    there = store(tmp_path / "there")
    (tmp_path / "big.bin").write_bytes(noise(100_000_000))
    there.commit(tmp_path / "big.bin")
    server = serve(there, "--tcp", "127.0.0.1:0")
    here.run("init")
    for _ in range(6):
        process = subprocess.Popen(here.command("pull", server.address), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        time.sleep(random.random() * 0.3)
        process.kill()
        process.wait()
        here.verify()
    here.run("pull", server.address)
    same(here, there)
    # What the killed ones left is given back.
    here.run("repack")
    assert here.json("stats")["packs"] < 101_000_000
    server.stop()


def test_a_killed_pull_goes_on(here, serve, tmp_path):
    there = store(tmp_path / "there")
    (tmp_path / "big.bin").write_bytes(noise(60_000_000))
    there.commit(tmp_path / "big.bin")
    server = serve(there, "--tcp", "127.0.0.1:0")
    slow = Proxy(server.address, rate=10_000_000)
    process = subprocess.Popen(here.command("pull", slow.address), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    time.sleep(4.5)
    process.kill()
    process.wait()
    slow.close()
    # What came is kept every two seconds.
    assert here.json("pull", server.address)["received"] < 50_000_000
    same(here, there)
    server.stop()


def test_many_receivers_at_once_and_a_stop_in_between(there, serve, tmp_path):
    server = serve(there, "--tcp", "127.0.0.1:0", "--peers", 8)
    stores = [store(tmp_path / f"s{n}") for n in range(6)]
    pulls = [subprocess.Popen(s.command("pull", server.address), stdout=subprocess.DEVNULL) for s in stores]
    assert [p.wait() for p in pulls] == [0] * 6
    for s in stores:
        same(s, there)
    # More than may be served at once: those who only sit there do not keep the others out for ever.
    idle = [socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) for _ in range(8)]
    busy = stores[0].run("pull", server.address, "--timeout", 5, ok=False)
    assert busy.returncode == 1
    for s in idle:
        s.close()
    eventually(lambda: stores[0].run("pull", server.address, ok=False).returncode == 0, "there is room again")
    idle = socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])))
    start = time.monotonic()
    messages = server.stop()
    assert time.monotonic() - start < 8 and "refused: 8 peers" in messages
    idle.close()


def test_garbage_is_answered_with_an_error_and_others_are_served_meanwhile(there, here, serve):
    server = serve(there, "--tcp", "127.0.0.1:0")
    port = int(server.address.rsplit(":", 1)[1])
    stop = threading.Event()

    def garble():
        rng = random.Random(1)
        while not stop.is_set():
            with socket.create_connection(("127.0.0.1", port)) as s:
                try:
                    s.sendall(rng.choice((b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(100), b"\xff" * 9, b"\0\0\0\0", b"\1")))
                    s.shutdown(socket.SHUT_WR)
                    while s.recv(4096):
                        pass
                except OSError:
                    pass

    thread = threading.Thread(target=garble)
    thread.start()
    for n in range(5):
        here.run("pull", server.address)
        shutil.rmtree(here.store) if n < 4 else None
    stop.set()
    thread.join()
    same(here, there)
    server.stop()


def test_objects_travel_by_their_records(zspace, tmp_path):
    old = noise(1 << 20, 1)
    new = bytearray(old)
    new[-512:] = noise(512, 2)
    here = store(tmp_path / "here")
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    here.run("object", "put", tmp_path / "old")
    made = zspace.out("object", "put", tmp_path / "new").strip()
    pulled = here.json("pull", zspace.store, "--object", made)
    assert (pulled["records"], pulled["record_bytes"], pulled["nodes"]) == (22, 1014, 0)
    assert here.run("object", "get", made, text=False).stdout == bytes(new)
    wrong = here.run("pull", zspace.store, "--object", "f" * 64, ok=False)
    assert wrong.returncode == 1 and "no object" in wrong.stderr
    # Pushed the other way, and all of them.
    other = store(tmp_path / "other")
    other.run("init")
    here.run("push", other.store, "--objects-too")
    assert len(other.json_lines("object", "ls")) == 2
    other.verify()


def test_torch_loads_what_was_pulled(zspace, here, tmp_path, mounts):
    state = {"w": torch.randn(50, 70), "b": torch.arange(9)}
    torch.save(state, tmp_path / "model.pt")
    sender = store(tmp_path / "sender")
    sender.commit(tmp_path / "model.pt")
    zspace.run("pull", sender.store)
    mount = mounts()
    loaded = torch.load(mount.version(1) / "model.pt")
    assert torch.equal(loaded["w"], state["w"]) and torch.equal(loaded["b"], state["b"])
