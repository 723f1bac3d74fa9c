"""What the mount does by itself stands back."""
import subprocess

from files import noise
from zspace import eventually


def threads(process):
    """Name and nice value of each thread."""
    found = []
    for task in process.iterdir():
        try:
            name, rest = (task / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it has just ended
        found.append((int(task.name), name, int(rest.split()[16])))
    return found


def test_commits_in_the_background_have_low_priority(zspace, mount):
    from pathlib import Path

    tasks = Path(f"/proc/{mount.process.pid}/task")
    (committer,) = [t for t in threads(tasks) if t[1] == "zspace-commit"]
    assert committer[2] == 15
    assert subprocess.run(["ionice", "-p", str(committer[0])], capture_output=True, text=True).stdout.strip() == "best-effort: prio 7"
    before = len([t for t in threads(tasks) if t[2] == 15])
    (mount.path / "staging/main/big.bin").write_bytes(noise(150_000_000))
    # The threads that encode for it are as low as it is itself.
    eventually(lambda: len([t for t in threads(tasks) if t[2] == 15]) > before, "it is being committed")
    eventually(lambda: len(zspace.json_lines("log")) == 1, "it is committed")
    # Those that serve readers are not.
    assert {t[2] for t in threads(tasks) if t[1].startswith("zspace-data")} == {0}


def test_the_number_of_threads_is_the_users(zspace, mounts):
    assert mounts(threads=1).path.is_dir()
    refused = zspace.run("mount", "/nowhere/at/all", "--threads", "0", ok=False)
    assert refused.returncode == 64 and "--threads" in refused.stderr
