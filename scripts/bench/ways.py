"""The ways to keep a series. Each runs one command to put a checkpoint in and one to get it back."""
import json
import os
import shlex
import shutil
from pathlib import Path

import tools
from measure import Cost, Failed, files, run, same, same_files, size, start

ZSPACE = Path(os.environ.get("ZSPACE_BIN") or tools.ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/zspace")
SHARED_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")


class Way:
    """One way. `work` is an empty directory; versions are numbered from 0."""

    about = ""
    commands = ("", "")  # as the document shows them: commit, rebuild

    def __init__(self, name):
        self.name = name

    def lacks(self):
        """Why it cannot run here, or None."""

    def begin(self, work):
        self.store = work / "store"
        self.store.mkdir()

    def stage(self, number, checkpoint):
        """What is done before a commit and not timed."""

    def save(self, number, checkpoint, before):
        raise NotImplementedError

    def load(self, number, checkpoint):
        raise NotImplementedError

    def check(self, number, checkpoint):
        """Rebuilds, not timed, and raises Failed if it is not what was put in."""
        raise NotImplementedError

    def stored(self):
        return size(self.store)


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


class Tree(Way):
    """A way whose commit takes a working directory: the checkpoint is copied there first, under one name."""

    def begin(self, work):
        self.store, self.tree = work / "store", work / "tree"
        self.fresh = SHARED_MEMORY / f"zspace-bench-{os.getpid()}"
        self.tree.mkdir()

    def stage(self, number, checkpoint):
        put(checkpoint, self.tree / "data")

    def check(self, number, checkpoint):
        self.load(number, checkpoint, keep=True)
        try:
            if checkpoint.is_dir():
                same_files(self.fresh / "data", checkpoint)
            else:
                same(["cat", self.fresh / "data"], checkpoint)
        finally:
            shutil.rmtree(self.fresh)


def put(checkpoint, target):
    """Copies in place of what is there. Never a link: some tools change the modes of what they are given."""
    run(["rm", "-rf", target])
    run(["cp", "-r", checkpoint, target])


class GitLfs(Tree):
    about = "Debian's, a local repository; the whole of `.git`. Rebuilt into /dev/shm"
    commands = ("git add data && git commit", "git --work-tree=/dev/shm/… checkout -f N -- data")

    def lacks(self):
        return tools.lacks("git") or tools.lacks("git-lfs")

    def begin(self, work):
        super().begin(work)
        self.store = self.tree / ".git"
        name = ["-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "commit.gpgsign=false"]
        self.git = ["git", "-C", self.tree, *name]
        run([*self.git, "init", "-q"])
        run([*self.git, "lfs", "install", "--local"])
        (self.tree / ".gitattributes").write_text("data filter=lfs -text\ndata/** filter=lfs -text\n")
        run([*self.git, "add", ".gitattributes"])

    def save(self, number, checkpoint, before):
        git = shlex.join(map(str, self.git))
        return run(f"{git} add -A && {git} commit -q --allow-empty -m {number} && {git} tag v{number}")

    def load(self, number, checkpoint, keep=False):
        shutil.rmtree(self.fresh, ignore_errors=True)
        self.fresh.mkdir()
        command = [*self.git, f"--git-dir={self.store}", f"--work-tree={self.fresh}", "checkout", "-f", f"v{number}", "--", "data"]
        cost = run(command)
        if not keep:
            shutil.rmtree(self.fresh)
        return cost


class Dvc(Tree):
    about = "from PyPI, cache.type copy, a local cache. Rebuilt into /dev/shm"
    commands = ("dvc add data", "dvc checkout data.dvc")

    def lacks(self):
        self.dvc = tools.dvc()
        return tools.lacks(self.dvc)

    def call(self, tree, *args):
        return run([self.dvc, *args], cwd=tree, environment=self.environment)

    def begin(self, work):
        super().begin(work)
        home = {"XDG_CACHE_HOME": work / "home", "XDG_CONFIG_HOME": work / "home", "DVC_SITE_CACHE_DIR": work / "home"}
        self.environment = {"DVC_NO_ANALYTICS": "1"} | {k: str(v) for k, v in home.items()}
        self.project(self.tree)

    def project(self, tree):
        tree.mkdir(exist_ok=True)
        self.call(tree, "init", "-q", "--no-scm")
        settings = {"cache.dir": self.store, "cache.type": "copy", "core.analytics": "false", "core.check_update": "false"}
        for name, value in settings.items():
            self.call(tree, "config", "-q", name, value)

    def save(self, number, checkpoint, before):
        cost = self.call(self.tree, "add", "-q", "data")
        shutil.copy(self.tree / "data.dvc", self.tree / f"{number}.kept")
        return cost

    def load(self, number, checkpoint, keep=False):
        shutil.rmtree(self.fresh, ignore_errors=True)
        self.project(self.fresh)
        shutil.copy(self.tree / f"{number}.kept", self.fresh / "data.dvc")
        cost = self.call(self.fresh, "checkout", "-q", "data.dvc")
        if not keep:
            shutil.rmtree(self.fresh)
        return cost


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
