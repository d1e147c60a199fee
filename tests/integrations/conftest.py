"""Makes the helpers importable, lets other libraries warn, and runs each test in an empty directory."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for place in (HERE, HERE.parent / "documents"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore", "error::dsa.errors.DSAWarning"))


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
