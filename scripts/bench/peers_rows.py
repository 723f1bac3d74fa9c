"""The rows of the benchmark of peers. Each generator works in an empty directory and gives the rows of one subject."""
import json
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field

import tools
from measure import Failed, natural, size
from peers_proxy import proxy, tried
from peers_tools import in_turn

DELAY = 0.008
ATOM = 32
MIB = 1 << 20
LARGE = 52_535_088
RECEIVERS = 12
# Of 5.5 MB each.
SHAPE = "--checkpoints 21 --hidden 192 --layers 6 --batch 2 --threads 2"
RUN = f"{SHAPE} --every 10 --rate 1e-5 --warm 100 --warm-rate 3e-4 --ramp 50"


@dataclass
class Row:
    """One line of the table: what pulls said of themselves, their seconds, and what is compared with the goal."""

    what: str
    pulls: list
    seconds: list
    beside: str
    measured: list
    goal: float
    # "ratio": at most `goal` ×; "records": at most so many; "least": at least `goal` ×.
    kind: str = "ratio"
    notes: list = field(default_factory=list)

    def met(self):
        measured = statistics.median(self.measured)
        return measured >= self.goal if self.kind == "least" else measured <= self.goal


def wire(outcome):
    return outcome["received"] + outcome["sent"]


def random_bytes(count, seed):
    chance = random.Random(seed)
    return b"".join(chance.randbytes(min(MIB, count - at)) for at in range(0, count, MIB))


def edited(data, atoms, seed):
    """The same bytes with other random ones in these atoms; of one seed with the bytes' own, the first would be no others."""
    chance, new = random.Random(seed), bytearray(data)
    for atom in atoms:
        new[atom * ATOM : (atom + 1) * ATOM] = chance.randbytes(ATOM)
    return bytes(new)


def text(count):
    """Lines of a log, of few words and numbers, of which zstd leaves a fiftieth."""
    chance = random.Random(1)

    def message():
        words = "shard batch checkpoint tensor gradient layer optimizer token".split()
        verbs = "loaded stored checked sent dropped merged queued retried".split()
        parts = [f"{chance.choice(words)} {chance.choice(verbs)} {chance.randrange(100_000)}" for _ in range(10)]
        return f"node-{chance.randrange(12):02}.train.example INFO trainer.worker: {'; '.join(parts)}\n"

    messages, lines = [message() for _ in range(18)], []
    while len(lines) < count // 100:
        lines.append(f"2026-03-01 12:{len(lines) // 2000 % 60:02} {chance.choice(messages)}")
    return "".join(lines).encode()[:count]


def zstd_size(data, here):
    """Bytes of zstd's frames of 1 MiB each, or None without the command."""
    if not shutil.which("zstd"):
        return None
    total = 0
    for at in range(0, len(data), MIB):
        path = here / "piece"
        path.write_bytes(data[at : at + MIB])
        command = ["zstd", "-3", "--no-check", "-q", "-c", path]
        total += len(subprocess.run(command, check=True, capture_output=True).stdout)
    return total


def cold_object(bench, here, what, data, beside, whole, goal):
    sender = bench.new(here / "sender")
    wanted = bench.put(sender, data)
    with bench.serving(sender) as port:
        seconds, said = bench.each(bench.runs, None, here / "receiver", lambda store: bench.objects(port, [store], wanted))
    shutil.rmtree(sender)
    return Row(what, said, seconds, f"{beside}: {whole:,}", [wire(one) / whole for one in said], goal)


def cold_random(bench, here):
    yield cold_object(bench, here, f"1 cold object, {LARGE:,} random bytes", random_bytes(LARGE, 1), "raw", LARGE, 1.02)


def cold_text(bench, here):
    data = text(2 * MIB)
    whole = zstd_size(data, here)
    row = cold_object(bench, here, "2 cold object, 2 MiB of text", data, "zstd -3 of each MiB", whole or len(data), 1.1)
    if whole is None:
        row.beside = f"raw: {len(data):,}"
        row.notes.append("Row 2: there is no `zstd` to compare with here, so the goal means nothing.")
    yield row


def warm_edits(bench, here):
    data = random_bytes(MIB, 2)
    atoms = len(data) // ATOM
    cases = (
        ("the last 16 atoms", range(atoms - 16, atoms), 22),
        ("the first 16 atoms", range(16), 31),
        ("atoms 0, 2048, 4096, …", range(0, atoms, 2048), 131),
    )
    sender, base = bench.new(here / "sender"), bench.new(here / "base")
    bench.put(sender, data)
    bench.put(base, data)
    wanted = [bench.put(sender, edited(data, where, 3 + n)) for n, (_, where, _) in enumerate(cases)]
    with bench.serving(sender) as port:
        for object_id, (what, _, goal) in zip(wanted, cases):
            seconds, said = bench.each(
                bench.runs, base, here / "receiver", lambda store: bench.objects(port, [store], object_id)
            )
            records = [one["records"] for one in said]
            yield Row(f"3 warm object of 1 MiB, other {what}", said, seconds, "records", records, goal, "records")


