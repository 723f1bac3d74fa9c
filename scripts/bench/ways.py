"""The ways to keep a series. Each runs one command to put a checkpoint in and one to get it back."""
import json
import os
import shutil
from pathlib import Path

import tools
from backups import Borg, Restic, Zstd
from measure import Cost, Failed, run, same, same_files, start
from trees import Dvc, GitLfs
from way import SHARED_MEMORY, Way

ZSPACE = Path(os.environ.get("ZSPACE_BIN") or tools.ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/zspace")


class Zspace(Way):
    about = "as it comes; the commit ends when all is on disk and has been decoded and compared; a rebuild checks every hash"
    commands = ("zspace commit CHECKPOINT", "zspace cat main/N:CHECKPOINT >/dev/null")

    def lacks(self):
        return None if ZSPACE.is_file() else "no release build (cargo build --release)"

    def begin(self, work):
        self.store = work / "store"
        run(self.command("init"))

    def command(self, verb, *args):
        return [ZSPACE, verb, "--store", self.store, *args]

    def save(self, number, checkpoint, before):
        return run(self.command("commit", checkpoint))

    def cat(self, number, checkpoint):
        return self.command("cat", f"main/{number + 1}:{checkpoint.name}")

    def export(self, number, checkpoint):
        target = SHARED_MEMORY / f"zspace-bench-{os.getpid()}"
        shutil.rmtree(target, ignore_errors=True)
        return target, self.command("export", f"main/{number + 1}", target)

    def load(self, number, checkpoint):
        if not checkpoint.is_dir():
            return run(self.cat(number, checkpoint))
        target, command = self.export(number, checkpoint)
        cost = run(command)
        shutil.rmtree(target)
        return cost

    def check(self, number, checkpoint):
        if not checkpoint.is_dir():
            return same(self.cat(number, checkpoint), checkpoint)
        target, command = self.export(number, checkpoint)
        run(command)
        same_files(target / checkpoint.name, checkpoint)
        shutil.rmtree(target)

    def repack(self):
        """What `zspace repack` cost, or None if there is no such verb."""
        try:
            run([ZSPACE, "repack", "--help"])
        except Failed:
            return None
        return run(self.command("repack"))


class Library(Way):
    """A way of library.py."""

    def __init__(self, name, way, module, about):
        super().__init__(name)
        self.way, self.module, self.about = way, module, about
        self.commands = (f"library.py {way} save STORE N CHECKPOINT", f"library.py {way} load STORE N CHECKPOINT")

    def lacks(self):
        self.python = tools.python()
        return tools.lacks_module(self.python, self.module)

    def call(self, verb, number, *more):
        command = [self.python, "-W", "ignore", tools.HERE / "library.py", self.way, verb, self.store, number, *more]
        environment = {"HF_HOME": self.store.parent / "hf", "HF_XET_LOG_DEST": "", "MOONCLIP_LOG": ""}
        process = start(command, stdout=-1, environment={k: str(v) for k, v in environment.items()})
        out, errors = process.communicate()
        if process.returncode:
            raise Failed(f"library.py {self.way} {verb}: {(errors.decode(errors='replace').strip().splitlines() or ['?'])[-1]}")
        return json.loads(out.splitlines()[-1])

    def save(self, number, checkpoint, before):
        said = self.call("save", number, checkpoint, *([before] if before else []))
        self.sent = said.get("sent", 0) + (self.sent if number else 0)
        return Cost(said["seconds"], said["memory"])

    def load(self, number, checkpoint):
        said = self.call("load", number, checkpoint)
        return Cost(said["seconds"], said["memory"])

    def check(self, number, checkpoint):
        self.call("load", number, checkpoint, "--check")

    def stored(self):
        return self.sent or super().stored()


WAYS = {
    "zspace": Zspace("zspace"),
    "xor-chain": Library("XOR + zstd-3, one chain", "xor-chain", "zstandard", "by tensor, written for this in Python, both cores"),
    "xor-8": Library("XOR + zstd-3, full copy every 8", "xor-8", "zstandard", "the same"),
    "moonclip": Library("moonclip", "moonclip", "moonclip", "0.3.1 from PyPI as it comes, nothing dropped; tensors, not files"),
    "zipnn": Library("ZipNN", "zipnn", "zipnn", "0.5.4 from PyPI, each file by itself, both cores"),
    "zstd": Zstd("zstd -3", ["-3"]),
    "zstd-long": Zstd("zstd -3 --long=27", ["-3", "--long=27"]),
    "borg": Borg("borg"),
    "restic": Restic("restic"),
    "dvc": Dvc("DVC"),
    "git-lfs": GitLfs("git-lfs"),
    "hf-xet": Library("hf-xet", "hf-xet", "hf_xet", "1.8.0 from PyPI against a directory (`local://`); bytes it would have sent"),
}
