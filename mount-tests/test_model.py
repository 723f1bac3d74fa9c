"""Random operations in staging against a model in memory, with commits and kill -9 of the mount in between.

ZSPACE_MODEL_SECONDS=600 makes each test longer, ZSPACE_MODEL_SEED=7 repeats a failure, which tells its seed and operations."""
import errno
import os
import random
import time
import traceback

import pytest

from model import EXCHANGE, KEEP_SIZE, NOREPLACE, PUNCH_HOLE, ZERO, Disk, Model, difference, expected, observed

SECONDS = float(os.environ.get("ZSPACE_MODEL_SECONDS", "12"))
SEED = int(os.environ.get("ZSPACE_MODEL_SEED") or time.time_ns() % 1_000_000)
BRANCHES = ("main", "exp")
ENTRIES = ("d1", "d2", "d3", "d4", "f.bin", "g.pt", ".w.tmp")
INSIDE = ("a", "b", "c", "ü n", "t.tmp", ".dot")
SLOTS = 3
# Of each operation how often, and what it is called with.
WEIGHTS = {
    "create": 14, "mkdir": 8, "symlink": 3, "link": 5, "unlink": 6, "rmdir": 3, "rename": 12, "rewrite": 5, "write": 10,
    "append": 5, "truncate": 5, "map_write": 4, "fallocate": 5, "copy_range": 4, "read": 10, "list": 4, "chmod": 4, "utime": 4,
    "setxattr": 4, "removexattr": 2, "open": 6, "slot_write": 8, "slot_read": 5, "slot_truncate": 2, "close": 3,
}  # fmt: skip


