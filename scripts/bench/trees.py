"""git-lfs and DVC, which take a working directory."""
import os
import shlex
import shutil

import tools
from measure import run, same, same_files
from way import SHARED_MEMORY, Way


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
