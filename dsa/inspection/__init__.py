"""Looking at state: views of directories, descriptions of what tables hold."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from dsa.inspection.sketch import Histogram, Spread
    from dsa.inspection.state_view import StateView, open_state
    from dsa.inspection.summary import StateSummary, TableSummary, summarize, summarize_table
    from dsa.inspection.table_view import TableView

__all__ = [
    "Histogram",
    "Spread",
    "StateSummary",
    "StateView",
    "TableSummary",
    "TableView",
    "open_state",
    "summarize",
    "summarize_table",
]

# Where each is, imported when it is used first: the command line takes `console` alone, and doesn't wait.
_HOMES = {
    "Histogram": "sketch",
    "Spread": "sketch",
    "StateSummary": "summary",
    "StateView": "state_view",
    "TableSummary": "summary",
    "TableView": "table_view",
    "open_state": "state_view",
    "summarize": "summary",
    "summarize_table": "summary",
}

if not _typing.TYPE_CHECKING:  # else every attribute would be one

    def __getattr__(name: str) -> object:
        """Return a name of `__all__` that was not imported yet."""
        if name not in _HOMES:
            raise AttributeError(f"module 'dsa.inspection' has no attribute {name!r}: use one of its __all__")
        value = getattr(_importlib.import_module(f"dsa.inspection.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return the names that there are, imported or not."""
        return sorted({*globals(), *__all__})
