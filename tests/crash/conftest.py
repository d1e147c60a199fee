"""Makes the harness importable by the tests beside it, whatever directory pytest was started in."""

import sys
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

# Before the tests import them: a failing assertion of the harness then shows its values.
pytest.register_assert_rewrite(
    "campaign",
    "configurations",
    "drawing",
    "endurance",
    "faults",
    "harness",
    "interrupts",
    "lives",
    "losses",
    "outages",
    "power",
    "references",
    "replacement",
    "scenarios",
    "standings",
    "tables",
    "wild",
)


@pytest.fixture(scope="session")
def space():
    """A directory in memory where the system has one: what a killed process wrote is in memory too."""
    from references import workspace

    with workspace() as path:
        yield path
