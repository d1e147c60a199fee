"""Hypothesis profiles, and a cache of compiled kernels that belongs to the sources as they are.

Helpers beside the tests are importable, whatever directory pytest was started in.

Temporary directories lie in memory where there is room, so that a sync waits for no device; those of tests
marked `disk` never do, and with PYTEST_DEBUG_TEMPROOT=/tmp none does.

The profile `ci` is the same on every run, `deep` looks longer (HYPOTHESIS_PROFILE=deep).
"""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("deep", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _kernel_cache() -> str:
    """Return a directory named after the kernels' sources.

    numba stamps a compiled function with its own file alone, so that editing a function which another file's
    kernel calls would leave stale code in use. Installing another release renews all files.
    """
    package = Path(__file__).parents[1] / "dsa"
    digest = hashlib.sha256()
    for path in sorted([*package.glob("kernels/*.py"), *package.glob("cli/bench/*.py")]):
        digest.update(path.read_bytes())
    return str(Path(tempfile.gettempdir()) / f"dsa-kernels-{digest.hexdigest()[:16]}")


# Before numba is imported, and inherited by the child processes that tests start.
os.environ.setdefault("NUMBA_CACHE_DIR", _kernel_cache())

_MEMORY = Path("/dev/shm")
if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))


@pytest.fixture
def tmp_path(request, tmp_path):
    """A directory of the test's own; on a disk where the test is marked so."""
    if request.node.get_closest_marker("disk") is None:
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(prefix="dsa-test-") as path:
            yield Path(path).resolve()


@pytest.fixture(autouse=True)
def _threads_of_torch():
    """Leave torch's threads as they were, or the next tests run on others."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    if torch and torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Let one worker of `--dist loadgroup` run the tests of a file that share what was made once for them."""
    for item in items:
        made = getattr(item, "_fixtureinfo", None)
        if made and any(each[-1].scope == "module" for each in made.name2fixturedefs.values()):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))


# The harnesses of `tests/crash` and `tests/blockdev`, before any test imports them: a failing assertion in
# them then shows its values.
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
    "passes",
    "power",
    "references",
    "replacement",
    "scenarios",
    "standings",
    "tables",
    "wild",
    "images",
    "power_losses",
    "training_runs",
    "write_failures",
)
