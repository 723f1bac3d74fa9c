"""Renders docs/BENCHMARKS.md from what was measured."""
import re
import statistics

from goals import goals
from series import SERIES
from ways import WAYS

HEAD = """# Benchmarks

Written by `scripts/bench/run`; every figure is measured, none is copied. One command makes the series, installs what is
compared with, and measures all ways side by side:

```sh
cargo build --release --bin zspace --example codec_bench
$(scripts/setup-python)/bin/python scripts/bench/run                # all of it, some hours the first time
$(scripts/setup-python)/bin/python scripts/bench/run --only low-20  # the rows of one series; --way zspace: one row
```
"""

EXPLAINED = """## How it is measured

- *stored*: bytes of the store's files after all checkpoints were committed, of the checkpoints' own bytes (*raw*).
- *commit*: raw bytes a second, the median over all checkpoints but the first; the file is in the page cache. *of cp*: that
  speed over the speed of `cp CHECKPOINT … && sync …` of the same checkpoint right before, on the same disk; median of the ratios.
- *first*, *middle*, *last*: raw bytes a second of the rebuild of that version by a new process, output thrown away (or into
  /dev/shm where said), median; before, each was rebuilt once and compared with its source.
- *MiB*: the largest resident set of one process, of all commits and of all rebuilds. Those of Python packages have about
  30 to 400 MiB for Python and their imports; zspace's have up to 256 MiB of cache.
  None can be told below some 25 MiB, which is what the measuring process has itself.
- Seconds are those of whole processes for commands, and for Python packages those without the start of Python and imports.
- A rate is 10⁶ bytes a second. Everything runs with all cores unless it says otherwise, with the tool's own settings unless
  said: zspace has one default policy, nothing is tuned per series.
- Two cores of a shared machine: between runs of the same program rates differ by a fifth and more.

## What bounds rebuilds and commits

Both wait for the processor. Of a rebuild at five differences (the last of 20, `perf record` on one core) entropy decoding takes 20 %,
finding the elements that differ 19 %, adding to them 18 %, SHA-256 11 % (sixteen chunks side by side), reading records and
page faults 12 %, Huffman codes and planes of the first checkpoint 5 %. Without differences it goes at 1.2 to 1.7 GB/s, and each
difference adds 0.25 to 0.35 s for these 811 MB: up to two stay above 600 MB/s, five do not. Fewer would cost size: digits of 4 in place of
8 make it four, for 2.6 % more bytes and `bf16-lowrate` above its goal. Smaller chunks (512 KiB), which stay in the processor's own cache, gain
nothing. Of a commit, reading its base back takes a third, coding and proof another, SHA-256 of file and chunks 18 %.
"""


def number(value, digits=0):
    return f"{value:,.{digits}f}"


def commit_speed(row):
    """MB/s, the median over all but the first checkpoint (or of the only one)."""
    pairs = list(zip(row["sizes"], row["commit"]))
    return statistics.median(s / t for s, t in pairs[1:] or pairs) / 1e6


def of_copy(row):
    """How fast commits are relative to cp + fsync."""
    pairs = list(zip(row["copy"], row["commit"]))
    return statistics.median(copy / commit for copy, commit in pairs[1:] or pairs)


def rebuild_speed(row, which):
    found = row["rebuild"][which]
    return found["bytes"] / statistics.median(found["seconds"]) / 1e6


def mib(value):
    return number(value / 2**20)


def line(cells):
    return "| " + " | ".join(cells) + " |"


def way_name(key):
    key, _, more = key.partition("+")
    return WAYS[key].name + (", after `zspace repack`" if more else "")


def ordered(ways):
    order = list(WAYS)
    return sorted(ways.items(), key=lambda item: (order.index(item[0].partition("+")[0]), item[0]))


