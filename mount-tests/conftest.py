"""Fixtures: a store, mounts that always end, and real checkpoint series."""
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("ZSPACE_STORE", None)

import importlib.machinery
import importlib.util
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from files import natural
from peers import Server
from zspace import BINARY, ROOT, Mount, Zspace

DATA = ROOT / "mount-tests/data"
# Directories of further series (files or directories, in the order of their names) to send through the mount, by name.
FURTHER = {Path(p).name: Path(p) for p in os.environ.get("ZSPACE_SERIES", "").split(":") if p}


def pytest_sessionstart(session):
    if not BINARY.is_file():
        pytest.exit(f"no {BINARY}: run scripts/test, or cargo build --release", returncode=1)
    # What runs in the background, and each of several workers, ignores Ctrl-C; what the tests start must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)  # so that training repeats exactly


@pytest.fixture
def zspace(tmp_path):
    """The command line on a new store."""
    return Zspace(tmp_path / "store")


@pytest.fixture
def mounts(request, zspace, tmp_path):
    """Makes mounts of the store; all are ended and unmounted after the test."""
    marker = request.node.get_closest_marker("timeout")
    limit = marker.args[0] if marker else float(request.config.getini("timeout"))
    made = []

    def make(name="mnt", **options):
        made.append(Mount(zspace, tmp_path / name, watchdog=limit - 10, **options))
        return made[-1].start()

    yield make
    for mount in made:
        mount.close()


@pytest.fixture
def serve():
    """Serves stores in processes that end with the test."""
    running = []

    def start(*args, **options):
        running.append(Server(*args, **options))
        return running[-1]

    yield start
    for server in running:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def mount(mounts):
    """A mount of the store with short settling times."""
    return mounts()


@pytest.fixture(scope="session")
def trainers():
    """Starts trainers in processes of their own."""
    from trainers import Trainers

    return Trainers()


@pytest.fixture(scope="session")
def make_series():
    """scripts/make-series as a module."""
    loader = importlib.machinery.SourceFileLoader("make_series", str(ROOT / "scripts/make-series"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def series(make_series, tmp_path_factory):
    """Trains a series of a kind once, and gives the paths of its checkpoints: `series("hf")`. "shipped" is the one in
    data/, "long" is twelve low-rate checkpoints."""
    kept = {name: sorted(path.iterdir(), key=natural) for name, path in FURTHER.items()}
    kept["shipped"] = sorted(DATA.glob("*.safetensors"))
    made = {}

    def get(kind):
        if kind in kept:
            return kept[kind]
        if kind not in made:
            options = {"checkpoints": 3, "every": 5, "warm": 20}
            if kind == "long":
                options |= {"kind": "bf16", "checkpoints": 12, "every": 8, "warm": 40}
            made[kind] = make_series.make(**{"kind": kind, "out": tmp_path_factory.mktemp(kind)} | options)
        return made[kind]

    yield get
    for paths in made.values():
        shutil.rmtree(paths[0].parent)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
