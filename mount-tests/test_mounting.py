"""Starting and ending a mount: whatever happens to it, the machine and its users go on."""
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from files import noise
from zspace import BINARY, ROOT, Zspace, eventually, is_mounted, mounts_below, python

NOBODY = 65534
MIB = 1 << 20
UNITS = ROOT / "contrib/systemd"


@pytest.fixture
def place():
    """A directory where everybody may go, unlike pytest's own, with the program in it."""
    path = Path(tempfile.mkdtemp(prefix="zspace-"))
    path.chmod(0o755)
    shutil.copy(BINARY, path / "zspace")
    yield path
    for point in mounts_below(path):
        subprocess.run(["umount", "-l", point], check=True)
    shutil.rmtree(path)


def mount_flags(path):
    """The options of a mount as the kernel has them, and its type and source."""
    with open("/proc/self/mountinfo") as mounts:
        fields = next(f for f in (line.split() for line in mounts) if f[4] == str(path))
    at = fields.index("-")
    return set(fields[5].split(",")), fields[at + 1], fields[at + 2]


# ---- in use --------------------------------------------------------------------------------------------------------

HOLDERS = {
    "by a file": ("fd = os.open(sys.argv[1], os.O_RDONLY)", "big.bin"),
    "by a mapping": ("m = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ); os.closerange(3, 99)", "big.bin"),
    "by its directory": ("os.chdir(os.path.dirname(sys.argv[1]))", "versions/main/000001"),
}  # fmt: skip


@pytest.mark.parametrize("how", HOLDERS)
def test_umount_says_who_holds_it_and_with_what(mount, zspace, tmp_path, how):
    (tmp_path / "big.bin").write_bytes(noise(MIB))
    zspace.commit(tmp_path / "big.bin")
    code, part = HOLDERS[how]
    holder = python(f"import mmap, os, sys, time\n{code}\nprint('go')\ntime.sleep(60)", mount.wait_for(1) / "big.bin")
    try:
        assert holder.stdout.readline() == "go\n", holder.stderr.read()
        done = zspace.run("umount", mount.path, ok=False)
        line = next(line for line in done.stderr.splitlines() if f"process {holder.pid} " in line)
        assert done.returncode == 1 and "(python" in line and str(mount.path) in line and part in line
        assert is_mounted(mount.path)
    finally:
        holder.kill()
        holder.wait()
    mount.stop()


def test_umount_says_what_is_mounted_inside(mount, zspace):
    inside = mount.path / "versions"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", inside], check=True)
    try:
        done = zspace.run("umount", mount.path, ok=False)
        assert done.returncode == 1 and f"{inside} is mounted inside it" in done.stderr
    finally:
        subprocess.run(["umount", inside], check=True)
    mount.stop()


# ---- where --------------------------------------------------------------------------------------------------------


def test_store_and_mount_point_may_not_lie_within_each_other(tmp_path):
    (tmp_path / "outer").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "outer")
    zspace = Zspace(tmp_path / "outer/store")
    zspace.run("init")
    for mnt in ["outer", "link", "outer/store", "outer/store/mnt", "link/store/mnt/deep"]:
        done = zspace.run("mount", tmp_path / mnt, ok=False, timeout=20)
        assert done.returncode == 64 and "within each other" in done.stderr, (mnt, done.stderr)
        assert not is_mounted((tmp_path / mnt).resolve())
    assert not (zspace.store / "mnt").exists(), "nothing is made inside the store"


