"""Real trainers whose output directory is a branch of staging: they work as on a disk, and every checkpoint becomes a version."""
import filecmp
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

import trainers as t
from zspace import QUIET

# Longer than for the writers: while a trainer saves, seconds may pass between two of its files if the machine is busy.
SETTLE = {"settle": 1, "settle-dir": 2}


@pytest.fixture
def branch(mounts):
    """A mount, its staging of a branch, and where its versions are."""
    mount = mounts(**SETTLE)
    staging = mount.staging("run7")
    staging.mkdir()
    return mount, staging, mount.path / "versions/run7"


def entries(mount):
    """What each version of the branch holds."""
    return [sorted(os.listdir(mount.version(n, "run7"))) for n in sorted(mount.versions("run7"))]


def same_tree(one, two, but=()):
    """The same names and bytes, apart from the content of some files."""
    names = sorted(os.listdir(one))
    assert names == sorted(os.listdir(two))
    compared = [n for n in names if n not in but]
    assert filecmp.cmpfiles(one, two, compared, shallow=False)[0] == compared


def no_more(mount, count):
    """Everything is committed, and no further version appears."""
    time.sleep(QUIET)
    assert len(mount.versions("run7")) == count, mount.status()
    lines = [l for l in mount.status().splitlines() if l.startswith("run7/")]
    assert all("committed" in line for line in lines), lines


# Files in which a Trainer notes how long things took and where they lie.
NOTES = ("trainer_state.json", "training_args.bin")
# A run of 8 steps: its checkpoints, and what it leaves beside them.
STEPS = (2, 4, 6, 8)
LOOSE = ["config.json", "generation_config.json", "model.safetensors", "trainer_state.json", "training_args.bin"]


@pytest.fixture(scope="module")
def plain_run(trainers, tmp_path_factory):
    """The same training in a plain directory, with all its checkpoints: ended after step 2 and resumed, which gives other
    numbers than a run that was never ended."""
    out = tmp_path_factory.mktemp("plain")
    trainers.run(t.hugging_face, out, None, None, 2, None, None)
    trainers.run(t.hugging_face, out, None, True, None, None, None)
    yield out
    shutil.rmtree(out)


def check_finished_run(mount, plain):
    """The versions hold the checkpoints in their order, then what was saved at the end."""
    n = len(STEPS)
    mount.wait_for(n + 2, "run7")
    no_more(mount, n + 2)
    held = entries(mount)
    assert held[:n] == [[f"checkpoint-{step}"] for step in STEPS]
    for number, step in enumerate(STEPS, 1):
        name = f"checkpoint-{step}"
        same_tree(mount.version(number, "run7") / name, plain / name, NOTES)
    assert sorted(held[n:]) == [LOOSE, ["final"]]
    loose, final = (mount.version(n + 1 + held[n:].index(what), "run7") for what in (LOOSE, ["final"]))
    assert filecmp.cmp(loose / "model.safetensors", plain / "model.safetensors", shallow=False)
    same_tree(final / "final", plain / "final")


def test_hugging_face_ended_and_resumed(branch, trainers, plain_run):
    mount, staging, versions = branch
    trainers.run(t.hugging_face, staging, versions, None, 2)
    assert os.listdir(staging) == ["checkpoint-2"]
    trainers.run(t.hugging_face, staging, versions, True)
    check_finished_run(mount, plain_run)
    left = sorted(n for n in os.listdir(staging) if n.startswith("checkpoint"))
    assert len(left) == 2 and "checkpoint-8" in left  # the limit; versions stay
    for name in left:
        same_tree(staging / name, plain_run / name, NOTES)


