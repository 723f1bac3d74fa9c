"""What was staged becomes its version's whole file in STORE/cache."""
import os

import pytest

from zspace import eventually

SIZE = 2 << 20


def kept(zspace):
    """Lengths of the whole files."""
    return [p.stat().st_size for p in (zspace.store / "cache").iterdir() if p.name != "lock"]


@pytest.mark.parametrize("entry", ["model.bin", "run/model.bin"])
def test_staged_file_is_kept_whole(zspace, mount, entry):
    data, staged = os.urandom(SIZE), mount.staging() / entry
    staged.parent.mkdir(exist_ok=True)
    staged.write_bytes(data)
    version = mount.wait_for(1)
    eventually(lambda: kept(zspace) == [SIZE], lambda: f"one whole file (there are {kept(zspace)})\n{mount.messages()}")
    assert (version / entry).read_bytes() == data
    assert staged.read_bytes() == data