def test_a_mount_point_that_is_a_file_is_refused(zspace, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    done = zspace.run("mount", tmp_path / "file", ok=False, timeout=20)
    assert done.returncode == 64 and "not a directory" in done.stderr


def test_what_the_mount_point_holds_is_not_hidden_silently(mounts, tmp_path):
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/mine.txt").write_text("mine")
    mount = mounts()
    assert "is not empty" in mount.messages()
    mount.stop()
    assert (tmp_path / "mnt/mine.txt").read_text() == "mine"


@pytest.mark.parametrize("option", [None, "allow-other", "read-only", "noexec"])
def test_flags_of_the_mount(mounts, zspace, option):
    mount = mounts(**{option: True} if option else {})
    flags, kind, source = mount_flags(mount.path)
    assert {"nosuid", "nodev", "noatime"} <= flags and kind == "fuse.zspace" and source == str(zspace.store)
    assert ("ro" in flags) == (option == "read-only") and ("noexec" in flags) == (option == "noexec")


# ---- memory -------------------------------------------------------------------------------------------------------


def peak(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def test_many_readers_of_many_versions_stay_within_memory(mounts, zspace, tmp_path):
    readers, size = 16, 24 * MIB
    data = bytearray(noise(size))
    for i in range(readers):
        data[i * 1000 : i * 1000 + 500] = noise(500, i)
        (tmp_path / "model.bin").write_bytes(data)
        zspace.commit(tmp_path / "model.bin")
    mount = mounts(memory="32M")
    mount.wait_for(readers)
    before = peak(mount.process.pid)
    files = [mount.version(i + 1) / "model.bin" for i in range(readers)]
    running = [subprocess.Popen(["cat", f], stdout=subprocess.DEVNULL) for f in files]
    assert [r.wait(timeout=90) for r in running] == [0] * readers
    grown = peak(mount.process.pid) - before
    # The cache, what is read ahead (128 chunks of at most 1 MiB, in all), and what 16 requests hold.
    assert grown < (32 + 128 + 64) * MIB, f"{grown / MIB:.0f} MiB"


# ---- without root --------------------------------------------------------------------------------------------------


class User:
    """An ordinary user, with the program and a store of its own."""

    def __init__(self, place):
        self.place, self.home = place, place / "home"
        self.home.mkdir()
        os.chown(self.home, NOBODY, NOBODY)
        self.mnt = self.home / "mnt"
        self.zspace = place / "zspace"

    def run(self, *command, before="", device=0o666, ok=True, env=None):
        """Runs a command as the user, in a mount namespace of its own where /dev/fuse has this mode and `before`, shell code, ran
        as root."""
        prepare = f"mount --bind {self.device(device)} /dev/fuse\n{before}\n" + 'exec "$@"'
        run = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", prepare, "sh"]
        run += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *map(str, command)]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "ZSPACE_STORE": str(self.home / "store")}
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd="/", env=environment | (env or {}))
        assert not ok or done.returncode == 0, done.stderr + done.stdout
        return done

    def script(self, code, **how):
        """Runs shell code as the user; $Z is the program, $M the mount point."""
        return self.run("sh", "-ec", f"Z={self.zspace}; M={self.mnt}\n{code}", **how)

    def device(self, mode):
        """The FUSE device with a mode: Debian makes it everybody's, other places root's alone."""
        path = self.place / f"fuse-{mode:o}"
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | mode, os.stat("/dev/fuse").st_rdev)
            path.chmod(mode)
        return path

    def mount(self, *options, **how):
        return self.run(self.zspace, "mount", self.mnt, "--daemon", "--settle", "0.3", *options, **how)


@pytest.fixture
def user(place):
    if not shutil.which("fusermount3"):
        pytest.fail("fusermount3 is missing: install fuse3")
    return User(place)


def test_an_ordinary_user_mounts_writes_reads_and_unmounts(user):
    done = user.script("""
$Z mount $M --daemon --settle 0.3
grep " $M " /proc/self/mountinfo
head -c 3000000 /dev/urandom > ~/model.bin
cp ~/model.bin $M/staging/main/
$Z commit $M/staging/main/model.bin
cmp ~/model.bin $M/versions/main/latest/model.bin
stat -c %U $M/versions/main/latest/model.bin
cd $M; ! $Z umount $M 2>&1; cd /
$Z umount $M
! grep " $M " /proc/self/mountinfo
""")
    line = next(line for line in done.stdout.splitlines() if " - fuse.zspace " in line)
    assert {"nosuid", "nodev"} <= set(line.split()[5].split(","))
    assert line.split()[-2] == str(user.home / "store") and "user_id=65534" in line
    assert "\nnobody\n" in done.stdout
    assert "is in use\n" in done.stdout and "(sh) uses" in done.stdout


