"""Makes the harness importable by the tests beside it, and that of `tests/crash`, which it builds on."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for directory in (HERE.parent / "crash", HERE):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


@pytest.fixture(scope="session")
def block_devices():
    """Skip where no file system can be mounted on a device of our own."""
    from filesystems import unavailable

    if reason := unavailable():
        pytest.skip(reason)