class Run:
    """A run of random operations on `root` and the model. With `links`, hard links may lead from one entry to another; such links
    last only until a commit."""

    def __init__(self, seed, root, links=True):
        self.seed, self.links = seed, links
        self.random = random.Random(seed)
        self.model, self.disk = Model(BRANCHES), Disk(root)
        self.log = []

    # Operations

    def paths(self):
        """All paths of the model, entries and below."""
        found, todo = [], [((branch,), node) for branch, node in self.model.root.content.items()]
        while todo:
            at, node = todo.pop()
            for name, child in node.content.items():
                found.append((*at, name))
                if child.kind == "dir":
                    todo.append(((*at, name), child))
        return sorted(found)

    def path(self, new=False):
        """A path: mostly one that is there (or, if `new`, is not, in a directory that is)."""
        there = self.paths()
        chance = self.random.random()
        if not new and there and chance < 0.9:
            return self.random.choice(there)
        directories = [(branch,) for branch in BRANCHES]
        directories += [p for p in there if len(p) < 6 and (chance > 0.95 or self.model.find(p).kind == "dir")]
        at = self.random.choice(directories)
        return (*at, self.random.choice(ENTRIES if len(at) == 1 else INSIDE))

    def data(self):
        size = self.random.choice((0, 1, 100, 4096, 5000, 20_000)) if self.random.random() < 0.9 else 300_000
        return self.random.randbytes(self.random.randint(size // 2, size))

    def offset(self):
        return self.random.choice((0, 1, 4096, self.random.randint(0, 30_000)))

    def mode(self, directory):
        return self.random.choice((0o755, 0o700, 0o555, 0o1777, 0) if directory else (0o644, 0o600, 0o444, 0o4755, 0o2755, 0))

    def arguments(self, name):
        r = self.random
        match name:
            case "create":
                return self.path(r.random() < 0.9), self.mode(False), self.data()
            case "mkdir":
                return self.path(r.random() < 0.9), self.mode(True)
            case "symlink":
                return self.path(True), r.choice(("a", "../x", "/nowhere", "ü" * 40))
            case "link":
                old, new = self.path(), self.path(True)
                return old, new if self.links else (*old[:2], r.choice(INSIDE))
            case "rename":
                return self.path(), self.path(r.random() < 0.5), r.choice((0, 0, NOREPLACE, EXCHANGE))
            case "rewrite" | "append":
                return self.path(), self.data()
            case "write":
                return self.path(), self.offset(), self.data()
            case "map_write":
                return self.path(), self.offset(), r.randbytes(r.randint(0, 3000))
            case "truncate":
                return self.path(), r.choice((0, self.offset()))
            case "fallocate":
                mode = r.choice((0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO, ZERO | KEEP_SIZE))
                return self.path(), mode, self.offset(), r.randint(1, 20_000)
            case "copy_range":
                return self.path(), self.path(), self.offset(), self.offset(), r.randint(1, 20_000)
            case "read":
                return self.path(), self.offset(), r.randint(0, 100_000)
            case "chmod":
                path = self.path()
                return path, self.mode(self.kind(path) == "dir")
            case "utime":
                return self.path(), r.randint(-(10**9), 4 * 10**9) * 10**9 + r.randint(0, 999_999_999)
            case "setxattr":
                return self.path(), f"user.{r.choice('xyz')}", r.randbytes(r.randint(0, 300)), r.choice((0, 0, 1, 2))
            case "removexattr":
                return self.path(), f"user.{r.choice('xyz')}"
            case "open":
                free = [n for n in range(SLOTS) if n not in self.model.slots]
                return free and (free[0], self.path(), r.random() < 0.7)
            case "slot_write" | "slot_read" | "slot_truncate" | "close":
                slots = sorted(s for s in self.model.slots if self.slot_fits(name, s))
                if not slots:
                    return None
                more = {"slot_write": lambda: (self.offset(), self.data()), "slot_truncate": lambda: (self.offset(),)}
                more |= {"slot_read": lambda: (self.offset(), r.randint(0, 50_000)), "close": lambda: ()}
                return r.choice(slots), *more[name]()
            case _:
                return (self.path(),)

    def slot_fits(self, name, slot):
        return name in ("slot_read", "close") or slot in self.writers

    def kind(self, path):
        try:
            return self.model.find(path).kind
        except OSError:
            return None

    def step(self):
        """One random operation on both; they must answer alike."""
        name = self.random.choices(list(WEIGHTS), WEIGHTS.values())[0]
        arguments = self.arguments(name)
        if not arguments or any(self.through_link(name, a) for a in arguments):
            return
        # A version keeps hard links of files only.
        if name == "link" and self.kind(arguments[0]) == "link":
            return
        if name == "rename" and not self.links and any(self.shared(a) for a in arguments[:2]):
            return
        self.call(name, *arguments)

    def shared(self, path):
        """Whether something at or below a path has names elsewhere."""
        if not self.kind(path):
            return False
        inside = list(nodes(self.model.find(path)))
        return any(n.kind != "dir" and n.names > inside.count(n) for n in inside)

    def through_link(self, name, path):
        """Whether the disk would follow a symbolic link, which the model does not."""
        ends = range(1, len(path) + (name == "list")) if isinstance(path, tuple) else ()
        return any(self.kind(path[:end]) == "link" for end in ends)

    writers = frozenset()

    def call(self, name, *arguments):
        self.log.append(f"{name}{tuple(short(a) for a in arguments)}")
        answers = []
        for side in (self.model, self.disk):
            try:
                answers.append(getattr(side, name)(*arguments))
            except OSError as e:
                answers.append(errno.errorcode[e.errno])
        want, got = answers
        assert want == got, f"{self.log[-1]} should answer {short(want)} and answers {short(got)}"
        if name == "open" and arguments[2] and want is None:
            self.writers |= {arguments[0]}
        if name == "close":
            self.writers -= {arguments[0]}

    # Checks

    def check(self):
        """Everything must be on disk as in the model; inodes stay what they were."""
        for branch in BRANCHES:
            inodes, node = {}, self.model.find((branch,))
            got = observed(self.disk.at((branch,)), inodes=inodes)
            # A branch is no entry: its own times and mode are not a version's.
            want = expected(node)
            want[""] = got[""][:5] + want[""][5:]
            wrong = difference(want, got)
            assert not wrong, f"{branch}{wrong}"
            for name, ino in inodes.items():
                found = self.model.find((branch, *name.split("/")[1:]))
                assert found.ino in (None, ino), f"{branch}{name}: inode {found.ino} became {ino}"
                found.ino = ino

    def failed(self, why, more=""):
        operations = "\n".join(self.log)
        pytest.fail(f"seed {self.seed}, operation {len(self.log)}: {why}\n{more}\nAll operations:\n{operations}", pytrace=False)

    def close_all(self):
        for slot in list(self.model.slots):
            self.call("close", slot)


def short(value):
    return f"<{len(value)} bytes {value[:4].hex()}>" if isinstance(value, bytes) and len(value) > 8 else value


@pytest.fixture(autouse=True)
def no_umask():
    old = os.umask(0)
    yield
    os.umask(old)


@pytest.mark.skipif(os.geteuid() != 0, reason="as root nothing is refused for its mode")
class TestModel:
    def test_the_model_is_right(self, tmp_path):
        """An ordinary disk does what the model says."""
        root = tmp_path / "disk"
        for branch in BRANCHES:
            (root / branch).mkdir(parents=True)
        run = Run(SEED, root)
        end = time.monotonic() + SECONDS / 6
        try:
            while time.monotonic() < end:
                for _ in range(50):
                    run.step()
                run.check()
            run.close_all()
        except (AssertionError, OSError) as e:
            run.failed(reason(e))

    @pytest.mark.timeout(SECONDS * 3 + 120)
    def test_commits_on_request_and_kills(self, mounts):
        mount = mounts(settle=3600, **{"settle-dir": 3600})
        run = Run(SEED, mount.staging("").resolve(), links=False)
        os.mkdir(run.disk.at(("exp",)))
        end = time.monotonic() + SECONDS
        try:
            while time.monotonic() < end:
                for _ in range(run.random.randint(1, 40)):
                    run.step()
                what = run.random.random()
                if what < 0.6:
                    commit(run, mount)
                elif what < 0.7:
                    kill(run, mount)
                run.check()
            run.close_all()
            assert mount.zspace.verify()
        except (AssertionError, OSError) as e:
            run.failed(reason(e), mount.messages()[-3000:])

    def test_files_that_a_commit_took_apart_are_two(self, mounts):
        """A hard link between entries ends with the commit of one: what is written to one is not in the other."""
        mount = mounts(settle=3600, **{"settle-dir": 3600})
        one, other = mount.staging() / "d/f", mount.staging() / "e/f"
        for directory in (one.parent, other.parent):
            directory.mkdir()
        one.write_text("old")
        os.link(one, other)
        mount.zspace.commit(one.parent)
        other.write_text("new")
        assert (one.read_text(), other.read_text()) == ("old", "new")

    def test_a_removed_hard_link_counts_no_more(self, mounts):
        """Nor in an entry that is served from its version."""
        mount = mounts(settle=3600, **{"settle-dir": 3600})
        directory = mount.staging() / "d"
        (directory / "sub").mkdir(parents=True)
        (directory / "a").write_text("data")
        for name in ("b", "sub/c", "sub/d"):
            os.link(directory / "a", directory / name)
        mount.zspace.commit(directory)
        for left, name in ((3, "a"), (2, "sub/c")):
            (directory / name).unlink()
            assert {(directory / n).stat().st_nlink for n in ("b", "sub/d")} == {left}
        assert (mount.version(1) / "d/b").stat().st_nlink == 4
        os.unlink(directory / "b")
        assert (directory / "sub/d").stat().st_nlink == 1

    @pytest.mark.timeout(SECONDS * 3 + 120)
    def test_commits_by_themselves(self, mounts):
        """What settles is committed at any moment: nobody may notice, and each version is what the model once was."""
        mount = mounts(settle=0.05, **{"settle-dir": 0.1})
        run = Run(SEED, mount.staging("").resolve(), links=False)
        os.mkdir(run.disk.at(("exp",)))
        states, end = {}, time.monotonic() + SECONDS
        try:
            while time.monotonic() < end:
                for _ in range(run.random.randint(1, 40)):
                    run.step()
                    note(run, states)
                if run.random.random() < 0.4:
                    run.close_all()
                    time.sleep(run.random.choice((0.1, 0.3, 0.6)))
                run.check()
            run.close_all()
            for branch in BRANCHES:
                numbers = mount.versions(branch)
                assert len(numbers) >= SECONDS / 12, f"{branch} has only {len(numbers)} versions\n{mount.status()}"
                for number in numbers:
                    version = mount.version(number, branch)
                    for name in os.listdir(version):
                        got = print_of(observed(version / name))
                        assert got in states[branch, name], f"{version / name} is not what the model ever was"
            assert mount.zspace.verify()
        except (AssertionError, OSError) as e:
            run.failed(reason(e), mount.messages()[-3000:])


def print_of(tree):
    """What two equal trees have in common, without what only the disk knows."""
    return hash(repr([(name, f[0], f[1], f[5], sorted(f[6].items())) for name, f in sorted(tree.items())]))


def note(run, states):
    """Remembers what each entry is now."""
    for branch in BRANCHES:
        for name, node in run.model.find((branch,)).content.items():
            states.setdefault((branch, name), set()).add(print_of(expected(node)))


def commit(run, mount):
    """Commits an entry on request: it must read as before, and its version must be the same."""
    # A path that is a symbolic link means what it leads to.
    entries = [p for p in run.paths() if len(p) == 2 and not p[1].startswith(".") and run.kind(p) != "link"]
    if not entries:
        return
    path = run.random.choice(entries)
    if run.shared(path):
        # Hard links to other entries last until the commit, but longer while somebody writes: nobody shall.
        run.close_all()
        run.model.commit(path)
    # A reader from before a commit goes on with the file that was committed, not with what is written after.
    inside = set(nodes(run.model.find(path)))
    for slot, opened in list(run.model.slots.items()):
        if opened in inside and slot not in run.writers:
            run.call("close", slot)
    run.log.append(f"commit{path}")
    before = observed(run.disk.at(path))
    [(branch, number, _)] = mount.zspace.commit(run.disk.at(path))
    run.log[-1] += f" -> {branch}/{number}"
    names = os.listdir(mount.version(number, branch))
    assert names == [path[1]], f"the version of {path[1]} holds {names}"
    after, version = observed(run.disk.at(path)), observed(mount.version(number, branch) / path[1])
    # Before, links from outside the entry counted.
    wanted = expected(run.model.find(path))
    for name, fields in before.items():
        fields[3] = wanted[name][3]
    for name, tree in (("staging", after), ("its version", version)):
        wrong = difference(wanted, tree) or difference(before, tree)
        assert not wrong, f"{name} after {run.log[-1]}: {wrong}"
    for name, fields in before.items():
        run.model.find((*path, *name.split("/")[1:])).mtime = fields[2]


def nodes(node):
    yield node
    if node.kind == "dir":
        for child in node.content.values():
            yield from nodes(child)


def kill(run, mount):
    """kill -9 of the mount, and a new one: handles are lost, nothing else."""
    run.log.append("kill")
    mount.kill()
    for slot in list(run.model.slots):
        fd = run.disk.slots.pop(slot)
        run.model.close(slot)
        try:
            os.close(fd)
        except OSError:
            pass
    run.writers = frozenset()
    for branch in BRANCHES:
        for node in nodes(run.model.find((branch,))):
            node.ino = None
    mount.start()


def reason(error):
    return "".join(traceback.format_exception(error)[-3:])
