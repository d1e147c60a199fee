import json
import os

import numpy as np
import pytest

from dsa.cli.bench import machine
from dsa.cli.demo.directory import disk_use
from dsa.cli.demo.report import Report, format_report

REPORT = Report(
    nodes=1182,
    edges=6542,
    dim=10,
    k=1.0,
    second_moment="row",
    epochs=300,
    steps=30900,
    loss=0.0505,
    mean_average_precision=0.98904,
    mean_rank=1.0304,
    evaluated_nodes=1181,
    evaluable_nodes=1181,
    training_seconds=12.34,
    evaluation_seconds=0.02,
    rows_on_clamp=342,
    disk_apparent=1000,
    disk_occupied=4096,
    memory_peak=3 * 1024**3,
    memory_growth=-2 * 1024**2,
)


def test_every_figure_is_named():
    assert format_report(REPORT).splitlines() == [
        "nodes, edges   1,182, 6,542",
        "table          dim 10, k 1, second moment per row",
        "epochs, steps  300, 30,900",
        "loss           0.0505",
        "MAP            0.9890",
        "mean rank      1.030",
        "time           12.3 s training, 0.0 s evaluation",
        "on disk        4.0 KiB (1000 bytes by file length)",
        "memory         3.00 GiB at most, -2.0 MiB gained in training",
        "on the clamp   342 of 1,182 rows",
    ]


def test_what_is_unknown_or_sampled_is_said():
    from dataclasses import replace

    text = format_report(
        replace(REPORT, loss=None, memory_peak=None, memory_growth=None, evaluated_nodes=100)
    )
    assert "loss           unknown" in text
    assert "memory         unknown at most, unknown gained" in text
    assert text.count("(over a sample of 100 of 1,181 nodes)") == 2


def test_a_report_is_json():
    assert json.loads(json.dumps(REPORT.to_json()))["memory_peak"] == 3 * 1024**3


def test_holes_of_a_file_occupy_nothing(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 22)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "full").write_bytes(b"x" * 5000)
    apparent, occupied = disk_use(tmp_path)
    assert apparent == (1 << 22) + 5000
    assert 5000 <= occupied < 1 << 20


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux tells")
def test_memory_that_is_written_is_seen():
    before = machine.anonymous_bytes()
    block = np.ones(1 << 23)
    grown = machine.anonymous_bytes() - before
    assert block.nbytes * 0.9 < grown < block.nbytes * 1.5
    assert machine.peak_bytes() >= block.nbytes


def test_other_systems_tell_less(monkeypatch):
    monkeypatch.setattr(machine, "resource", None)
    assert machine.peak_bytes() is None
