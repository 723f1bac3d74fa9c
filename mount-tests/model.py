"""A directory tree in memory that does what an ordinary disk does: `Model`; and the same calls on a real one: `Disk`.

Paths are tuples of names. A call that fails raises OSError, of which only the number counts. Both are asked as root, so nothing is
ever refused for its mode."""
import ctypes
import errno
import mmap
import os
import stat

NOREPLACE, EXCHANGE = 1, 2
KEEP_SIZE, PUNCH_HOLE, ZERO = 1, 2, 16
libc = ctypes.CDLL(None, use_errno=True)


def fail(number):
    raise OSError(number, os.strerror(number))


class Node:
    """An inode. `mtime` is None while only the disk knows it."""

    def __init__(self, kind, mode, content):
        self.kind, self.mode, self.content = kind, mode, content
        self.names, self.mtime, self.xattrs, self.ino = 1, None, {}, None

    def copy(self, known):
        """A copy of the node and all below it; hard links within it stay links."""
        if id(self) in known:
            known[id(self)].names += 1
            return known[id(self)]
        content = self.content
        if self.kind == "dir":
            content = {name: node.copy(known) for name, node in content.items()}
        elif self.kind == "file":
            content = bytearray(content)
        twin = Node(self.kind, self.mode, content)
        twin.mtime, twin.xattrs, twin.ino = self.mtime, dict(self.xattrs), self.ino
        known[id(self)] = twin
        return twin


class Model:
    def __init__(self, branches):
        self.root = Node("dir", 0o755, {name: Node("dir", 0o755, {}) for name in branches})
        self.slots = {}

    # Finding

    def find(self, path):
        node = self.root
        for name in path:
            if node.kind != "dir":
                fail(errno.ENOTDIR)
            node = node.content.get(name) or fail(errno.ENOENT)
        return node

    def parent(self, path):
        node = self.find(path[:-1])
        return node if node.kind == "dir" else fail(errno.ENOTDIR)

    def file(self, path):
        node = self.find(path)
        if node.kind != "file":
            fail(errno.EISDIR if node.kind == "dir" else errno.ELOOP)
        return node

    def add(self, path, node):
        parent = self.parent(path)
        if path[-1] in parent.content:
            fail(errno.EEXIST)
        parent.content[path[-1]] = node
        parent.mtime = None

    # Names

    def mkdir(self, path, mode):
        self.add(path, Node("dir", mode, {}))

    def symlink(self, path, target):
        self.add(path, Node("link", 0o777, target))

    def link(self, old, new):
        node = self.find(old)
        if new[-1] in self.parent(new).content:
            fail(errno.EEXIST)
        if node.kind == "dir":
            fail(errno.EPERM)
        self.add(new, node)
        node.names += 1

    def drop(self, path):
        parent = self.parent(path)
        parent.content.pop(path[-1]).names -= 1
        parent.mtime = None

    def unlink(self, path):
        if self.find(path).kind == "dir":
            fail(errno.EISDIR)
        self.drop(path)

    def rmdir(self, path):
        node = self.find(path)
        if node.kind != "dir":
            fail(errno.ENOTDIR)
        if node.content:
            fail(errno.ENOTEMPTY)
        self.drop(path)

    def rename(self, old, new, flags):
        source_dir, target_dir = self.parent(old), self.parent(new)
        source = source_dir.content.get(old[-1]) or fail(errno.ENOENT)
        target = target_dir.content.get(new[-1])
        if target and flags == NOREPLACE:
            fail(errno.EEXIST)
        if not target and flags == EXCHANGE:
            fail(errno.ENOENT)
        if source.kind == "dir" and len(new) > len(old) and new[: len(old)] == old:
            fail(errno.EINVAL)
        if len(old) > len(new) and old[: len(new)] == new:
            fail(errno.EINVAL if flags == EXCHANGE else errno.ENOTEMPTY)
        if source is target:
            return
        if flags == EXCHANGE:
            source_dir.content[old[-1]], target_dir.content[new[-1]] = target, source
        else:
            if target:
                if source.kind == "dir" and target.kind != "dir":
                    fail(errno.ENOTDIR)
                if source.kind != "dir" and target.kind == "dir":
                    fail(errno.EISDIR)
                if target.kind == "dir" and target.content:
                    fail(errno.ENOTEMPTY)
                target.names -= 1
            del source_dir.content[old[-1]]
            target_dir.content[new[-1]] = source
        source_dir.mtime = target_dir.mtime = None

    def commit(self, path):
        """What was hard-linked to from outside the entry is a file of its own from now on. Nothing else changes."""
        inside = {}

        def count(node):
            if node.kind == "dir":
                for child in node.content.values():
                    count(child)
            else:
                inside[id(node)] = inside.get(id(node), 0) + 1

        def part(directory, twins):
            for name, node in directory.content.items():
                if node.kind == "dir":
                    part(node, twins)
                elif node.names > inside[id(node)] and id(node) not in twins:
                    twins[id(node)] = Node.copy(node, {})
                    twins[id(node)].names = inside[id(node)]
                    twins[id(node)].ino = node.ino = None
                    node.names -= inside[id(node)]
                    directory.content[name] = twins[id(node)]
                elif id(node) in twins:
                    directory.content[name] = twins[id(node)]

        count(self.find(path))
        entry = Node("dir", 0, {path[-1]: self.find(path)})
        part(entry, {})
        self.parent(path).content.update(entry.content)

    # What files hold

    def put(self, node, at, data):
        if data:
            if len(node.content) < at:
                node.content.extend(bytes(at - len(node.content)))
            node.content[at : at + len(data)] = data
            node.mtime = None
        return len(data)

    def cut(self, node, size):
        del node.content[size:]
        node.content.extend(bytes(size - len(node.content)))
        node.mtime = None

    def create(self, path, mode, data):
        node = Node("file", mode, bytearray(data))
        self.add(path, node)

    def rewrite(self, path, data):
        node = self.file(path)
        self.cut(node, 0)
        return self.put(node, 0, data)

    def write(self, path, at, data):
        return self.put(self.file(path), at, data)

    def append(self, path, data):
        node = self.file(path)
        return self.put(node, len(node.content), data)

    def truncate(self, path, size):
        self.cut(self.file(path), size)

    def map_write(self, path, at, data):
        node = self.file(path)
        if at + len(data) > len(node.content):
            fail(errno.EINVAL)
        self.put(node, at, data)

    def fallocate(self, path, mode, at, length):
        node = self.file(path)
        size = len(node.content)
        if mode & (PUNCH_HOLE | ZERO):
            end = min(at + length, size)
            if end > at:
                node.content[at:end] = bytes(end - at)
        if not mode & KEEP_SIZE and at + length > size:
            node.content.extend(bytes(at + length - size))
        node.mtime = None

    def copy_range(self, old, new, at, to, length):
        source, target = self.file(old), self.file(new)
        length = min(length, max(len(source.content) - at, 0))
        if source is target and at < to + length and to < at + length:
            fail(errno.EINVAL)
        return self.put(target, to, bytes(source.content[at : at + length]))

    def read(self, path, at, length):
        return bytes(self.file(path).content[at : at + length])

    # Open files

    def open(self, slot, path, write):
        node = self.file(path)
        self.slots[slot] = node

    def slot_write(self, slot, at, data):
        return self.put(self.slots[slot], at, data)

    def slot_read(self, slot, at, length):
        return bytes(self.slots[slot].content[at : at + length])

    def slot_truncate(self, slot, size):
        self.cut(self.slots[slot], size)

    def close(self, slot):
        del self.slots[slot]

    # Attributes

    def chmod(self, path, mode):
        node = self.find(path)
        if node.kind == "link":
            fail(errno.EOPNOTSUPP)
        node.mode = mode

    def utime(self, path, ns):
        self.find(path).mtime = ns

    def setxattr(self, path, name, value, flags):
        node = self.find(path)
        if node.kind == "link":
            fail(errno.EPERM)
        if flags == os.XATTR_CREATE and name in node.xattrs:
            fail(errno.EEXIST)
        if flags == os.XATTR_REPLACE and name not in node.xattrs:
            fail(errno.ENODATA)
        node.xattrs[name] = value

    def removexattr(self, path, name):
        node = self.find(path)
        if node.kind == "link":
            fail(errno.EPERM)
        if name not in node.xattrs:
            fail(errno.ENODATA)
        del node.xattrs[name]

    def list(self, path):
        node = self.find(path)
        return sorted(node.content) if node.kind == "dir" else fail(errno.ENOTDIR)