def test_an_ordinary_user_clears_a_mount_that_died(user):
    done = user.script("""
$Z mount $M --daemon
kill -9 $(getfattr --only-values -n user.zspace.pid $M)
for i in $(seq 100); do stat -f $M >/dev/null 2>&1 || break; sleep 0.1; done
stat -f $M 2>&1 || true
$Z mount $M --daemon
ls $M
$Z umount $M
! grep " $M " /proc/self/mountinfo
""")
    assert "not connected" in done.stdout and "staging" in done.stdout


def test_a_directory_that_its_owner_may_not_write_is_committed_once(user):
    done = user.script("""
$Z mount $M --daemon --settle-dir 0.5
mkdir $M/staging/main/d && head -c 3000000 /dev/urandom >$M/staging/main/d/f && chmod 555 $M/staging/main/d
for n in $(seq 100); do [ -e $M/versions/main/000001 ] && break; sleep 0.1; done
sleep 2
$Z status; ls $M/versions/main
$Z commit $M/staging/main/d
stat -c %a $M/staging/main/d $M/versions/main/000001/d
$Z umount $M
""")
    assert "committed" in done.stdout and "failed" not in done.stdout, done.stdout
    assert "000001\nlatest" in done.stdout and "main/000001" in done.stdout.split("latest")[1]
    assert done.stdout.count("555") == 2


def test_a_store_with_commas_in_its_name(user):
    store = user.home / "a,b\\c"
    done = user.script("""
$Z mount $M --daemon
findmnt -n -o SOURCE $M
$Z umount $M
""", env={"ZSPACE_STORE": str(store)})  # fmt: skip
    assert done.stdout.strip() == str(store)


@pytest.mark.parametrize("missing", ["fuse3", "device", "permission", "allow", "mountpoint", "setuid"])
def test_a_user_is_told_what_is_missing(user, missing):
    how, options, words = {}, [], []
    if missing == "fuse3":
        how, words = {"env": {"FUSERMOUNT_PATH": "/nonexistent"}}, ["install the package fuse3"]
    elif missing == "device":
        how = {"before": "mount -t tmpfs tmpfs /dev; mknod -m 666 /dev/null c 1 3"}
        words = ["no /dev/fuse", "modprobe fuse"]
    elif missing == "permission":
        how, words = {"device": 0o600}, ["/dev/fuse", "chmod 666 /dev/fuse"]
    elif missing == "allow":
        conf = user.place / "fuse.conf"
        conf.write_text("")
        how, options = {"before": f"mount --bind {conf} /etc/fuse.conf"}, ["--allow-other"]
        words = ["user_allow_other", "/etc/fuse.conf"]
    elif missing == "mountpoint":
        user.mnt = user.place / "foreign"
        user.mnt.mkdir()
        words = ["no write access to mountpoint", "yours"]
    elif missing == "setuid":
        plain = user.place / "fusermount3"
        shutil.copy(shutil.which("fusermount3"), plain)
        plain.chmod(0o755)
        how, words = {"env": {"FUSERMOUNT_PATH": str(plain)}}, ["set-user-id root"]
    done = user.mount(*options, ok=False, **how)
    assert done.returncode != 0 and all(w in done.stderr for w in words), done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3, done.stderr


@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_waits_for_nothing(mounts, signals):
    mount = mounts(**{"settle-dir": 3600})
    (mount.staging() / "entry").mkdir()
    (mount.staging() / "entry/file").write_bytes(b"1")
    mount.wait_for_status("entry", "settling")
    mount.process.send_signal(signal.SIGINT)
    eventually(lambda: "has settled" in mount.messages(), mount.messages)
    assert mount.process.poll() is None
    for _ in range(signals - 1):
        mount.process.send_signal(signal.SIGINT)
    mount.process.wait(timeout=10)
    eventually(lambda: not is_mounted(mount.path), "it is gone")
    mount.start()
    assert (mount.staging() / "entry/file").read_bytes() == b"1"
    assert mount.versions() == []


