"""Runs that are taken in from where trainers left them."""
import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from files import noise, sha256, snapshot
from zspace import eventually

STEPS = (1, 2, 9, 10, 11, 100, 1000)


def shuffled(directory, sources):
    """Copies files or directories in an order, and with times, that tell nothing."""
    directory.mkdir()
    sources = list(sources)
    random.Random(1).shuffle(sources)
    for n, source in enumerate(sources):
        target = directory / source.name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        os.utime(target, (1_700_000_000 - n * 1000,) * 2)
    return directory


@pytest.fixture
def run(tmp_path):
    """A directory of checkpoints of a training run, made in a random order."""
    made = tmp_path / "made"
    made.mkdir()
    for step in STEPS:
        directory = made / f"checkpoint-{step}"
        directory.mkdir()
        save_file({"w": torch.arange(50_000).float() + step}, directory / "model.safetensors")
        state = {"global_step": step, "epoch": step / 100, "log_history": [{"loss": 9.0, "step": 0}, {"loss": 1 / step, "step": step}]}
        (directory / "trainer_state.json").write_text(json.dumps(state))
        (directory / "config.json").write_text("{}")
    return shuffled(tmp_path / "run", made.iterdir())


def imported(zspace, *args, **options):
    return [json.loads(line) for line in zspace.run("import", *args, "--json", **options).stdout.splitlines()]


def test_a_run_becomes_a_branch_in_the_order_of_its_steps(zspace, run):
    shown = zspace.out("import", run, "--dry-run", "--branch", "exp") if zspace.run("init") else ""
    assert [int(line.split()[0].rsplit("-", 1)[1]) for line in shown.splitlines()] == list(STEPS)
    lines = imported(zspace, run, "--branch", "exp")
    assert [line["version"] for line in lines] == [f"exp/{n + 1:06}" for n in range(len(STEPS))]
    log = zspace.json_lines("log", "exp")[::-1]
    assert [v["step"] for v in log] == list(STEPS)
    assert [v["epoch"] for v in log] == [step / 100 for step in STEPS]
    assert [v["loss"] for v in log] == [1 / step for step in STEPS]
    for n, step in enumerate(STEPS):
        out = run.parent / f"out{n}"
        zspace.run("export", f"exp/{n + 1}", out)
        assert snapshot(out / f"checkpoint-{step}") == snapshot(run / f"checkpoint-{step}")
    # Once more: nothing is new.
    again = imported(zspace, run, "--branch", "exp")
    assert not any(line["new"] for line in again) and len(zspace.json_lines("log", "exp")) == len(STEPS)
    # Only what is new comes.
    (run / "checkpoint-2000").mkdir()
    save_file({"w": torch.zeros(5)}, run / "checkpoint-2000/model.safetensors")
    assert [line["version"] for line in imported(zspace, run, "--branch", "exp") if line["new"]] == ["exp/000008"]


def test_flat_directories_and_what_is_no_checkpoint(zspace, series, tmp_path):
    flat = shuffled(tmp_path / "flat", series("shipped"))
    (flat / "notes.txt").write_text("notes")
    (flat / ".hidden.safetensors").write_bytes(b"x")
    (flat / "step-000080.safetensors.tmp").write_bytes(b"x")
    torn = (flat / "step-000060.safetensors").read_bytes()[:-100]
    (flat / "step-000070.safetensors").write_bytes(torn)
    (flat / "logs").mkdir()
    (flat / "logs/events").write_text("no tensors")
    done = zspace.run("import", flat, "-v")
    assert [line.split()[1].rsplit("/", 1)[1] for line in done.stdout.splitlines()] == [
        "step-000020.safetensors", "step-000040.safetensors", "step-000060.safetensors"]  # fmt: skip
    for name in ("notes.txt", ".hidden.safetensors", "step-000080.safetensors.tmp", "step-000070.safetensors", "logs"):
        assert f"{name}: left out" in done.stderr
    for n, source in enumerate(series("shipped")):
        assert zspace.run("cat", f"main/{n + 1}:{source.name}", text=False).stdout == source.read_bytes()
    # A model's own directory is one checkpoint.
    model = tmp_path / "model"
    model.mkdir()
    save_file({"w": torch.ones(9)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    (one,) = imported(zspace, model, "--branch", "model")
    assert zspace.out("ls", "model").count("config.json") == 1 and one["version"] == "model/000001"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no checkpoint" in zspace.run("import", empty, ok=False).stderr
    assert zspace.run("import", model / "config.json", ok=False).returncode == 64


def test_sources_are_removed_only_when_they_are_safe(zspace, run, tmp_path):
    imported(zspace, run)
    # One that was changed after it was taken in, with its time put back.
    changed = run / "checkpoint-10/model.safetensors"
    times = changed.stat()
    with changed.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = zspace.run("import", run, "--remove-source", ok=False)
    assert done.returncode == 1 and "checkpoint-10" in done.stderr and "has changed" in done.stderr
    assert sorted(p.name for p in run.iterdir()) == [f"checkpoint-{s}" for s in (10, 100, 1000, 11)]
    save_file(load_file(changed), changed)
    (run / "checkpoint-11/more.txt").write_text("not in the version")
    lines = imported(zspace, run, "--remove-source")
    assert all(line["removed"] for line in lines)
    assert not list(run.iterdir())
    # What nobody stored stays; that made another version, with it.
    assert any(line["new"] for line in lines)
    zspace.verify()


def test_what_is_damaged_in_the_store_keeps_its_source(zspace, run):
    imported(zspace, run)
    for pack in (zspace.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        for n in range(50):
            data[len(data) * (2 * n + 1) // 100] ^= 1
        pack.write_bytes(data)
    assert zspace.run("import", run, "--remove-source", ok=False).returncode == 3
    # Of those that went every version is right.
    stay = [n + 1 for n, step in enumerate(STEPS) if (run / f"checkpoint-{step}").exists()]
    damaged = [n for n in range(1, len(STEPS) + 1) if zspace.run("verify", f"main/{n}", ok=False).returncode]
    assert damaged and set(damaged) <= set(stay)


def test_an_interrupted_import_goes_on(zspace, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for n in range(8):
        (run / f"step-{n}.npy").write_bytes(b"")
        torch.save({"w": torch.frombuffer(bytearray(noise(40_000_000, n)), dtype=torch.uint8)}, run / f"step-{n}.pt")
        (run / f"step-{n}.npy").unlink()
    process = subprocess.Popen(zspace.command("import", run), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    eventually(lambda: zspace.store.exists() and len(zspace.json_lines("log")) >= 2, "two are there")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    if process.returncode:
        assert process.returncode == 130, told
    lines = imported(zspace, run)
    assert [line["version"] for line in lines] == [f"main/{n + 1:06}" for n in range(8)]
    assert [v["step"] for v in zspace.json_lines("log")[::-1]] == list(range(8))
    assert sum(not line["new"] for line in lines) >= 2
