"""Finding a version again: what log, diff, blame and the plot tell."""
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from files import natural


@pytest.fixture
def trained(zspace, tmp_path):
    """Six versions of a model with three layers, of which the first is frozen and the last moves most; returns each one's tensors."""
    torch.manual_seed(1)
    weights = {f"layers.{n}.weight": torch.randn(40, 30) for n in range(3)} | {"head": torch.randn(30)}
    made = []
    for n in range(6):
        made.append({k: v.clone() for k, v in weights.items()})
        checkpoint = {"model": weights, "epoch": n / 2, "global_step": (n + 1) * 10, "loss": 3.0 / (n + 1), "val_loss": 3.5 / (n + 1)}
        torch.save(checkpoint, tmp_path / "model.pt")
        zspace.run("commit", tmp_path / "model.pt", "-m", f"round {n}" + (" Best" if n == 4 else ""))
        weights["layers.1.weight"][:20] += 1e-3
        if n == 2:
            weights["layers.2.weight"] += torch.randn(40, 30)
    zspace.run("tag", "good", "main/3")
    return made


def test_log_tells_what_the_checkpoints_say(zspace, trained):
    lines = zspace.json_lines("log")[::-1]
    assert [v["step"] for v in lines] == [10, 20, 30, 40, 50, 60]
    assert [v["epoch"] for v in lines] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [v["loss"] for v in lines] == [3.0 / (n + 1) for n in range(6)]
    assert lines[0]["all"] == {"epoch": 0, "global_step": 10, "loss": 3.0, "val_loss": 3.5}
    text = zspace.out("log").splitlines()
    assert text[0].split()[:8] == ["version", "id", "time", "size", "stored", "step", "epoch", "loss"]
    assert "0.6" in text[2] and "[good]" in text[4]
    # Columns that nobody fills are left out.
    assert len(zspace.json_lines("log", "-n", 2)) == 2
    assert [v["version"] for v in zspace.json_lines("log", "--grep", "(?i)best|^good$")] == ["main/000005", "main/000003"]
    assert zspace.run("log", "--grep", "(", ok=False).returncode == 64


def test_log_and_diff_tell_how_much_changed(zspace, trained):
    changed = [v.get("changed") for v in zspace.json_lines("log", "--changed")[::-1]]
    assert changed[0] is None
    for n in range(1, 6):
        pairs = [(trained[n - 1][k], trained[n][k]) for k in trained[n]]
        differ = sum((a != b).sum().item() for a, b in pairs)
        assert changed[n] == pytest.approx(differ / sum(b.numel() for _, b in pairs))
    # Those that changed most come first, and the numbers are those of numpy.
    d = zspace.json("diff", "main/3", "main/4")
    assert [t["name"] for t in d["tensors"]][:2] == ["model/layers.2.weight", "model/layers.1.weight"]
    for t in d["tensors"]:
        a, b = (trained[n][t["name"].removeprefix("model/")].double().numpy() for n in (2, 3))
        assert t["relative_norm"] == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a))
        assert t["largest"] == pytest.approx(np.abs(b - a).max())
        assert t["changed"] == pytest.approx((a != b).mean())
    assert zspace.out("diff", "main/3", "main/4").splitlines()[1].endswith("model/layers.2.weight")


def test_blame_tells_when_a_tensor_changed(zspace, trained, tmp_path):
    blamed = zspace.json_lines("blame", "model/layers.2.weight")
    assert [(b["version"], b["what"]) for b in blamed] == [("main/000001", "added"), ("main/000004", "changed")]
    assert blamed[1]["step"] == 40 and blamed[1]["changed"] == 1.0
    assert len(zspace.json_lines("blame", "model/layers.1.weight")) == 6
    assert len(zspace.json_lines("blame", "model/layers.0.weight")) == 1
    torch.save({"model": {"layers.0.weight": torch.ones(3)}}, tmp_path / "model.pt")
    zspace.commit(tmp_path / "model.pt")
    last = zspace.json_lines("blame", "model/layers.0.weight")[-1]
    assert last["what"] == "changed" and last["changed"] == 1.0
    assert zspace.json_lines("blame", "model/head")[-1]["what"] == "removed"
    assert "became" in zspace.out("blame", "model/layers.0.weight")
    nothing = zspace.run("blame", "model/none", ok=False)
    assert nothing.returncode == 1 and "zspace tensors" in nothing.stderr


def texts(path):
    return ["".join(t.itertext()).strip() for t in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


def test_the_plot_says_what_it_shows(zspace, trained, tmp_path):
    picture = tmp_path / "plot.svg"
    zspace.run("log", "--plot", picture)
    said = texts(picture)
    assert said[0].startswith("main: 6 versions")
    for text in ("Bytes that each version added to the store", "Change by layer since the version before: |b-a| / |a|",
                 "Loss, as the checkpoints say", "model/layers.0", "model/layers.2", "unchanged", "step", "60", "loss"):  # fmt: skip
        assert text in said, said
    # It is drawn anew over an old one, but over nothing else.
    zspace.run("log", "--plot", picture, "-n", 3)
    assert texts(picture)[0].startswith("main: 3 versions")
    (tmp_path / "notes").write_text("mine")
    assert zspace.run("log", "--plot", tmp_path / "notes", ok=False).returncode == 1
    assert (tmp_path / "notes").read_text() == "mine"


def test_facts_of_a_real_series(zspace, series):
    for path in sorted(series("shipped"), key=natural):
        zspace.commit(path)
    assert [v["step"] for v in zspace.json_lines("log")] == [60, 40, 20]
    # What is damaged is listed all the same.
    for pack in (zspace.store / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        data[100 : len(data) - 1] = bytes(len(data) - 101)
        pack.write_bytes(data)
    for kept in (zspace.store / "facts").iterdir():
        kept.unlink()
    assert len(zspace.json_lines("log")) == 3


def test_metadata_of_safetensors_counts(zspace, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors", metadata={"step": "7", "loss": "0.25", "note": "x"})
    zspace.commit(tmp_path / "m.safetensors")
    (line,) = zspace.json_lines("log")
    assert (line["step"], line["epoch"], line["loss"]) == (7, None, 0.25)
    assert json.dumps(line["all"]) == '{"loss": 0.25, "step": 7.0}'
