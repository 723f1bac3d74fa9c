"""Real series go in by plain cp and come back whole: at once, after a new mount, and after a kill."""
import contextlib
import os
import subprocess
import time

import pytest

import doors
from conftest import FURTHER
from files import snapshot

KINDS = ["shipped", "bf16", "dense", "adamw", "hf", *FURTHER]


def copy_in(mount, sources, first=1):
    for number, source in enumerate(sources, first):
        subprocess.run(["cp", "-r", source, mount.staging()], check=True)
        mount.wait_for(number)


def check_all(mount, sources):
    """Every file's bytes, and the tensors through every door."""
    for number, source in enumerate(sources, 1):
        assert os.listdir(mount.version(number)) == [source.name]
        back, want = snapshot(mount.version(number) / source.name, times=False), snapshot(source, times=False)
        contents = [{name: what[-1] for name, what in tree.items() if what[0] == "file"} for tree in (back, want)]
        assert contents[0] == contents[1]
        assert doors.check(mount, number, source) > 0
    assert os.path.samefile(mount.path / "versions/main/latest", mount.version(len(sources)))
    mount.zspace.verify()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", KINDS)
def test_series_round_trip(mount, series, kind):
    sources = series(kind)
    copy_in(mount, sources)
    check_all(mount, sources)
    mount.restart()
    check_all(mount, sources)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["shipped", "adamw", "hf", *FURTHER])
def test_series_survives_a_kill_in_the_middle_of_a_copy(mount, series, kind):
    *sources, last = series(kind)
    copy_in(mount, sources)

    # The copy of the last one, slow enough to be killed half-way.
    torn = mount.staging() / last.name
    if last.is_dir():
        torn.mkdir()
        names = sorted(os.listdir(last))
        for name in names[:-1]:
            subprocess.run(["cp", last / name, torn], check=True)
        source, open_file = last / names[-1], torn / names[-1]
    else:
        source, open_file = last, torn
    data = source.read_bytes()
    half = os.open(open_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(half, data[: len(data) // 2])
    time.sleep(0.2)
    mount.kill()
    # Where the kernel writes by itself, it goes on with the file; fsync asks the mount.
    with pytest.raises(OSError):
        os.write(half, data[len(data) // 2 :])
        os.fsync(half)
    # Closing tells of the dead mount too, once.
    with contextlib.suppress(OSError):
        os.close(half)

    mount.start()  # clears the dead mount point by itself
    check_all(mount, sources)
    mount.wait_for_status(last.name, "waiting")
    assert open_file.read_bytes() in (data[: len(data) // 2], data), "what was staged is still there"
    mount.exactly(len(sources))

    # Copied again it is whole, and becomes the next version by itself.
    subprocess.run(["cp", "-rT", last, torn], check=True)
    mount.exactly(len(sources) + 1)
    check_all(mount, [*sources, last])


def test_half_a_copy_can_be_committed_or_removed_by_hand(mount, series):
    source = series("shipped")[0]
    for name in ("keep.safetensors", "drop.safetensors"):
        (mount.staging() / name).write_bytes(source.read_bytes()[:500_000])
    mount.kill()
    mount.start()
    mount.wait_for_status("keep.safetensors", "waiting")
    mount.wait_for_status("drop.safetensors", "waiting")
    (mount.staging() / "drop.safetensors").unlink()
    mount.zspace.commit(mount.staging() / "keep.safetensors")
    version = mount.exactly(1)
    assert (version / "keep.safetensors").read_bytes() == source.read_bytes()[:500_000]
    assert "drop.safetensors" not in mount.status()
    mount.zspace.verify()


@pytest.mark.timeout(240)
def test_size_and_depth_of_a_low_rate_run(zspace, series):
    """Neighbours cost a few per cent of themselves, no rebuild applies more than 8 deltas, and all come back."""
    sources = series("long")
    sizes = [0]
    for source in sources:
        zspace.commit(source)
        sizes.append(zspace.stored())
    costs = [(b - a) / sources[0].stat().st_size for a, b in zip(sizes, sizes[1:])]
    assert costs[0] < 0.75
    assert max(costs[1:]) < 0.08, costs
    stats = zspace.json("stats")
    assert stats["ratio"] <= 0.13
    assert max(map(int, stats["depths"])) <= 11
    for number, source in enumerate(sources, 1):
        assert zspace.run("cat", f"main/{number}:{source.name}", text=False).stdout == source.read_bytes()
    zspace.verify()
