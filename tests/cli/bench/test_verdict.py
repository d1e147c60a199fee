"""What is said about the numbers."""

import pytest

from dsa.cli.bench.report import render
from dsa.cli.bench.results import Duration, Footprint, Group, Results, line_from_times, set_ratio
from dsa.cli.bench.text import number, size
from dsa.cli.bench.verdict import goals, losses

MACHINE = {
    "cpu": "a processor",
    "cores": 2,
    "usable_cores": 1,
    "torch_threads": 1,
    "memory_bytes": None,
    "gpu": None,
    "system": "Linux",
    "kernel": "6",
    "file_system": None,
    "read_ahead_kib": None,
    "load_average": None,
    "versions": {"dsa": "0"},
}


def line(key, milliseconds, **footprint):
    return line_from_times(
        key, f"the {key}", 2048, [Duration(milliseconds / 1e3, milliseconds / 1e3)], Footprint(**footprint)
    )


def results(*groups, rows=1_000_000, dim=128):
    return Results(dict(MACHINE), {"rows": rows, "dim": dim}, groups=list(groups))


def warm(sparse=10.0, dsa=2.0, none=1.0, naive=50.0, touch=0.5, memory=100, file=90):
    group = Group("warm", "warm", 1_000_000, 128, 2048)
    base = line("sparse_adam", sparse, anonymous=memory)
    others = [line("dsa", dsa, file=file), line("dsa_none", none), line("naive", naive), line("touch", touch)]
    for other in others:
        set_ratio(other, [base])
    group.lines = [base, *others]
    return group


def cold(dsa=40.0, naive=1000.0, pages=1.4, share=0.7, base=10.0):
    group = Group("cold", "cold", 1_000_000, 128, 2048)
    group.lines = [line("naive_cold", naive), line("dsa_cold", dsa), line("dsa_sustained", 2 * dsa)]
    group.lines[2].details = {
        "pages_per_row": pages,
        "share_of_device_limit": share,
        "device_limit_rows_per_second": 1000.0,
        "step_milliseconds": 3.0,
    }
    for one in group.lines:
        set_ratio(one, [line("sparse_adam", base)])
    return group


def test_what_is_faster_than_dsa_is_told_with_its_numbers():
    (loss,) = losses(results(warm(touch=0.5, dsa=20.0, none=0.4)))
    assert loss == (
        "warm: the dsa takes 20.0 ms, 2.00 times as long as the sparse_adam (10.0 ms), "
        "40.0 times as long as the touch (0.500 ms)"
    )


def test_what_is_slower_is_not():
    assert losses(results(warm(touch=5.0))) == []


def test_the_losses_of_cold_steps_refer_to_the_warm_baseline():
    found = losses(results(warm(touch=5.0), cold()))
    assert found == [
        "cold: the dsa_cold takes 40.0 ms, 4.00 times as long as the sparse_adam (10.0 ms)",
        "cold: the dsa_sustained takes 80.0 ms, 8.00 times as long as the sparse_adam (10.0 ms)",
    ]


def test_a_naive_layout_that_is_faster_when_cold_is_told():
    assert any("as long as the naive_cold (4.00 ms)" in loss for loss in losses(results(cold(naive=4.0))))


def test_the_first_step_and_the_files_are_told():
    run = results(warm(touch=5.0, file=110_000_000, memory=100_000_000))
    run.first_step_seconds = {"flat": 0.5}
    first, files = losses(run)
    assert first.startswith(
        "the first step of a process takes 0.500 s, as long as 250 warm steps of B = 2,048"
    )
    assert files.startswith(
        "dsa's files take 0.11 GB of disk where SparseAdam and its parameter take 0.10 GB of memory"
    )


def test_goals_are_judged_by_the_numbers():
    found = {goal["what"]: goal for goal in goals(results(warm(sparse=10.0, none=1.0, dsa=4.0), cold()))}
    assert {what: goal["met"] for what, goal in found.items()} == {
        "warm, B = 2,048: the dsa_none, times the speed of the sparse_adam": "yes",
        "warm, B = 2,048: the dsa, times the speed of the sparse_adam": "no",
        "cold, B = 2,048: the dsa_cold, times the speed of the naive_cold": "yes",
        "cold, B = 2,048: share of the disk's limit": "yes",
        "cold, B = 2,048: pages read for a row": "yes",
    }
    assert found["warm, B = 2,048: the dsa, times the speed of the sparse_adam"]["measured"] == pytest.approx(
        2.5
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"share": 0.5}, "share of the disk's limit"),
        ({"pages": 2.0}, "pages read"),
        ({"naive": 200.0}, "dsa_cold"),
    ],
)
def test_goals_can_be_missed(options, what):
    (goal,) = [goal for goal in goals(results(cold(**options))) if goal["met"] == "no"]
    assert what in goal["what"]


@pytest.mark.parametrize("sizes", [{"rows": 999_999}, {"dim": 64}])
def test_goals_are_for_the_full_sizes(sizes):
    assert goals(results(warm(), cold(), **sizes)) == []


def test_the_report_reads_as_a_table():
    run = results(warm(), cold())
    run.first_step_seconds = {"flat": 0.5}
    run.device = {
        "reads_per_second": 9e4,
        "writes_per_second": 5e4,
        "read_depth": 32,
        "write_depth": 64,
        "direct": False,
    }
    run.notes = ["a note"]
    run.groups[0].notes = ["a remark"]
    run.goals, run.losses = goals(run), ["a loss"]
    text = render(run)
    lines = text.splitlines()
    assert (
        "90,000 reads/s (queue depth 32) and 50,000 writes/s (queue depth 64); through the page cache" in text
    )
    assert next(row for row in lines if row.startswith("the dsa_none")).split()[2:] == [
        "1.00", "1.00", "-", "1.00", "1.00", "1", "2,048,000", "10.0", "10.0",
    ]  # fmt: skip
    assert "  the dsa_sustained: 70% of the 1,000 rows/s at which the disk is saturated" in text
    assert "a note" in lines
    assert "  a remark" in lines
    assert lines[-2:] == ["where it loses", "- a loss"]


@pytest.mark.parametrize(("kind", "said"), [("warm", True), ("cold", False)])
def test_a_table_that_was_written_back_meanwhile_is_told(kind, said):
    group = warm()
    group.kind = kind
    group.find("dsa").traps_per_row = 0.3
    group.find("dsa_none").traps_per_row = 0.01
    text = render(results(group))
    assert ("  the dsa: 0.30 accesses for a row met a page that the system had written back" in text) == said
    assert "the dsa_none: 0.01" not in text


def test_a_run_without_losses_says_so():
    assert render(results(warm())).endswith("where it loses\n- no comparison of this run was lost\n")


def test_numbers_and_sizes():
    assert [number(x) for x in (0.0, 0.9996, 9.996, 99.96, 1e6)] == [
        "0.000",
        "1.000",
        "10.00",
        "100.0",
        "1,000,000",
    ]
    assert [size(x) for x in (0, 99_999_999, 100_000_000)] == ["0.0 MB", "100.0 MB", "0.10 GB"]
