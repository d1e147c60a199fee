"""Summaries in a terminal, in a pipe, and in ASCII."""

import io
import re

import numpy as np
import pytest
from small_states import build, train

from dsa import init
from dsa.inspection import summarize
from dsa.inspection.render import histogram_lines, print_summary, render
from dsa.inspection.sketch import Histogram
from dsa.rules.adam import ADAM
from dsa.schema import adam_schema
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def summary(path):
    return summarize(path)


def test_what_a_report_says(path, summary):
    text = render(summary)
    assert text.startswith(f"{path}  closed, step 3, ")
    lines = text.splitlines()
    assert lines[2].split() == [
        "table", "rows", "dim", "k", "rule", "steps", "touched", "on", "disk", "logical",
    ]  # fmt: skip
    touched = summary.tables[0].touched_rows
    assert lines[3].split()[:7] == ["entity", "300", "4", "1", "frame_adam", "3", str(touched)]
    assert lines[4].split()[:3] == ["flat", "40", "3"]
    for title in ("updates per row", "distance from the centre", "norm of the weight", "first moment"):
        assert title in text
    assert text.count("median") == 8
    assert "█" in text
    assert max(map(len, lines)) <= 120
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [30, 60, 80, 100, 200])
def test_every_width(summary, width):
    text = render(summary, width=width)
    assert max(map(len, text.splitlines())) <= max(width, 55)
    assert "entity" in text
    assert "updates per row" in text


def test_ascii(summary):
    text = render(summary, unicode=False)
    assert text.isascii()
    assert "#" in text


def test_colours_change_nothing_else(summary):
    coloured = render(summary, color=True)
    assert "\x1b[" in coloured
    plain = [line.rstrip() for line in ESCAPE.sub("", coloured).splitlines()]
    assert "\n".join(plain).strip("\n") + "\n" == render(summary)


def test_printing_into_a_pipe_is_plain(summary):
    file = io.StringIO()
    print_summary(summary, file)
    assert file.getvalue() == render(summary)
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_summary(summary, raw)
    raw.flush()
    assert raw.buffer.getvalue().decode("ascii") == render(summary, unicode=False)


def test_printing_to_standard_output(summary, capsys):
    print_summary(summary)
    assert "entity" in capsys.readouterr().out


def test_a_terminal_gets_colours(summary, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

    file = Terminal()
    print_summary(summary, file)
    assert "\x1b[" in file.getvalue()
    assert max(len(ESCAPE.sub("", line)) for line in file.getvalue().splitlines()) <= 100


def table_of(records, **options):
    schema = adam_schema(2)
    return TableContent(
        TableFacts("entity\n[red]", len(records), schema, ADAM, **options), lambda: iter([(0, records)])
    )


def test_damage_and_the_edge_are_told():
    records = np.zeros(20, adam_schema(2).dtype)
    records["s"] = 1
    records["w"][:5, 0] = 0.99999
    records["v"][7] = -1.0
    summary = summarize(StateContent((table_of(records, k=1.0),), global_step=12))
    text = render(summary)
    assert "1 rows hold implausible values, the first is row 7: restore a copy" in text
    assert "5 rows (25% of those touched) are at the edge of the ball" in text
    assert text.startswith("step 12\n")
    assert "entity?[red]" in text  # neither markup nor a line of its own


def test_a_table_that_was_never_written():
    text = render(summarize(StateContent((table_of(np.zeros(3, adam_schema(2).dtype)),))))
    assert "no row was ever written" in text
    assert "0     0%" in text


def test_rows_that_are_all_alike():
    records = np.zeros(3, adam_schema(2).dtype)
    records["s"], records["t"], records["w"] = 1, 4, 1.0
    text = render(summarize(StateContent((table_of(records),))))
    assert "4 in each of 3 rows" in text
    assert "1.41 in each of 3 rows" in text


def test_a_state_without_tables():
    assert render(summarize(StateContent((), global_step=2))).startswith("step 2\n")


def test_bars():
    histogram = Histogram((0.0, 1.0, 2.0, 4.0), (8, 0, 4), "linear")
    assert histogram_lines(histogram, width=4, height=2) == ["█   ", "█ ██"]
    assert histogram_lines(histogram, width=4, height=1) == ["█ ▄▄"]
    assert histogram_lines(histogram, width=4, height=1, unicode=False) == ["# ::"]
    tiny = Histogram((1.0, 10.0, 100.0), (1, 100_000), "log")
    assert histogram_lines(tiny, width=2, height=1) == ["▁█"]  # what there is at all is seen
    many = Histogram(tuple(map(float, range(101))), tuple(range(100)), "linear")
    assert len(histogram_lines(many, width=10, height=1)[0]) == 10


def test_a_run_in_progress(tmp_path):
    with build(tmp_path, {"entity": init.Zeros(50, 2)}, k=0.0) as optimizer:
        train(optimizer, 1, tables={"entity": init.Zeros(50, 2)})
        assert "  open, step 1, " in render(summarize(tmp_path))
