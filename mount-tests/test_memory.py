"""Large files need little memory, and a small range of them little work."""
import json
import struct
import subprocess
import time

import numpy as np
import pytest

from files import sha256

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An 800 MB bf16 safetensors file with values as weights have them."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    elements, tensors = 25_000_000, 16
    header = {
        f"layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [5000, 5000],
            "data_offsets": [2 * elements * i, 2 * elements * (i + 1)],
        }
        for i in range(tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(tensors):
            weights = random.standard_normal(elements, dtype=np.float32) * np.float32(0.02)
            file.write((weights.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    yield path
    path.unlink()


def peak(pid):
    """The largest resident set a process had so far, in bytes; None once it is gone."""
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), None)
    except OSError:
        return None


def measured(command, seconds):
    """Runs a command, and returns its output and its peak resident bytes."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    highest, end = 0, time.monotonic() + seconds
    while process.poll() is None:
        highest = max(highest, peak(process.pid) or 0)
        if time.monotonic() > end:
            process.kill()
            raise AssertionError(f"{command} took more than {seconds} s")
        time.sleep(0.01)
    assert process.returncode == 0
    return process.stdout.read(), highest


@pytest.mark.timeout(300)
def test_a_large_file_commits_reads_and_verifies_in_little_memory(zspace, mounts, large):
    _, highest = measured(zspace.command("commit", large), 120)
    assert highest < 256 * MIB, f"commit took {highest / MIB:.0f} MiB"

    # 23 bytes across the border of two chunks of a tensor.
    offset = 8 + struct.unpack("<Q", open(large, "rb").read(8))[0] + 5 * 50_000_000 + 3 * MIB - 10
    with open(large, "rb") as file:
        file.seek(offset)
        want = file.read(23)
    ranged = ["cat", f"main:{large.name}", "--range", f"{offset}..{offset + 23}"]
    assert zspace.run(*ranged, text=False).stdout == want
    told = json.loads(zspace.run(*ranged, "--json", text=False).stderr.strip().splitlines()[-1])
    assert told["chunks_read"] <= 2

    mount = mounts(memory=64 * MIB)
    path = mount.wait_for(1) / large.name
    assert sha256(path) == sha256(large)
    highest = peak(mount.process.pid)
    assert highest < (256 + 64) * MIB, f"reading took {highest / MIB:.0f} MiB"

    _, highest = measured(zspace.command("verify"), 120)
    assert highest < 512 * MIB, f"verify took {highest / MIB:.0f} MiB"


@pytest.mark.timeout(300)
def test_a_large_file_through_staging_in_little_memory(mounts, large):
    mount = mounts(memory=64 * MIB)
    subprocess.run(["cp", large, mount.staging()], check=True)
    mount.wait_for(1, seconds=120)
    highest = peak(mount.process.pid)
    assert highest < (256 + 64) * MIB, f"the mount took {highest / MIB:.0f} MiB"


@pytest.mark.timeout(300)
def test_endless_junk_in_little_memory(zspace, tmp_path):
    """Content-defined chunking of what has no structure: constant, and random."""
    path = tmp_path / "junk.bin"
    noise = np.random.default_rng(1)
    with open(path, "wb") as file:
        file.write(bytes(200 * MIB))
        for _ in range(100):
            file.write(noise.bytes(MIB))
    _, highest = measured(zspace.command("commit", path), 120)
    assert highest < 256 * MIB, f"commit took {highest / MIB:.0f} MiB"
    assert zspace.stored() < 105 * MIB