class Disk:
    """The same calls on the directory `root`."""

    def __init__(self, root):
        self.root, self.slots = root, {}

    def at(self, path):
        return os.path.join(self.root, *path)

    def descriptor(self, path, flags):
        fd = os.open(self.at(path), flags | os.O_NOFOLLOW)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            fail(errno.EISDIR)
        return fd

    def opened(self, path, flags=os.O_RDWR):
        return Descriptor(self.descriptor(path, flags))

    def mkdir(self, path, mode):
        os.mkdir(self.at(path), mode)

    def symlink(self, path, target):
        os.symlink(target, self.at(path))

    def link(self, old, new):
        os.link(self.at(old), self.at(new), follow_symlinks=False)

    def unlink(self, path):
        os.unlink(self.at(path))

    def rmdir(self, path):
        os.rmdir(self.at(path))

    def rename(self, old, new, flags):
        names = [os.fsencode(self.at(p)) for p in (old, new)]
        if libc.renameat2(-100, names[0], -100, names[1], flags):
            fail(ctypes.get_errno())

    def create(self, path, mode, data):
        fd = os.open(self.at(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with Descriptor(fd):
            os.pwrite(fd, data, 0)

    def rewrite(self, path, data):
        with self.opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
            return os.pwrite(fd, data, 0)

    def write(self, path, at, data):
        with self.opened(path, os.O_WRONLY) as fd:
            return os.pwrite(fd, data, at)

    def append(self, path, data):
        with self.opened(path, os.O_WRONLY | os.O_APPEND) as fd:
            return os.write(fd, data)

    def truncate(self, path, size):
        if stat.S_ISLNK(os.lstat(self.at(path)).st_mode):
            fail(errno.ELOOP)
        os.truncate(self.at(path), size)

    def map_write(self, path, at, data):
        with self.opened(path) as fd:
            size = os.fstat(fd).st_size
            if at + len(data) > size:
                fail(errno.EINVAL)
            if data:
                with mmap.mmap(fd, size) as memory:
                    memory[at : at + len(data)] = data
                    # What is only in a mapping may be lost with the mount.
                    memory.flush()

    def fallocate(self, path, mode, at, length):
        with self.opened(path) as fd:
            if libc.fallocate(fd, mode, ctypes.c_long(at), ctypes.c_long(length)):
                fail(ctypes.get_errno())

    def copy_range(self, old, new, at, to, length):
        with self.opened(old, os.O_RDONLY) as source, self.opened(new) as target:
            return os.copy_file_range(source, target, length, at, to)

    def read(self, path, at, length):
        with self.opened(path, os.O_RDONLY) as fd:
            return os.pread(fd, length, at)

    def open(self, slot, path, write):
        self.slots[slot] = self.descriptor(path, os.O_RDWR if write else os.O_RDONLY)

    def slot_write(self, slot, at, data):
        return os.pwrite(self.slots[slot], data, at)

    def slot_read(self, slot, at, length):
        return os.pread(self.slots[slot], length, at)

    def slot_truncate(self, slot, size):
        os.ftruncate(self.slots[slot], size)

    def close(self, slot):
        os.close(self.slots.pop(slot))

    def chmod(self, path, mode):
        if stat.S_ISLNK(os.lstat(self.at(path)).st_mode):
            fail(errno.EOPNOTSUPP)
        os.chmod(self.at(path), mode)

    def utime(self, path, ns):
        os.utime(self.at(path), ns=(ns, ns), follow_symlinks=False)

    def setxattr(self, path, name, value, flags):
        os.setxattr(self.at(path), name, value, flags, follow_symlinks=False)

    def removexattr(self, path, name):
        os.removexattr(self.at(path), name, follow_symlinks=False)

    def list(self, path):
        return sorted(os.listdir(self.at(path)))


class Descriptor:
    """A file descriptor that is closed at the end of a `with`."""

    def __init__(self, fd):
        self.fd = fd

    def __enter__(self):
        return self.fd

    def __exit__(self, *_):
        os.close(self.fd)


def expected(node, name=""):
    """What `observed` must find where the model has `node`: times that only the disk knows are None."""
    found, groups = {}, {}

    def add(node, name):
        group = groups.setdefault(id(node), name)
        links = node.names if node.kind != "dir" else None
        content = {"file": bytes, "link": str, "dir": sorted}[node.kind](node.content)
        mode = node.mode if node.kind != "link" else None
        found[name] = [node.kind, mode, node.mtime, links, group, content, node.xattrs]
        for child in sorted(node.content) if node.kind == "dir" else ():
            add(node.content[child], f"{name}/{child}")

    add(node, name)
    return found


def observed(path, name="", inodes=None):
    """What lies at `path`: of each name its kind, mode, time, number of names, first name of the same inode, content, attributes.
    `inodes` gets the inode of each name."""
    found, groups = {}, {}

    def add(full, name):
        info = os.lstat(full)
        kind = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}[stat.S_IFMT(info.st_mode)]
        group = groups.setdefault(info.st_ino, name)
        if inodes is not None:
            inodes[name] = info.st_ino
        if kind == "link":
            content = os.readlink(full)
        elif kind == "dir":
            content = sorted(os.listdir(full))
        else:
            with open(full, "rb") as file:
                content = file.read()
            assert len(content) == info.st_size, (name, len(content), info.st_size)
        xattrs = {}
        if kind != "link":
            names = [n for n in os.listxattr(full) if not n.startswith("user.zspace.")]
            xattrs = {n: os.getxattr(full, n) for n in names}
        mode = stat.S_IMODE(info.st_mode) if kind != "link" else None
        links = info.st_nlink if kind != "dir" else None
        found[name] = [kind, mode, info.st_mtime_ns, links, group, content, xattrs]
        for child in content if kind == "dir" else ():
            add(os.path.join(full, child), f"{name}/{child}")

    add(os.fspath(path), name)
    return found


def difference(want, got):
    """The first thing in which two of them differ, in words, or nothing. A time of None in `want` fits any."""
    if want.keys() != got.keys():
        return f"missing {sorted(want.keys() - got.keys())}, too many {sorted(got.keys() - want.keys())}"
    words = ("kind", "mode", "mtime", "number of names", "hard link", "content", "attributes")
    for name, fields in want.items():
        for word, a, b in zip(words, fields, got[name]):
            if a == b or word == "mtime" and a is None:
                continue
            if word == "content" and isinstance(a, bytes):
                at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                return f"{name}: content differs at {at} (lengths {len(a)} and {len(b)}): {a[at:at+16]} and {b[at:at+16]}"
            return f"{name}: {word} should be {a!r} and is {b!r}"
    return None
