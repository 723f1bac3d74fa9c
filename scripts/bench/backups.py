"""Debian's zstd, borg and restic."""
import shlex
import shutil

import tools
from measure import files, run, same, same_files
from way import Way


class Zstd(Way):
    commands = ("zstd {} FILE && sync", "zstd -dc {} FILE.zst >/dev/null")

    def __init__(self, name, options):
        super().__init__(name)
        self.options = options
        self.decoding = [o for o in options if o.startswith("--long")]
        self.about = "each file by itself, the Debian package"
        self.commands = (
            f"zstd {shlex.join(options)} FILE -o STORE/N.zst && sync STORE/N.zst",
            f"zstd -dc {shlex.join(self.decoding)} STORE/N.zst >/dev/null".replace("  ", " "),
        )

    def lacks(self):
        return tools.lacks("zstd")

    def kept(self, number, checkpoint):
        return [self.store / f"{number:06}-{i}.zst" for i, _ in enumerate(files(checkpoint))]

    def save(self, number, checkpoint, before):
        pairs = list(zip(files(checkpoint), self.kept(number, checkpoint)))
        one = "zstd -q {} {} -o {} && sync {}"
        return run(" && ".join(one.format(shlex.join(self.options), shlex.quote(str(a)), b, b) for a, b in pairs))

    def command(self, number, checkpoint):
        return ["zstd", "-q", "-dc", *self.decoding, *self.kept(number, checkpoint)]

    def load(self, number, checkpoint):
        return run(self.command(number, checkpoint))

    def check(self, number, checkpoint):
        same(self.command(number, checkpoint), checkpoint)


class Borg(Way):
    about = "Debian's, no encryption, zstd 3"
    commands = ("borg create -C zstd,3 STORE::N CHECKPOINT", "borg extract --stdout STORE::N >/dev/null")

    def lacks(self):
        return tools.lacks("borg")

    def begin(self, work):
        self.store, self.environment = work / "store", {"BORG_BASE_DIR": str(work / "home")}
        run(["borg", "init", "-e", "none", self.store], environment=self.environment)

    def save(self, number, checkpoint, before):
        command = ["borg", "create", "-C", "zstd,3", f"{self.store}::{number}", checkpoint.name]
        return run(command, cwd=checkpoint.parent, environment=self.environment)

    def command(self, number):
        return ["borg", "extract", "--stdout", f"{self.store}::{number}"]

    def load(self, number, checkpoint):
        return run(self.command(number), environment=self.environment)

    def check(self, number, checkpoint):
        same(self.command(number), checkpoint, environment=self.environment)


class Restic(Way):
    about = "Debian's, as it comes (it always encrypts)"
    commands = ("restic backup CHECKPOINT", "restic dump --tag N latest CHECKPOINT >/dev/null")

    def lacks(self):
        return tools.lacks("restic")

    def begin(self, work):
        self.store, self.out = work / "store", work / "out"
        self.environment = {"RESTIC_PASSWORD": "x", "XDG_CACHE_HOME": str(work / "cache")}
        run(self.command("init"), environment=self.environment)

    def command(self, *args):
        return ["restic", "-q", "-r", self.store, *args]

    def save(self, number, checkpoint, before):
        return run(self.command("backup", "--tag", number, checkpoint), environment=self.environment)

    def dump(self, number, checkpoint):
        return self.command("dump", "--tag", number, "latest", checkpoint)

    def load(self, number, checkpoint):
        return run(self.dump(number, checkpoint), environment=self.environment)

    def check(self, number, checkpoint):
        if not checkpoint.is_dir():
            return same(self.dump(number, checkpoint), checkpoint, environment=self.environment)
        shutil.rmtree(self.out, ignore_errors=True)
        run(self.command("restore", "--tag", number, "latest", "--target", self.out), environment=self.environment)
        same_files(self.out / checkpoint.relative_to("/"), checkpoint)
