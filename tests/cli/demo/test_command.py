import json
import os
import signal

import numpy as np
import nursery
import pytest

from dsa.cli import program
from dsa.cli.demo import picture

QUICK = ["--dim", "2", "--epochs", "6", "--batch-size", "16", "--pool", "20"]

COMPILING = "dsa: compiling its kernels, once on this machine ...\n"  # on standard error, when it is so


@pytest.fixture
def place(tmp_path, parent_lines):
    (tmp_path / "edges.tsv").write_text("\n".join(parent_lines))
    return tmp_path


def arguments(place, *more, directory="run"):
    edges = ["--edges", str(place / "edges.tsv"), "--closure"]
    return ["demo", *edges, *QUICK, "--disk-dir", str(place / directory), *map(str, more)]


def vectors(path):
    with np.load(path) as content:
        return content["names"].tolist(), content["vectors"], float(content["k"])


def test_a_run_prints_draws_and_saves(place, capsys):
    more = (
        "--save",
        place / "out.npz",
        "--json",
        place / "out.json",
        "--k",
        "0.5",
        "--second-moment",
        "frame",
    )
    assert program.main(arguments(place, *more)) == 0
    out, err = capsys.readouterr()
    assert err.replace(COMPILING, "") == ""
    assert "40 nodes, 102 edges\n" in out
    for line in ("MAP ", "mean rank ", "on disk ", "memory ", "on the clamp ", "loss "):
        assert f"\n{line}" in out
    assert "epoch 6 of 6: loss" in out
    assert (place / "run" / "ball.png").read_bytes()[1:4] == b"PNG"

    names, found, k = vectors(place / "out.npz")
    assert sorted(names) == sorted(f"n{i}" for i in range(40))
    assert (found.shape, found.dtype, k) == ((40, 2), np.float32, 0.5)
    assert np.all(np.linalg.norm(found, axis=1) < np.sqrt(2.0))

    result = json.loads((place / "out.json").read_text())
    assert (result["nodes"], result["edges"], result["evaluated_nodes"]) == (40, 102, 39)
    assert result["settings"]["second_moment"] == "frame"
    assert f"MAP            {result['mean_average_precision']:.4f}" in out
    files = [path.stat() for path in (place / "run" / "state").iterdir()]
    assert result["disk_apparent"] == sum(file.st_size for file in files)


def test_a_finished_run_goes_on_for_more_epochs(place, capsys):
    assert program.main(arguments(place, "--epochs", 2)) == 0
    assert program.main(arguments(place, "--resume", "--epochs", 4)) == 0
    out = capsys.readouterr().out
    assert "epoch 2 of 2: loss" in out
    assert "epoch 4 of 4: loss" in out
    assert "epoch 2 of 4" not in out
    assert program.main(arguments(place, "--resume", "--epochs", 3)) == 1
    assert "has epochs=4 but 3 is asked for" in capsys.readouterr().err


