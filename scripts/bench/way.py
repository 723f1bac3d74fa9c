"""One way to keep a series."""
from pathlib import Path

from measure import size

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