@pytest.mark.parametrize("then", ["removed", "written over"])
def test_hugging_face_killed_while_saving(branch, trainers, plain_run, then):
    mount, staging, versions = branch
    trainers.run(t.hugging_face, staging, versions, None, None, 4, ends=-9)
    assert "optimizer.pt" in mount.wait_for_status("run7/checkpoint-4", "waiting")
    assert entries(mount) == [["checkpoint-2"]]
    torn = staging / "checkpoint-4"
    assert (torn / "optimizer.pt").stat().st_size < (plain_run / "checkpoint-4/optimizer.pt").stat().st_size
    if then == "removed":
        shutil.rmtree(torn)
    trainers.run(t.hugging_face, staging, versions, True if then == "removed" else str(staging / "checkpoint-2"))
    check_finished_run(mount, plain_run)


# Lightning


def trained(path):
    """What a Lightning checkpoint holds, without the paths."""
    held = torch.load(path, weights_only=False)
    return {name: held[name] for name in ("epoch", "global_step", "state_dict", "optimizer_states")}


def equal(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[k], two[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two


@pytest.mark.parametrize("last", [True, "link"], ids=str)
def test_lightning_model_checkpoint(branch, trainers, tmp_path, last):
    mount, staging, versions = branch
    trainers.run(t.lightning, tmp_path / "plain", None, -1, last, [])
    per_epoch = 2 if last is True else 1
    trainers.run(t.lightning, staging, versions, 2, last, [per_epoch * n for n in (1, 2, 3)])
    mount.wait_for(4 * per_epoch, "run7")
    no_more(mount, 4 * per_epoch)
    for epoch in range(4):
        name, want = f"epoch={epoch}.ckpt", trained(tmp_path / f"plain/epoch={epoch}.ckpt")
        if last is True:
            assert entries(mount)[2 * epoch :][:2] == [[name], ["last.ckpt"]]
            of = [mount.version(2 * epoch + 1, "run7") / name, mount.version(2 * epoch + 2, "run7") / "last.ckpt"]
        else:
            assert entries(mount)[epoch] == [name, "last.ckpt"]
            of = [mount.version(epoch + 1, "run7") / n for n in (name, "last.ckpt")]
            assert os.readlink(of[1]) == name
        assert all(equal(trained(path), want) for path in of)
    assert sorted(os.listdir(staging)) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert (staging / "last.ckpt").is_symlink() == (last == "link")
    assert equal(trained(staging / "last.ckpt"), want)


def test_loose_links_are_committed_as_links(branch, tmp_path):
    """Wherever they lead; and a mount that holds a dangling one ends."""
    mount, staging, versions = branch
    (tmp_path / "outside.txt").write_text("not to be read")
    links = {"dangling": "nowhere", "absolute": str(tmp_path / "outside.txt"), "up": "../../outside.txt"}
    for name, target in links.items():
        (staging / name).symlink_to(target)
    version = mount.wait_for(1, "run7")
    for where in (version, staging):
        assert {name: os.readlink(where / name) for name in os.listdir(where)} == links
    mount.restart()
    assert {name: os.readlink(staging / name) for name in os.listdir(staging)} == links


# accelerate


def test_accelerate_states(branch, trainers, tmp_path):
    """All states lie in one directory, which is one entry: each version holds those that there were."""
    mount, staging, versions = branch
    trainers.run(t.accelerated, tmp_path, None, None, 99)
    trainers.run(t.accelerated, staging, versions)
    no_more(mount, 4)
    for number in range(1, 5):
        states = mount.version(number, "run7") / "checkpoints"
        assert sorted(os.listdir(states)) == [f"checkpoint_{n}" for n in range(max(number - 2, 0), number)]
        for name in os.listdir(states):
            same_tree(states / name, tmp_path / "checkpoints" / name, ["random_states_0.pkl"])
    trainers.run(t.accelerated, tmp_path / "other", None, mount.version(4, "run7") / "checkpoints/checkpoint_3")
    trainers.run(t.accelerated, tmp_path / "other", None, staging / "checkpoints/checkpoint_3")


# Distributed checkpoints


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_distributed_checkpoint_of_four_ranks(branch, trainers, tmp_path, how):
    mount, staging, versions = branch
    steps = (10, 20)
    all_ranks(trainers, tmp_path / "save", t.save_distributed, staging, versions, steps, how)
    no_more(mount, len(steps))
    assert entries(mount) == [[f"step-{step}"] for step in steps]
    # All in one meeting: making four processes for each costs more than the loading.
    paths = [mount.version(n, "run7") / f"step-{step}" for n, step in enumerate(steps, 1)]
    all_ranks(trainers, tmp_path / "load", t.load_distributed, paths, steps)
    for path in paths:
        assert sorted(os.listdir(path)) == [".metadata"] + [f"__{rank}_0.distcp" for rank in range(4)]


def all_ranks(trainers, meeting, work, *args, ends=0):
    trainers.finish(*[trainers.start(t.distributed, rank, 4, meeting, work, *args) for rank in range(4)], ends=ends)


@pytest.mark.parametrize("at", ["between files", "before .metadata"])
def test_a_distributed_checkpoint_killed_half_way_waits(branch, trainers, tmp_path, at):
    """No rank has a file open when it dies: what is missing tells."""
    mount, staging, versions = branch
    all_ranks(trainers, tmp_path / "save", t.save_distributed, staging, None, (10,), at, ends=-9)
    line = mount.wait_for_status("run7/step-10", "waiting")
    assert ".metadata" in line or "was killed" in line
    left = sorted(os.listdir(staging / "step-10"))
    assert left == [f"__{rank}_0.distcp" for rank in ((1, 2, 3) if at == "between files" else range(4))]
    assert mount.versions("run7") == []
    shutil.rmtree(staging / "step-10")
    assert not [line for line in mount.status().splitlines() if line.startswith("run7/")]


def test_a_distributed_checkpoint_without_one_of_its_parts_waits(branch, trainers, tmp_path):
    mount, staging, versions = branch
    all_ranks(trainers, tmp_path / "save", t.save_distributed, tmp_path, None, (10,), "save")
    source, target = tmp_path / "step-10", staging / "step-10"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__2_0*"))
    assert "__2_0.distcp" in mount.wait_for_status("run7/step-10", "waiting")
    shutil.copy(source / "__2_0.distcp", target)
    mount.wait_for(1, "run7")
    no_more(mount, 1)
    same_tree(mount.version(1, "run7") / "step-10", source)


# Saved over what was there


@pytest.mark.parametrize("shards", [2, 1])
@pytest.mark.parametrize("into", ["directory", "branch"])
def test_saved_again_in_fewer_shards(branch, tmp_path, into, shards):
    mount, staging, versions = branch
    model = t.small_model()
    place = (lambda root: root / "model") if into == "directory" else (lambda root: root)
    for number, size in enumerate(("200KB", {2: "400KB", 1: "10MB"}[shards]), 1):
        with torch.no_grad():
            next(model.parameters()).add_(1)
        model.save_pretrained(place(tmp_path), max_shard_size=size)
        model.save_pretrained(place(staging), max_shard_size=size)
        version = place(mount.wait_for(number, "run7"))
        back = type(model).from_pretrained(version).state_dict()
        assert all(torch.equal(back[k], v) for k, v in model.state_dict().items())
        weights = sorted(p.name for p in version.glob("*.safetensors"))
        assert weights == sorted(p.name for p in place(tmp_path).glob("*.safetensors"))
        assert len(weights) == (3, shards)[number - 1]
    no_more(mount, 2)


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_saved_over_an_old_file(branch, library):
    mount, staging, versions = branch
    save, load, name = {
        "torch": (torch.save, torch.load, "model.pt"),
        "safetensors": (save_file, load_file, "model.safetensors"),
    }[library]
    for number, size in enumerate((100_000, 50_000, 200_000), 1):
        state = {"w": torch.full((size,), float(number))}
        save(state, staging / name)
        assert equal(load(mount.wait_for(number, "run7") / name), state)
    no_more(mount, 3)
    assert load(mount.version(1, "run7") / name)["w"].shape == (100_000,)