def test_columns_and_notes(tmp_path, capsys):
    (tmp_path / "triples.tsv").write_text(
        "head\trelation\ttail\n" + "".join(f"n{i}\tis a\tn{(i - 1) // 3}\n" for i in range(1, 40))
    )
    run = ["demo", "--edges", str(tmp_path / "triples.tsv"), "--columns", "1,3", *QUICK]
    assert program.main([*run, "--disk-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "triples.tsv, line 1: 'head\\ttail' looks like a heading and is taken as an edge" in out
    assert "42 nodes, 40 edges\n" in out
    for wrong in ("1", "0,2", "2,2", "a,b"):
        with pytest.raises(SystemExit):
            program.main(["demo", "--edges", "x", "--columns", wrong])
        assert "write, say, 1,3" in capsys.readouterr().err
    assert program.main(["demo", "--columns", "1,3", "--disk-dir", str(tmp_path / "other")]) == 1
    assert "pass --edges, too" in capsys.readouterr().err


def test_mammals_are_the_default(tmp_path, capsys):
    assert (
        program.main(["demo", "--epochs", "1", "--disk-dir", str(tmp_path / "run"), "--eval-nodes", "50"])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("1,182 nodes, 6,542 edges\n")
    assert "(over a sample of 50 of " in out


def test_what_was_dropped_is_told(tmp_path, capsys):
    (tmp_path / "edges.tsv").write_text("a\tb\nb\tb\na\tb\nc\tb\n")
    edges = ["--edges", str(tmp_path / "edges.tsv"), "--disk-dir", str(tmp_path / "run")]
    assert program.main(["demo", *edges, *QUICK]) == 0
    assert capsys.readouterr().out.startswith(
        "3 nodes, 2 edges, 1 self-loops left out, 1 repeated edges left out\n"
    )


def test_a_directory_is_not_replaced_by_accident(place, capsys):
    assert program.main(arguments(place, "--save", place / "first.npz")) == 0
    assert program.main(arguments(place, "--seed", "1")) == 1
    assert "pass --resume to continue it, --fresh to start over" in capsys.readouterr().err
    assert program.main(arguments(place, "--resume", "--save", place / "again.npz")) == 0
    assert vectors(place / "again.npz")[1].tobytes() == vectors(place / "first.npz")[1].tobytes()
    assert program.main(arguments(place, "--fresh", "--seed", "1", "--save", place / "other.npz")) == 0
    assert vectors(place / "other.npz")[1].tobytes() != vectors(place / "first.npz")[1].tobytes()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--dim", "3"), "has dim=2 but 3 is asked for"),
        (("--second-moment", "coordinate"), "has second_moment='row' but 'coordinate' is asked for"),
        (("--k", "2"), r"has k=1.0 but 2.0 is asked for"),
    ],
)
def test_a_run_is_not_resumed_as_another(place, capsys, more, message):
    assert program.main(arguments(place)) == 0
    assert program.main(arguments(place, "--resume", *more)) == 1
    assert message in capsys.readouterr().err


def test_a_run_is_not_resumed_with_another_graph(place, capsys):
    assert program.main(arguments(place)) == 0
    with (place / "edges.tsv").open("a") as file:
        file.write("\nn99\tn3")
    assert program.main(arguments(place, "--resume")) == 1
    assert "trained on another graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--resume",), "no demo run to resume in"),
        (("--save", "absent/out.npz"), "the directory of 'absent/out.npz' doesn't exist"),
        (("--eval-nodes", "0"), "eval-nodes is 0: use 1 or more"),
        (("--lr", "0"), "lr is 0.0: use a positive number"),
        (("--edges", "absent.tsv"), "absent.tsv"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(place, capsys, more, message):
    assert program.main(arguments(place, *more)) == 1
    assert message in capsys.readouterr().err
    assert not (place / "run").exists()


def test_a_cycle_is_refused_with_closure_only(place, capsys):
    with (place / "edges.tsv").open("a") as file:
        file.write("\nn0\tn5")
    assert program.main(arguments(place)) == 1
    assert "the edges form a cycle of 3: " in capsys.readouterr().err
    assert program.main([word for word in arguments(place) if word != "--closure"]) == 0


def test_without_matplotlib_there_is_no_picture(place, capsys, monkeypatch):
    monkeypatch.setattr(picture, "available", lambda: False)
    assert program.main(arguments(place)) == 0
    assert "no picture: matplotlib isn't installed (pip install matplotlib)" in capsys.readouterr().out
    assert not (place / "run" / "ball.png").exists()
    assert program.main(arguments(place, "--fresh", "--picture", place / "p.png")) == 1
    assert "--picture needs matplotlib" in capsys.readouterr().err


def start(words):
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    return nursery.start(strict + nursery.DSA, *words, env=os.environ | {"PYTHONUNBUFFERED": "1"})


@pytest.mark.skipif(os.name == "nt", reason="a console's Ctrl-C can't be sent to one process there")
@pytest.mark.parametrize("kill", [False, True])
def test_an_interrupted_or_killed_run_ends_the_same(place, kill):
    long = ["--epochs", "120"]
    process = start(arguments(place, *long))
    for line in process.stdout:
        if line.startswith("epoch 12 of 120"):
            process.send_signal(signal.SIGKILL if kill else signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    assert err.replace(COMPILING, "") == ""
    assert process.returncode == (-signal.SIGKILL if kill else 130)
    assert kill or "can go on: give the command again with --resume" in out

    assert program.main(arguments(place, *long, "--resume", "--save", place / "parts.npz")) == 0
    assert program.main(arguments(place, *long, "--save", place / "whole.npz", directory="whole")) == 0
    assert vectors(place / "parts.npz")[1].tobytes() == vectors(place / "whole.npz")[1].tobytes()
