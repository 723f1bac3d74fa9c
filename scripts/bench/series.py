"""The series that are measured: trained once by scripts/make-series, kept in the cache."""
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from measure import natural, size
from tools import CACHE, ROOT

KEPT = CACHE / "series"

# What scripts/make-series is told.
LOW = "bf16 --hidden 384 --layers 6 --vocab 8192 --batch 2 --every 25 --rate 1e-5 --warm 200 --warm-rate 3e-4 --ramp 100"
PYTHIA = "bf16 --hidden 1024 --layers 24 --vocab 50304 --batch 1 --length 64 --every 3 --rate 1e-5 --warm 20 --warm-rate 3e-4 --ramp 20"
HIGH = "dense --hidden 256 --layers 4 --vocab 8192 --batch 2 --every 25 --rate 1e-3"
MINILM = "minilm --batch 16 --every 25 --rate 2e-5"
RUNS = {
    "low-34mb": f"{LOW} --checkpoints 100",
    "pythia-410m": f"{PYTHIA} --checkpoints 20",
    "high": f"{HIGH} --checkpoints 32",
    "minilm": f"{MINILM} --checkpoints 8",
    "small-bf16": "bf16 --checkpoints 12",
    "small-dense": "dense --checkpoints 6",
    "small-adamw": "adamw --checkpoints 4",
    "small-hf": "hf --checkpoints 3",
}


@dataclass
class Series:
    """Some checkpoints of a run."""

    name: str
    about: str
    run: str | None = None
    count: int | None = None
    # The ways to measure; None: all.
    ways: tuple | None = None
    directory: Path | None = None

    def checkpoints(self):
        """Their paths in order; trained first, if they are not there."""
        directory = self.directory or kept(self.run)
        found = sorted((p for p in directory.iterdir() if not p.name.startswith(".")), key=natural)
        return found[: self.count]


SERIES = [
    Series("low-20", "bf16 weights, low rate: GPT-NeoX of 17 M parameters, steps 25 apart", "low-34mb", 20),
    Series("low-100", "the same run, longer", "low-34mb", 100, ("zspace", "xor-chain", "xor-8", "moonclip", "borg", "restic")),
    Series(
        "pythia-10",
        "bf16 weights, low rate: the shape of Pythia-410M with random weights and 20 steps of float32, then steps 3 apart",
        "pythia-410m",
        10,
    ),
    Series("pythia-20", "the same run, longer", "pythia-410m", 20, ("zspace",)),
    Series("high-32", "bf16 weights of a float32 run, high rate: GPT-NeoX of 7 M parameters, steps 25 apart", "high", 32),
    Series("minilm-8", "float32 weights and AdamW state of all-MiniLM-L6-v2 being fine-tuned, `.pt`, steps 25 apart", "minilm", 8),
    Series("small-bf16", "bf16 weights, low rate: 0.5 M parameters", "small-bf16"),
    Series("small-dense", "bf16 weights of a float32 run, high rate: 0.5 M parameters", "small-dense"),
    Series("small-adamw", "float32 weights and AdamW state, `.pt`: 0.5 M parameters", "small-adamw"),
    Series("small-hf", "the same as Hugging Face directories", "small-hf"),
]


def given(path):
    """A series that lies in a directory of its own."""
    path = Path(path).resolve()
    return Series(path.name, "given by `--series`", directory=path)


def kept(run):
    """The directory of a run's checkpoints. What says that it is whole is written last, beside it, and names the recipe."""
    directory, whole = KEPT / run, KEPT / f"{run}.json"
    recipe = RUNS[run]
    if whole.is_file() and json.loads(whole.read_text())["recipe"] == recipe:
        return directory
    print(f"bench: training {run} (make-series {recipe})", file=sys.stderr, flush=True)
    whole.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    from tools import python  # the environment is needed for training alone

    command = [python(), "-W", "ignore", ROOT / "scripts/make-series", *recipe.split(" ", 1)[:1], directory]
    subprocess.run([*map(str, command), *recipe.split()[1:]], check=True)
    whole.write_text(json.dumps({"recipe": recipe, "bytes": size(directory)}))
    return directory
