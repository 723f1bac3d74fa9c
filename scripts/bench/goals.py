"""What zspace set out to reach, and what was measured of it."""

MIB = 2**20


def goals(results):
    """The table, as Markdown."""
    from document import commit_speed, line, of_copy, rebuild_speed  # they import each other

    def row(series, way="zspace"):
        return found if "stored" in (found := results["series"].get(series, {}).get("ways", {}).get(way, {})) else None

    def percent(series):
        found = row(series)
        return found and 100 * found["stored"] / found["raw"]

    def of_chain(series):
        ours, chain = row(series), row(series, "xor-chain")
        return ours and chain and ours["stored"] / chain["stored"]

    def zipnn(what):
        case = results["codecs"].get("bf16, 34 MB", {})
        return case.get("zipnn") and case["alone"]["chosen"][what] / case["zipnn"][what]

    def memory(verb, series):
        found = row(series)
        return found and found[f"{verb}_memory"] / MIB

    pythia, longer = row("pythia-10"), row("pythia-20")
    last = longer and rebuild_speed(longer, "last")
    chain = "XOR + zstd-3 as one chain"
    # What, goal, whether at most or at least, unit, measured.
    table = [
        ("`bf16-lowrate` (12 × 1.3 MB, by --series): stored", 7.6, "≤", "% of raw", percent("bf16-lowrate")),
        ("`low-20` (20 × 34 MB, bf16 low rate): stored", 6.0, "≤", "% of raw", percent("low-20")),
        ("`low-100` (100 × 34 MB): stored", 3.8, "≤", "% of raw", percent("low-100")),
        ("`pythia-10` (10 × 811 MB): stored", 8.8, "≤", "% of raw", percent("pythia-10")),
        (f"`high-32` (bf16 high rate): stored, of {chain}", 0.75, "≤", "×", of_chain("high-32")),
        (f"`minilm-8` (float32 with AdamW state): stored, of {chain}", 0.82, "≤", "×", of_chain("minilm-8")),
        ("one bf16 checkpoint without a base: bytes, of ZipNN's", 1.0, "≤", "×", zipnn("ratio")),
        ("the same: speed of encoding, one thread, of ZipNN's", 1.0, "≥", "×", zipnn("encode")),
        ("the same: speed of decoding, one thread, of ZipNN's", 1.0, "≥", "×", zipnn("decode")),
        ("commit of an 811 MB checkpoint against its parent", 350, "≥", "MB/s", pythia and commit_speed(pythia)),
        ("the same, of `cp` + fsync", 0.3, "≥", "×", pythia and of_copy(pythia)),
        ("rebuild of the last of 20 × 811 MB, verified", 600, "≥", "MB/s", last),
        ("peak memory of that commit, 256 MiB of cache included", 512, "≤", "MiB", memory("commit", "pythia-10")),
        ("peak memory of that rebuild, 256 MiB of cache included", 512, "≤", "MiB", memory("rebuild", "pythia-20")),
    ]
    lines = [line(["what", "goal", "measured", ""]), "|---|--:|--:|---|"]
    for what, goal, side, unit, value in table:
        digits = 0 if goal >= 100 else 3 if unit == "×" else 2
        shown = "not measured yet" if value is None else f"{value:,.{digits}f} {unit}"
        verdict = "" if value is None else "met" if (value <= goal if side == "≤" else value >= goal) else "**missed**"
        lines.append(line([what, f"{side} {goal:g} {unit}", shown, verdict]))
    return "\n".join(lines)
