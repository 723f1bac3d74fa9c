"""What was measured, kept between runs, and where."""
import json
import os
from pathlib import Path

import tools

BENCH = tools.CACHE / "bench"
RESULTS = BENCH / "results.json"
DOCUMENT = tools.ROOT / "docs/BENCHMARKS.md"


def load():
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"series": {}, "codecs": {}}


def keep(results):
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    new = RESULTS.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1))
    new.rename(RESULTS)


def machine():
    """The machine in general terms."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown CPU")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB of memory, Linux {os.uname().release.split('-')[0]}"


def version():
    return tools.out(["git", "-C", tools.ROOT, "rev-parse", "--short", "HEAD"])