def test_a_mount_that_cannot_have_staging_says_so_at_once(mounts, zspace, tmp_path):
    mounts()
    other = tmp_path / "other"
    done = zspace.run("mount", other, "--daemon")
    try:
        assert "read-only here: another mount" in done.stderr
    finally:
        zspace.run("umount", other)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may let others in here")
def test_others_keep_what_they_staged_in_roots_mount(mounts, place):
    """A trainer that is not the mounter rotates its checkpoints, committed or not."""
    mount = mounts(place / "mnt", **{"allow-other": True})
    shared = mount.path / "staging/shared"
    shared.mkdir()
    shared.chmod(0o1777)
    place.chmod(0o755)
    run = lambda script: subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh", "-ec", script],
        cwd=shared, check=True, capture_output=True, text=True,
    )
    run("mkdir ck; head -c 2000000 /dev/urandom >ck/f; ln -s f ck/link; chmod 750 ck")
    mount.zspace.commit(shared / "ck")
    owner = lambda path: (os.lstat(path).st_uid, os.lstat(path).st_gid)
    assert owner(shared / "ck") == owner(shared / "ck/f") == (65534, 65534)
    assert owner(mount.path / "versions/shared/000001/ck") == (os.geteuid(), os.getegid())
    # It is changed, becomes the next version, and is still theirs after a new mount.
    run("echo more >>ck/f")
    assert owner(shared / "ck/f") == owner(shared / "ck/link") == (65534, 65534)
    mount.zspace.commit(shared / "ck")
    mount.stop()
    mount.start()
    assert owner(shared / "ck") == (65534, 65534)
    run("touch ck/config.json")
    mount.zspace.commit(shared / "ck")
    run("rm -r ck")
    assert os.listdir(shared) == []
    assert sorted(mount.versions("shared")) == [1, 2, 3]


def test_a_user_who_may_lets_others_in(user):
    conf = user.place / "fuse.conf"
    conf.write_text("user_allow_other\n")
    done = user.script("$Z mount $M --daemon --allow-other; grep \" $M \" /proc/self/mountinfo; $Z umount $M",
                       before=f"mount --bind {conf} /etc/fuse.conf")  # fmt: skip
    assert "allow_other" in done.stdout


# ---- mount(8) and fstab --------------------------------------------------------------------------------------------


def namespace(script, place, *, helper=True, fstab="", drop=""):
    """Runs shell code as root where mount(8) finds the helper (or only the program, by its own name) and this fstab."""
    tools = place / "tools"
    tools.mkdir()
    link = tools / ("mount.fuse.zspace" if helper else "zspace")
    if helper:
        link.symlink_to(place / "zspace")
    else:
        shutil.copy(place / "zspace", link)
    (place / "fstab").write_text(fstab)
    there = "/usr/sbin" if helper else "/usr/local/bin"
    prepare = f"""
mount -t overlay overlay -o lowerdir={tools}:{there} {there}
[ -e /etc/fstab ] || exit 77
mount --bind {place}/fstab /etc/fstab
"""
    run = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", prepare + script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, cwd="/")
    if done.returncode == 77:
        pytest.skip("no /etc/fstab to stand in for")
    return done


LOOK = """
grep " $M " /proc/self/mountinfo
ls $M
umount $M
! grep -q " $M " /proc/self/mountinfo
"""


