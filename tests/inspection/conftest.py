"""Makes the helpers importable by the tests beside them, whatever directory pytest was started in."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def path(tmp_path):
    """A directory that was trained for three steps and closed."""
    from small_states import build, train

    with build(tmp_path / "state") as optimizer:
        train(optimizer, 3)
    return tmp_path / "state"
