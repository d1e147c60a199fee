"""Looking at state: views of directories, descriptions of what tables hold."""

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
