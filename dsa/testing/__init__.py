"""Tests for storage backends, yours included: subclass one class and name one function.

`BackendConformance` checks that a backend keeps the contract of `dsa.backends.base.StateBackend`; it needs
pytest and numpy. `BackendMachine` runs random operations on a backend and compares it with `MemoryBackend`
after each; it needs Hypothesis too, which is imported when the name is first used. `LayoutConformance` checks
that a layout keeps the contract of `dsa.backends.base.Layout`. Nothing here registers itself with pytest.

Example:
    A test file for a backend that keeps its records in memory; one that keeps them on disk adds `reopen`, and
    may add `read_raw` (see `BackendHooks`).

    >>> from dsa.testing import BackendConformance, BackendMachine
    >>> from dsa.backends.memory import MemoryBackend
    >>> class TestMemoryBackend(BackendConformance):
    ...     def create(self, path, rows, schema):
    ...         return MemoryBackend(rows, schema)
    >>> TestMemoryMachine = BackendMachine.over(TestMemoryBackend()).TestCase

    pytest collects both. A single check can also be called by hand:

    >>> from dsa.schema import adam_schema
    >>> suite = TestMemoryBackend()
    >>> suite.test_read_after_write(suite.create(None, 5, adam_schema(dim=3)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

# Before the imports below: a failing assertion of the suite then shows its values, as in a test module.
pytest.register_assert_rewrite(
    "dsa.testing.conformance",
    "dsa.testing.growth",
    "dsa.testing.layouts",
    "dsa.testing.machine",
    "dsa.testing.records",
)

from dsa.testing.conformance import BackendConformance  # noqa: E402
from dsa.testing.hooks import BackendHooks  # noqa: E402
from dsa.testing.layouts import LayoutConformance  # noqa: E402
from dsa.testing.records import CASES, Case, assert_records_equal, random_records  # noqa: E402

if TYPE_CHECKING:
    from dsa.testing.machine import BackendMachine

__all__ = [
    "CASES",
    "BackendConformance",
    "BackendHooks",
    "BackendMachine",
    "Case",
    "LayoutConformance",
    "assert_records_equal",
    "random_records",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute of any kind
    if name == "BackendMachine":
        from dsa.testing.machine import BackendMachine

        return BackendMachine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