def series_section(name, kept):
    ways = {key: row for key, row in kept["ways"].items() if key.partition("+")[0] in WAYS}
    measured = [row for row in ways.values() if "stored" in row]
    if not measured:
        return None
    first, dates = measured[0], sorted({row["date"] for row in measured})
    about = f"{first['checkpoints']} checkpoints, {number(first['raw'] / 1e6, 1)} MB: {kept['about']}."
    where = f"zspace {kept['version']}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {kept['machine']}."
    lines = [f"### {name}", "", f"{about} `scripts/bench/run --{kept_option(name, kept)}`", where, ""]
    head = ["way", "stored", "% of raw", "commit MB/s", "of cp", "first", "middle", "last MB/s", "commit MiB", "rebuild MiB"]
    lines += [line(head), line(["---"] + ["--:"] * (len(head) - 1))]
    for key, row in ordered(ways):
        bold = "**" if key.startswith("zspace") else ""
        if "stored" not in row:
            lines.append(line([way_name(key), f"not available: {row['missing'].replace('|', '/')[:200]}"] + [""] * (len(head) - 2)))
            continue
        commit = [number(commit_speed(row)), number(of_copy(row), 2)] if "commit" in row else [f"({row['repack']:.1f} s)", ""]
        cells = [f"{row['stored'] / 1e6:,.2f} MB", f"{bold}{100 * row['stored'] / row['raw']:.2f}{bold}", *commit]
        cells += [number(rebuild_speed(row, which)) for which in ("first", "middle", "last")]
        cells += [mib(row["commit_memory"]), mib(row["rebuild_memory"])]
        lines.append(line([f"{bold}{way_name(key)}{bold}", *cells]))
    return "\n".join(lines)


def kept_option(name, kept):
    return f"series DIR/{name}" if kept["about"].startswith("given") else f"only {name}"


def codec_section(codecs):
    """The micro-benchmark: one table, a block of rows for each case."""
    if not codecs:
        return None
    lines = ["## Codecs, one thread", "", "`scripts/bench/run --only codecs`: `codec_bench FILE`, `codec_bench BEFORE FILE` and"]
    lines += ["`zipnn_alone.py FILE` in turn, medians. *chosen* is what zspace takes, chunk by chunk; the others what each codec", ""]
    lines[-2] += " does where it applies."
    for name, case in codecs.items():
        lines += [f"### {name}", "", line(["codec", "% of raw", "encode MB/s", "decode MB/s"]), line(["---", "--:", "--:", "--:"])]
        for title, key in (("alone", "alone"), ("against the checkpoint before", "delta")):
            raw = case[key]["chosen"]["raw"]
            for codec, row in sorted(case[key].items(), key=lambda item: item[0] != "chosen"):
                part = "" if row["raw"] == raw else f" (of {100 * row['raw'] / raw:.0f}% of the bytes)"
                mark = "**" if codec == "chosen" else ""
                cells = [f"{100 * row['ratio']:.2f}", number(row["encode"]), number(row["decode"])]
                lines.append(line([f"{mark}{codec}{mark}, {title}{part}", *cells]))
            if key == "alone":
                lines.append(line(zipnn_cells(case)))
        lines.append("")
    return "\n".join(lines).rstrip()


def zipnn_cells(case):
    if "zipnn" not in case:
        return ["ZipNN", f"not available: {case.get('missing')}", "", ""]
    row = case["zipnn"]
    return ["**ZipNN**, alone", f"{100 * row['ratio']:.2f}", number(row["encode"]), number(row["decode"])]


def ways_section():
    lines = ["## The ways", "", line(["way", "how it runs", "commit", "rebuild"]), "|---|---|---|---|"]
    for way in WAYS.values():
        lines.append(line([way.name, way.about, *(f"`{command}`" for command in way.commands)]))
    lines += ["", "`library.py` is scripts/bench/library.py, run with the interpreter of the environment that `run` makes."]
    return "\n".join(lines)


def render(results):
    known = [series.name for series in SERIES]
    order = sorted(results["series"], key=lambda name: known.index(name) if name in known else len(known))
    sections = [section for name in order if (section := series_section(name, results["series"][name]))]
    parts = [HEAD, "## Goals\n\n" + goals(results), EXPLAINED, "## Series\n\n" + "\n\n".join(sections)]
    parts += [results.get("mount"), results.get("peers"), codec_section(results["codecs"]), ways_section()]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def put_section(path, section):
    """Replaces one section of the document, or puts it before the codecs; the others stay as they are."""
    text, heading = path.read_text(), section.split("\n", 1)[0]
    parts = [part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if part.split("\n", 1)[0] != heading]
    at = next((i for i, part in enumerate(parts) if part.startswith("## Codecs")), len(parts))
    parts.insert(at, section.strip() + "\n")
    path.write_text("\n\n".join(part.strip() for part in parts) + "\n")


def headings(text):
    return set(re.findall(r"^### .*$", text, re.MULTILINE))


def write(results, path, aside):
    """Writes the document, or, if it has sections that these results lack (measured elsewhere), a new one `aside`."""
    text = render(results)
    if path.is_file() and headings(path.read_text()) - headings(text):
        path = aside
    path.write_text(text)
    return path
