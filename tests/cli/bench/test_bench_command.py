"""`dsa bench` from the outside: what it prints, writes, leaves behind and refuses."""

import argparse
import json

import pytest
import torch

from dsa.cli.bench import command
from dsa.cli.bench.settings import FULL, QUICK, check_room

SMALL = ["--quick", "--rows", "3000", "--dim", "8", "--batch", "16", "200", "--seconds", "0.2"]


def parsed(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a run over everything wrote, and its directory afterwards."""
    directory = tmp_path_factory.mktemp("bench")
    target = directory / "out.json"
    threads = torch.get_num_threads()
    # On a busy machine torch's threads wait for each other far longer than they work.
    torch.set_num_threads(1)
    try:
        code = command.run(
            parsed(*SMALL, "--dir", str(directory), "--json", str(target), "--memory-limit", "100")
        )
    finally:
        torch.set_num_threads(threads)
    return code, json.loads(target.read_text()), sorted(path.name for path in directory.iterdir())


@pytest.fixture(autouse=True, scope="module")
def _no_control_groups():
    """A test run makes no control group: the command then has to say why it measured nothing there."""

    class Refused:
        def __enter__(self):
            raise PermissionError("not allowed here")

        def __exit__(self, *_):
            raise AssertionError("never entered")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsa.cli.bench.limited.control_group", lambda limit: Refused())
        yield


def test_it_succeeds_and_removes_its_files(report):
    code, _, names = report
    assert code == 0
    assert names == ["out.json"]


def test_every_group_is_there(report):
    groups = report[1]["groups"]
    assert [(group["kind"], group["batch"]) for group in groups] == [
        ("warm", 16),
        ("warm", 200),
        ("cold", 16),
        ("cold", 200),
        ("loop", 16),
        ("loop", 200),
        ("small", 16),
        ("small", 200),
        ("hyperbolic", 512),
    ]


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("warm", {"sparse_adam", "naive", "dsa", "dsa_none", "dsa_power", "dsa_zarr", "touch"}),
        ("loop", {"sparse_adam", "dsa", "dsa_none", "dsa_state"}),
        (
            "cold",
            {"naive_cold", "dsa_cold", "dsa_sustained", "dsa_opened", "dsa_written_back", "dsa_again"},
        ),
        ("small", {"sparse_adam", "dsa"}),
        (
            "hyperbolic",
            {f"{what}_{name}" for what in ("dsa", "kernel") for name in ("row", "coordinate", "frame")}
            | {"geoopt_row", "geoopt_coordinate", "dsa_coordinate_sqrt", "kernel_coordinate_sqrt"},
        ),
    ],
)
def test_every_contender_is_there(report, kind, keys):
    for group in report[1]["groups"]:
        if group["kind"] == kind:
            found = {line["key"] for line in group["lines"]}
            assert found == keys


def test_lines_agree_with_themselves(report):
    for group in report[1]["groups"]:
        for line in group["lines"]:
            low, high = line["quartiles"]
            assert low <= line["milliseconds"] <= high
            assert line["steps"] >= 1
            assert line["rows_per_second"] == pytest.approx(group["batch"] / line["milliseconds"] * 1e3)
            assert (line["ratio"] is None) == (line["baseline"] == "")


def test_dsa_is_compared_with_torch_and_geoopt(report):
    for group in report[1]["groups"]:
        for line in group["lines"]:
            if line["key"].startswith("dsa"):
                rival = "geoopt_" if group["kind"] == "hyperbolic" else "sparse_adam"
                assert line["baseline"].startswith(rival)


def test_the_rest_of_the_numbers_are_there(report):
    numbers = report[1]
    assert numbers["settings"]["rows"] == 3000
    assert numbers["machine"]["torch_threads"] >= 1
    assert set(numbers["machine"]["versions"]) == {"dsa", "python", "torch", "numpy", "numba"}
    assert set(numbers["first_step_seconds"]) == {"flat", "ball"}
    assert numbers["device"]["reads_per_second"] > 0
    assert numbers["goals"] == []  # stated for other sizes
    assert all(isinstance(loss, str) for loss in numbers["losses"])
    assert any("memory limit could not be set (not allowed here)" in note for note in numbers["notes"])


def test_a_part_can_be_chosen(tmp_path, capsys):
    words = [*SMALL, "--only", "small", "--dir", str(tmp_path)]
    assert command.run(parsed(*words)) == 0
    printed = capsys.readouterr().out
    assert "small rows, warm, 3,000 x 4 float32, B = 200" in printed
    assert "where it loses" in printed
    assert "cold" not in printed
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_removes_the_files(tmp_path, monkeypatch, capsys):
    def interrupted(settings, directory, say):
        (directory / "table").write_bytes(b"1")
        assert directory.parent == tmp_path
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    assert command.run(parsed(*SMALL, "--dir", str(tmp_path))) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "0"], "rows=0 is out of range: pass at least 1"),
        (["--dim", "-1"], "dim=-1 is out of range"),
        (["--seconds", "0"], "seconds=0.0 is out of range"),
        (["--seconds", "nan"], "seconds=nan is out of range"),
        (["--batch", "0"], "batch=0 is out of range for 50000 rows"),
        (["--batch", "64", "50001"], "batch=50001 is out of range for 50000 rows"),
        (["--memory-limit", "0"], "memory_limit=0 is out of range"),
        (["--dir", "missing"], "the directory 'missing' does not exist: make it"),
        (["--json", "missing/out.json"], "'missing/out.json' can't be written"),
        (["--json", "."], "'.' can't be written"),
    ],
)
def test_options_out_of_range(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        command.run(parsed("--quick", *words))


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--only", "lukewarm")
    assert "lukewarm" in capsys.readouterr().err


def test_a_full_disk_is_told_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.cli.bench.settings.system.available_bytes", lambda directory: 1000)
    with pytest.raises(
        ValueError, match=r"of disk but only 1,000 are free .*: pass fewer --rows, or another --dir"
    ):
        command.run(parsed("--quick", "--dir", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.cli.bench.settings.available_memory", lambda: 1000)
    with pytest.raises(ValueError, match=r"of memory, cached files among it, but only 1,000 are available"):
        command.run(parsed("--quick", "--dir", str(tmp_path)))


def test_unknown_memory_is_no_reason_to_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr("dsa.cli.bench.settings.available_memory", lambda: None)
    assert check_room(QUICK.with_sizes(directory=tmp_path)) is None


def test_the_full_sizes_are_those_of_the_goals():
    settings = command.settings_from(parsed())
    assert (settings.rows, settings.dim, settings.batches) == (1_000_000, 128, (64, 2048, 16384))
    assert settings == FULL
    # torch's state, and two tables' files
    assert 4.5e9 < settings.memory_bytes() < 6e9
    assert settings.disk_bytes() > 4 * 1.54e9


def test_few_rows_cut_the_sizes_that_were_not_given():
    settings = command.settings_from(parsed("--rows", "100"))
    assert (settings.batches, settings.hyperbolic_rows, settings.hyperbolic_batches) == ((64,), 100, (100,))