@pytest.mark.parametrize("helper", [True, False], ids=["by the helper's name", "by mount.fuse3"])
def test_mount_8_mounts_and_umount_unmounts(place, helper):
    store, mnt = Zspace(place / "store"), place / "mnt"
    store.run("init")
    mnt.mkdir()
    options = "settle=0.5,settle_dir=1,memory=64M,allow_other,ro,noexec,nofail,_netdev,x-systemd.automount"
    script = f"M={mnt}\nmount -t fuse.zspace {store.store} $M -o {options}\n{LOOK}"
    done = namespace(script, place, helper=helper)
    assert done.returncode == 0, done.stderr
    line, *names = done.stdout.splitlines()
    flags = set(line.split()[5].split(","))
    assert {"ro", "noexec", "nosuid", "nodev"} <= flags and "allow_other" in line
    assert line.split()[-3:-1] == ["fuse.zspace", str(store.store)]
    assert {"staging", "versions"} <= set(names)


def test_fstab_mounts_once_and_for_its_user(user):
    store, mnt = user.home / "store", user.mnt
    user.script("$Z init; mkdir $M")
    line = f"{store} {mnt} fuse.zspace noauto,user,settle=1,comment=x 0 0\n"
    nobody = f"setpriv --reuid={NOBODY} --regid={NOBODY} --clear-groups"
    script = f"""
M={mnt}
mount --bind {user.device(0o666)} /dev/fuse
{nobody} mount $M
grep " $M " /proc/self/mountinfo
{nobody} umount $M
! grep -q " $M " /proc/self/mountinfo
mount -a
! grep -q " $M " /proc/self/mountinfo
echo "{line.replace("noauto,", "").strip()}" > /etc/fstab
mount -a
mount -a -v
grep -c " $M " /proc/self/mountinfo
umount $M
"""
    done = namespace(script, user.place, fstab=line)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert "user_id=65534" in lines[0]
    assert "already mounted" in done.stdout and lines[-1] == "1", done.stdout


@pytest.mark.parametrize("option, words", [
    ("settle=soon", "settle=soon: write a number"),
    ("memory=x", "memory=x"),
    ("unheard=1", "unheard=1: not known"),
    ("remount", "unmounting it and mounting it again"),
])  # fmt: skip
def test_mount_8_refuses_what_it_does_not_know(place, option, words):
    store = Zspace(place / "store")
    store.run("init")
    (place / "mount.fuse.zspace").symlink_to("zspace")
    done = subprocess.run([place / "mount.fuse.zspace", store.store, place / "mnt", "-o", f"rw,{option}"],
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert not is_mounted(place / "mnt")


def test_mount_8_makes_no_store_by_mistake(place):
    (place / "mount.fuse.zspace").symlink_to("zspace")
    done = subprocess.run([place / "mount.fuse.zspace", place / "absent", place / "mnt", "-o", "rw"],
                          capture_output=True, text=True, timeout=30)  # fmt: skip
    assert done.returncode == 32 and "no store in" in done.stderr
    assert not (place / "absent").exists()


# ---- services ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_is_told_when_the_mount_is_usable(zspace, tmp_path, abstract):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"zspace-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
        manager.bind(f"\0{name}" if abstract else name)
        manager.settimeout(20)
        mnt = tmp_path / "mnt"
        environment = os.environ | {"NOTIFY_SOCKET": f"@{name}" if abstract else name}
        process = subprocess.Popen(zspace.command("mount", mnt), env=environment, stderr=subprocess.DEVNULL)
        try:
            assert manager.recv(100) == b"READY=1"
            assert (mnt / "staging/main").is_dir()
            process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            assert process.wait(timeout=20) == 0 and not is_mounted(mnt)
        finally:
            process.kill()
            process.wait()
            if is_mounted(mnt):
                subprocess.run(["umount", "-l", mnt], check=True)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("kind", ["system", "user"])
def test_systemd_takes_the_units(tmp_path, kind):
    text = (UNITS / kind / "zspace@.service").read_text()
    # The program need not be installed for this.
    text = text.replace("/usr/local/bin/zspace", "/bin/true").replace("%h/.cargo/bin/zspace", "/bin/true")
    unit = tmp_path / "zspace@.service"
    unit.write_text(text)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(["systemd-analyze", *["--user"] * (kind == "user"), "verify", "--man=no", unit],
                          capture_output=True, text=True, env=environment)  # fmt: skip
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