def receivers(bench, here):
    data = random_bytes(LARGE, 1)
    sender, base = bench.new(here / "sender"), bench.new(here / "base")
    bench.put(sender, data)
    bench.put(base, data)
    wanted = bench.put(sender, edited(data, random.Random(4).sample(range(LARGE // ATOM), 64), 5))

    def row(port, how, goal):
        def copies():
            return [bench.copy(base, here / f"receiver-{n}") for n in range(RECEIVERS)]

        def at_once():
            stores = copies()
            seconds, said = bench.objects(port, stores, wanted)
            for store in stores:
                shutil.rmtree(store)
            return seconds, said

        def one_by_one():
            seconds, stores = 0, copies()
            for store in stores:
                seconds += bench.objects(port, [store], wanted)[0]
                shutil.rmtree(store)
            return seconds

        ours, theirs = in_turn(bench.long_runs, at_once, one_by_one)
        ratios = [seconds / other for (seconds, _), other in zip(ours, theirs)]
        said = [one for _, outcomes in ours for one in outcomes]
        beside = f"one by one: {statistics.median(theirs):.2f} s"
        return Row(f"4 warm object for {RECEIVERS} at once, {how}", said, [seconds for seconds, _ in ours], beside, ratios, goal)

    with bench.serving(sender) as port:
        yield row(port, "directly", 0.6)
        with proxy(port, DELAY) as far:
            yield row(far, "8 ms away", 0.25)


def train(directory):
    # The environment of scripts/setup-python runs this script.
    command = [sys.executable, "-W", "ignore", tools.ROOT / "scripts/make-series", "bf16", directory, *RUN.split()]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return directory


def versions(bench, here, series):
    """Rows 5 and 6, of one store: 20 checkpoints, later 21."""
    checkpoints = sorted((series or train(here / "series")).iterdir(), key=natural)[:21]
    if len(checkpoints) < 21:
        raise Failed(f"{len(checkpoints)} checkpoints, not 21")
    sender, receiver, base = bench.new(here / "sender"), here / "receiver", here / "base"
    for path in checkpoints[:20]:
        bench.run("commit", path, "--store", sender)
    packs = size(sender / "packs")
    raw = sum(size(path) for path in checkpoints[:20])

    def same(store):
        if logged(bench, store)[0]["id"] != logged(bench, sender)[0]["id"]:
            raise Failed("another version was pulled")

    with bench.serving(sender) as port:
        seconds, said = bench.each(bench.runs, None, receiver, lambda store: bench.pull(port, [store]))
        bench.pull(port, [bench.new(base)])
        same(base)
        ratios = [wire(one) / packs for one in said]
        yield Row(f"5 cold, 20 bf16 checkpoints of {raw / 20e6:.1f} MB", said, seconds, f"packs: {packs:,}", ratios, 1.02)
        with proxy(port, DELAY) as far:
            yield in_flight(bench, far, receiver)
    bench.run("commit", checkpoints[20], "--store", sender)
    added = logged(bench, sender)[0]["stored"]
    with bench.serving(sender) as port:
        seconds, said = bench.each(bench.runs, base, receiver, lambda store: bench.pull(port, [store]))
        bench.pull(port, [base])
        same(base)
    yield Row("5 warm, one version more", said, seconds, f"it added: {added:,}", [wire(one) / added for one in said], 1.02)


def logged(bench, store):
    return [json.loads(line) for line in bench.run("log", "--json", "--store", store).splitlines()]


def in_flight(bench, far, receiver):
    def pull(*options):
        seconds, said = bench.pull(far, [bench.new(receiver)], *options)
        shutil.rmtree(receiver)
        return seconds, said[0]

    many, one = in_turn(bench.long_runs, lambda: pull(), lambda: pull("--in-flight", 1))
    ratios = [other / seconds for (seconds, _), (other, _) in zip(many, one)]
    rounds = statistics.median(said["rounds"] for _, said in one)
    beside = f"one in flight: {statistics.median(seconds for seconds, _ in one):.2f} s, {rounds:.0f} rounds"
    what = "6 cold, the 20 checkpoints, 8 ms away, many in flight"
    row = Row(what, [said for _, said in many], [seconds for seconds, _ in many], beside, ratios, 2.5, "least")
    return row


SUBJECTS = {"1": cold_random, "2": cold_text, "3": warm_edits, "4": receivers, "56": versions}


def way_by_itself():
    rtt, rate = tried(DELAY)
    return f"The proxy by itself: {rtt:.1f} ms there and back, {rate:,.0f} MB/s."
