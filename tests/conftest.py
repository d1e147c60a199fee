"""Hypothesis profiles, and a cache of compiled kernels that belongs to the sources as they are.

Helpers beside the tests are importable, whatever directory pytest was started in.

The profile `ci` is the same on every run, `deep` looks longer (HYPOTHESIS_PROFILE=deep).
"""

import hashlib
import os
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
