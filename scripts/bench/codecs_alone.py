"""The codecs by themselves, on one thread, beside ZipNN: examples/codec_bench.rs and zipnn_alone.py, in turn."""
import json
import statistics

import tools
from measure import files
from series import SERIES
from ways import ZSPACE

BENCH = ZSPACE.parent / "examples/codec_bench"
COLUMNS = ("chunks", "raw", "stored", "ratio", "encode", "decode")

# Name, series, number format for those whose files do not say, ZipNN's name for it; ZipNN: whether it is compared.
CASES = [
    ("bf16, 34 MB", "low-20", None, "bfloat16"),
    ("bf16, 811 MB", "pythia-10", None, "bfloat16"),
    ("bf16 of a float32 run", "high-32", None, "bfloat16"),
    ("float32 weights and AdamW state", "minilm-8", "f32", "float32"),
]


def tables(text):
    """title → codec → its columns, of what codec_bench prints."""
    found, table = {}, None
    for line in text.splitlines():
        if line.endswith(":"):
            table = found.setdefault(line[:-1], {})
        elif line and not line.startswith(" "):
            name, *numbers = line.rsplit(None, len(COLUMNS))
            table[name] = dict(zip(COLUMNS, map(float, numbers)))
    return found


def medians(runs):
    """The medians of the same numbers of several runs."""
    if isinstance(runs[0], dict):
        return {key: medians([run[key] for run in runs]) for key in runs[0]}
    return statistics.median(runs)


def case(series, number, dtype, repeat):
    one = next(s for s in SERIES if s.name == series)
    checkpoints = one.checkpoints()[-2:]
    base, file = (files(c)[0] for c in checkpoints)
    options = ["--number", number] if number else []
    python = tools.python()
    alone, zipnn = [], []
    missing = tools.lacks_module(python, "zipnn")
    for _ in range(repeat):
        alone.append(tables(tools.out([BENCH, *options, file]))["without a base"])
        if not missing:
            zipnn.append(json.loads(tools.out([python, "-W", "ignore", tools.HERE / "zipnn_alone.py", file, dtype])))
    delta = [tables(tools.out([BENCH, *options, base, file]))["against the file before"] for _ in range(repeat)]
    found = {"alone": medians(alone), "delta": medians(delta), "command": f"codec_bench {' '.join(options)} FILE".replace("  ", " ")}
    if missing:
        return found | {"missing": missing}
    zipnn = medians(zipnn)
    speeds = {verb: zipnn["raw"] / zipnn[verb] / 1e6 for verb in ("encode", "decode")}
    return found | {"zipnn": zipnn | {"ratio": zipnn["stored"] / zipnn["raw"]} | speeds}


def measure(repeat, only=None):
    return {name: case(series, number, dtype, repeat) for name, series, number, dtype in CASES if not only or series in only}
