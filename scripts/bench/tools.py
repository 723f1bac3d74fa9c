"""What is compared with: installed if it can be, else the reason why not."""
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zspace"

DEBIAN = {"zstd": "zstd", "borg": "borgbackup", "restic": "restic", "git": "git", "git-lfs": "git-lfs", "cc": "gcc libc6-dev"}
PYTHON_HEADERS = "python3-dev"
DVC = "dvc==3.67.1"


def out(command, **options):
    """What a command prints; raises if it fails."""
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, **options).stdout.strip()


def install_debian():
    """Installs the missing commands, as root on Debian; elsewhere they are shown as not available."""
    missing = [packages for command, packages in DEBIAN.items() if not shutil.which(command)]
    if not Path(out([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]), "Python.h").is_file():
        missing.append(PYTHON_HEADERS)
    if not missing or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    print("bench: installing", *missing, file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], stdout=sys.stderr, env=environment)
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *" ".join(missing).split()]
    subprocess.run(command, stdout=sys.stderr, env=environment)


@functools.cache
def environment(name, requirements, beside=None):
    """The interpreter of a Python environment of the cache, made if absent; `beside`: the site-packages it also sees.

    A requirement that cannot be installed is left out, and told by its import failing later.
    """
    key = hashlib.sha256("\n".join([sys.version, str(beside), *requirements]).encode()).hexdigest()[:12]
    directory = CACHE / f"{name}-{key}"
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        print(f"bench: making {directory}", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", directory], check=True, stdout=sys.stderr)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        if beside:
            site = out([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
            Path(site, "beside.pth").write_text(f"{beside}\n")
            pip.append("--no-deps")
        done = [subprocess.run([*pip, requirement], stdout=sys.stderr).returncode for requirement in requirements]
        if not any(done):  # else the next run tries again
            (directory / "complete").touch()
    return python


def python():
    """The interpreter that has the compared Python packages (and torch, of scripts/setup-python)."""
    beside = out([sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
    lines = (HERE / "requirements.txt").read_text().splitlines()
    return environment("bench", tuple(line for line in lines if line and not line.startswith("#")), beside)


def dvc():
    """DVC's command; it has many dependencies, so it lives apart."""
    return environment("bench-dvc", (DVC,)).with_name("dvc")


def lacks(command):
    """Why a command cannot be run, or None."""
    if shutil.which(str(command)):
        return None
    return f"no command `{Path(command).name}` on this machine, and it could not be installed"


def lacks_module(interpreter, module):
    """Why a Python module cannot be imported, or None."""
    done = subprocess.run([interpreter, "-W", "ignore", "-c", f"import {module}"], capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return f"`import {module}` fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
