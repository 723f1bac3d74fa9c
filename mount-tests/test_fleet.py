"""Many replicas: audits, and pulls that go on with the next one."""
import json
import os
import shutil
import socket
import subprocess
import threading

import pytest

from files import noise
from peers import Proxy, Server, heads, store


@pytest.fixture
def fleet(tmp_path):
    """Three stores with one version and one object each, all the same; the ids of these."""
    first = store(tmp_path / "a")
    (tmp_path / "m.bin").write_bytes(noise(3_000_000, 5))
    version = first.commit(tmp_path / "m.bin")[0][2]
    made = first.out("object", "put", tmp_path / "m.bin").strip()
    stores = [first]
    for name in "bc":
        stores.append(store(tmp_path / name))
        stores[-1].run("pull", first.store, "--objects-too")
    return stores, version, made


def damage(which, times=20):
    """Flips bytes all over the packs."""
    for pack in (which.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for n in range(times):
            data[len(data) * (2 * n + 1) // (2 * times)] ^= 0x10
        pack.write_bytes(data)


def silent():
    """A port on which somebody takes connections and says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"tcp:127.0.0.1:{listener.getsockname()[1]}"


def test_audit_tells_verified_stale_and_unknown_apart(fleet, tmp_path):
    (a, b, c), version, made = fleet
    checks = tmp_path / "checks"
    auditor = store(tmp_path / "nowhere")

    def audit(*lines, code, **options):
        checks.write_text("# what should be where\n" + "\n".join(lines) + "\n")
        done = auditor.run("audit", checks, *options.get("more", ()), ok=False)
        assert done.returncode == code, done.stdout + done.stderr
        return [line.split()[0] for line in done.stdout.splitlines()]

    all_three = f"{a.store} {b.store} {c.store}"
    both = (f"object {made} {all_three}", f"version {version} {all_three}")
    assert audit(*both, code=0) == ["verified"] * 6
    # Of one nothing is there, and one is not there at all.
    empty = store(tmp_path / "empty")
    empty.run("init")
    assert audit(f"version {version} {a.store} {empty.store}", code=3) == ["verified", "stale"]
    assert audit(f"version {version} {a.store} {tmp_path}/gone", code=2) == ["verified", "unknown"]
    listener, mute = silent()
    assert audit(f"object {made} {mute} {a.store}", code=2, more=("--timeout", 2)) == ["unknown", "verified"]
    listener.close()
    damage(b)
    damage(c, times=1)
    assert audit(*both, code=3) == ["verified", "stale", "stale"] * 2
    assert audit(both[0], f"object {made} {tmp_path}/gone", code=3)[-1] == "unknown"
    wrong = auditor.run("audit", checks.with_name("none"), ok=False)
    assert wrong.returncode == 1
    for nothing in ("object 12 here\n", "# nothing\n"):
        checks.write_text(nothing)
        assert auditor.run("audit", checks, ok=False).returncode == 64
    # How much of it was proved is told.
    checks.write_text(f"version {version} {a.store}\n")
    (proved,) = auditor.json_lines("audit", checks)
    assert proved["why"] == "3000000 of 3000000 bytes proved, in 1 files"
    assert (proved["proved"], proved["bytes"]) == (3_000_000, 3_000_000)
    # Nobody is believed: nothing proved is not verified.
    done = auditor.run("audit", checks, "--read", "1M", "--json", ok=False)
    (unproved,) = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 2 and unproved["state"] == "unknown" and "--read" in unproved["why"]
    assert (unproved["proved"], unproved["bytes"]) == (0, 3_000_000)
    # As some editors write it.
    checks.write_bytes(b"\xef\xbb\xbf" + checks.read_bytes().replace(b"\n", b"\r\n"))
    assert auditor.run("audit", checks).returncode == 0
    checks.write_bytes(b"version \xff\n")
    assert auditor.run("audit", checks, ok=False).returncode == 64
    assert not auditor.store.exists()


def test_a_pull_goes_on_with_the_next_replica(fleet, tmp_path):
    (a, b, c), _, _ = fleet
    damage(b)
    server = Server(a, "--tcp", "127.0.0.1:0")
    cut = Proxy(server.address, cut=1_500_000)
    listener, mute = silent()
    here = store(tmp_path / "here")
    peers = [f"{tmp_path}/gone", str(b.store), mute, cut.address]
    more = [word for peer in [*peers[1:], str(c.store)] for word in ("--or", peer)]
    done = here.run("pull", peers[0], *more, "--timeout", 2)
    assert done.stderr.count("the next one is asked") == 4 and f"from {c.store}" in done.stdout
    assert heads(here) == heads(a)
    here.verify()
    # All of them fail.
    failed = here.run("pull", peers[0], "--or", mute, "--timeout", 1, ok=False)
    assert failed.returncode == 1 and "silent" in failed.stderr
    listener.close()
    cut.close()
    server.stop()


def test_who_is_slow_is_given_up(fleet, tmp_path):
    (a, _, c), _, _ = fleet
    server = Server(a, "--tcp", "127.0.0.1:0")
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = server.address.removeprefix("tcp:").rsplit(":", 1)
    stop = threading.Event()

    def trickle():
        client, _ = listener.accept()
        upstream = socket.create_connection((host, int(port)))
        threading.Thread(target=Proxy.pump, args=(client, upstream, None), daemon=True).start()
        while not stop.wait(0.02):
            data = upstream.recv(1000)
            if not data:
                break
            try:
                client.sendall(data)
            except OSError:
                break
        upstream.close()

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    here = store(tmp_path / "here")
    slow = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    done = here.run("pull", slow, "--or", c.store, "--slowest", "10M")
    assert "slow" in done.stderr and heads(here) == heads(a)
    stop.set()
    thread.join()
    listener.close()
    server.stop()


def quarantined(which):
    return sorted(p.name for p in (which.store / "quarantine").iterdir())


def test_repair_leaves_nothing_that_verify_tells(fleet, series):
    """Damage where the index cannot help: it is gone too, headers are hit, a whole pack is missing."""
    (a, b, _), _, _ = fleet
    for path in series("shipped"):
        a.commit(path)
    b.run("pull", a.store)

    def index_gone():
        for run in (b.store / "index").glob("*.run"):
            run.unlink()

    def flipped(pack, step):
        data = bytearray(pack.read_bytes())
        for at in range(step, len(data), step):
            data[at] ^= 0x10
        pack.write_bytes(data)

    def largest():
        return max((b.store / "packs").iterdir(), key=lambda p: p.stat().st_size)

    def repaired():
        assert b.run("verify", ok=False).returncode == 3
        done = b.json("repair", a.store)
        assert done["repaired"] > 0 and done["left"] == [], done
        b.verify()
        assert heads(b) == heads(a)
        assert b.json("repair", a.store)["repaired"] == 0

    index_gone()
    flipped(largest(), 20_000)
    repaired()
    flipped(largest(), 997)
    repaired()
    index_gone()
    largest().unlink()
    repaired()
    pack = largest()
    os.truncate(pack, pack.stat().st_size // 2)
    repaired()


def test_two_that_have_a_part_each_make_a_whole(fleet, series):
    """The base of a delta is right here and damaged there, the delta the other way round."""
    (a, b, c), _, _ = fleet
    for path in series("shipped"):
        a.commit(path)
    b.run("pull", a.store)
    c.run("pull", a.store)
    right = heads(a)
    for which, rest in ((b, 0), (c, 1)):
        for pack in (which.store / "packs").iterdir():
            data, at = bytearray(pack.read_bytes()), 40
            while at < len(data):
                assert data[at : at + 2] == b"\x9e\x5a"
                meta, payload = data[at + 3], int.from_bytes(data[at + 4 : at + 8], "little")
                if data[at + 8] % 4 == rest:
                    data[at + 44 + meta] ^= 0x10
                at += 48 + meta + payload
            pack.write_bytes(data)
        assert which.run("verify", ok=False).returncode == 3
    # What one lacks the other has, though it may not be able to rebuild it.
    for _ in range(3):
        done = [x.run("repair", y.store, ok=False) for x, y in ((b, c), (c, b))]
        if [d.returncode for d in done] == [0, 0]:
            break
    assert [d.returncode for d in done] == [0, 0], [d.stdout + d.stderr for d in done]
    b.verify()
    c.verify()
    assert heads(b) == heads(c) == right


def test_repair_fetches_what_is_damaged_and_keeps_the_bad_bytes(fleet, series, tmp_path):
    (a, b, c), _, _ = fleet
    for path in series("shipped"):
        a.commit(path)
    for which in (b, c):
        which.run("pull", a.store)
    size = b.json("stats")["packs"]
    damage(b, times=1)
    damaged = b.run("verify", ok=False)
    assert damaged.returncode == 3
    # Nothing to be had from one that has the same damage, or none of it.
    other = store(tmp_path / "empty")
    other.run("init")
    nothing = b.run("repair", other.store, ok=False)
    assert nothing.returncode == 3 and "left: chunk" in nothing.stdout
    done = b.json("repair", f"{tmp_path}/gone", other.store, c.store)
    assert done["repaired"] > 0 and done["left"] == []
    # Only what is damaged came.
    assert done["received"] < size / 2
    b.verify()
    assert heads(b) == heads(a)
    kept = quarantined(b)
    assert len(kept) == done["repaired"] and all((b.store / "quarantine" / name).stat().st_size for name in kept)
    assert b.json("repair", c.store)["repaired"] == 0
    assert quarantined(b) == kept
    damage(b)
    b.run("repair", a.store)
    b.verify()
    # Each of three, two of them damaged in other places, gets right again by the others.
    damage(c, times=7)
    damage(b, times=13)
    for which, peers in ((c, (b, a)), (b, (c, a))):
        which.run("repair", *(p.store for p in peers))
        which.verify()
        assert heads(which) == heads(a)


@pytest.mark.parametrize("how", ["missing", "truncated", "zeros"])
def test_repair_of_a_pack(fleet, tmp_path, how):
    (a, b, _), _, made = fleet
    for pack in (b.store / "packs").iterdir():
        match how:
            case "missing":
                pack.unlink()
            case "truncated":
                pack.write_bytes(pack.read_bytes()[: pack.stat().st_size // 3])
            case "zeros":
                pack.write_bytes(bytes(pack.stat().st_size))
    assert b.run("verify", ok=False).returncode == 3
    done = b.json("repair", a.store)
    assert done["repaired"] > 0
    b.verify()
    assert b.run("object", "get", made, text=False).stdout == (tmp_path / "m.bin").read_bytes()


def test_a_peer_that_lies_repairs_nothing(fleet, tmp_path):
    (a, b, c), _, _ = fleet
    damage(c)
    damage(b, times=5)
    done = b.run("repair", c.store, ok=False)
    assert done.returncode == 3 and "left: " in done.stdout
    assert b.json("repair", c.store, a.store)["left"] == []
    b.verify()


def test_signed_branches(tmp_path, series):
    """Who pulls or serves with allowed signers takes what they signed, nothing else, and nothing older; ssh-keygen agrees."""
    there, here, relay = (store(tmp_path / name) for name in ("there", "here", "relay"))
    for who in ("me", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / who], check=True)
    signers = tmp_path / "signers"
    signers.write_text("me@here " + (tmp_path / "me.pub").read_text())
    first, second = series("shipped")[:2]
    there.commit(first)
    old = store(tmp_path / "old")
    old.run("pull", there.store)
    unsigned = here.run("pull", there.store, "--signers", signers, ok=False)
    assert unsigned.returncode == 1 and "not signed" in unsigned.stderr and heads(here) == {"main": []}
    there.run("sign", "main", "--key", tmp_path / "other")
    assert "nobody who may" in here.run("pull", there.store, "--signers", signers, ok=False).stderr
    there.run("sign", "main", "--key", tmp_path / "me")
    here.run("pull", there.store, "--signers", signers)
    # ssh-keygen checks it too.
    head = there.json_lines("log", "main")[0]["id"]
    (signature,) = (here.store / "signatures").iterdir()
    verify = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "me@here", "-n", "zspace-branch", "-s", signature]
    subprocess.run(verify, input=f"zspace branch main is {head}\n", text=True, check=True, capture_output=True)
    # A key that nobody would take does not take the place of one that they would.
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-N", "", "-f", tmp_path / "rsa"], check=True)
    refused = there.run("sign", "main", "--key", tmp_path / "rsa", ok=False)
    assert refused.returncode == 64 and "ed25519" in refused.stderr
    # Nobody signs tags.
    there.run("tag", "best", "main/1")
    assert "best" not in relay.out("pull", there.store, "--signers", signers)
    assert "best" in relay.out("pull", there.store)
    # The next version is not signed, and then it is.
    there.commit(second)
    assert here.run("pull", there.store, "--signers", signers, ok=False).returncode == 1
    assert "main" in here.out("pull", there.store)
    there.run("sign", "main", "--key", tmp_path / "me")
    relay.run("pull", there.store, "--signers", signers)
    here.run("pull", relay.store, "--signers", signers)
    mirror = store(tmp_path / "mirror")
    mirror.run("pull", relay.store, "main:up", "--signers", signers)
    # One that went back to what was signed before.
    shutil.copytree(here.store / "signatures", old.store / "signatures")
    for puller, names in ((here, []), (mirror, ["main:up"]), (mirror, ["main"]), (mirror, ["main:again"])):
        back = puller.run("pull", old.store, *names, "--signers", signers, ok=False)
        assert back.returncode == 1 and "rolled back" in back.stderr
    # A server that takes only what is signed.
    server = Server(store(tmp_path / "served"), "--tcp", "127.0.0.1:0", "--signers", signers)
    here.run("push", server.address)
    assert heads(store(tmp_path / "served")) == heads(here)
    (tmp_path / "more").write_bytes(b"more")
    here.commit(tmp_path / "more")
    assert "not signed" in here.run("push", server.address, ok=False).stderr
    put = here.out("object", "put", tmp_path / "more").strip()
    assert "nobody signs objects" in here.run("push", server.address, "--object", put, ok=False).stderr
    server.stop()
