"""Makes the harness importable by the tests beside it, whatever directory pytest was started in."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session")
def space():
    """A directory in memory where the system has one: what a killed process wrote is in memory too."""
    from references import workspace

    with workspace() as path:
        yield path
