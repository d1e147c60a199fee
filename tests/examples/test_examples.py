"""The recipes of `dsa.examples`, at small sizes: they run, and they do what they say."""

import importlib
import os
import pkgutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from current_files import table_file
from nursery import start

import dsa
import dsa.examples
from dsa.examples import (
    accelerate_loop,
    knowledge_graph,
    lightning_loop,
    node2vec,
    recommender,
    resume_after_kill,
)

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])}
SMALL = {"users": 40, "items": 30, "dim": 8, "batch": 64}


def table(directory, name):
    """The bytes of a table behind its header, which holds a random identity."""
    return table_file(directory, name).read_bytes()[4096:]


def test_c17_one_optimizer_one_schedule_saved_and_resumed(tmp_path):
    """A run in two parts is the run in one: losses, tables, dense layers."""
    whole = recommender.main(tmp_path / "whole", steps=60, **SMALL)
    parts = recommender.main(tmp_path / "parts", steps=25, **SMALL) + recommender.main(
        tmp_path / "parts", steps=60, **SMALL
    )
    assert parts == whole
    for name in ("users", "items"):
        assert table(tmp_path / "parts", name) == table(tmp_path / "whole", name)
    saved = [
        torch.load(tmp_path / where / "checkpoint.pt", weights_only=True) for where in ("whole", "parts")
    ]
    dense = [
        # The tables' entries refer to their directories.
        {key: value for key, value in each["model"].items() if not key.endswith("_extra_state")}
        for each in saved
    ]
    assert dense[0].keys() == dense[1].keys() >= {"top.0.weight", "top.2.bias"}
    assert all(torch.equal(dense[0][key], dense[1][key]) for key in dense[0])
    assert (tmp_path / "whole" / "checkpoint.pt").stat().st_size < 100_000
    assert recommender.main(tmp_path / "whole", steps=60, **SMALL) == []


def test_c17_the_recommender_learns_and_follows_the_schedule(tmp_path):
    losses = recommender.main(tmp_path, steps=400, **SMALL)
    assert np.mean(losses[-20:]) < 0.35 < 0.65 < np.mean(losses[:20])
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    rates = [group["lr"] for group in saved["optimizer"]["param_groups"]]
    assert rates == pytest.approx([1e-2, 1e-3])


def test_node2vec_finds_the_cliques(tmp_path):
    assert node2vec.main(tmp_path, cliques=12, size=6, dim=16, steps=150) > 0.9


def test_a_knowledge_graph_is_learned_from_one_table(tmp_path):
    assert (
        knowledge_graph.main(tmp_path, entities=60, relations=2, dim=8, steps=400, batch=64, negatives=8)
        > 0.5
    )


def test_every_entity_of_a_batch_is_read_and_updated_once(tmp_path):
    model = knowledge_graph.RotatE(tmp_path, entities=50, relations=2, dim=4)
    with dsa.DiskSparseAdam(model.named_parameters(), lr=0.1) as optimizer:
        assert optimizer.param_names == ["entity", "angle.weight"]
        head, relation, candidates = (
            torch.tensor([1, 2]),
            torch.tensor([0, 1]),
            torch.tensor([[2, 3, 3], [1, 1, 4]]),
        )
        model(head, relation, candidates).sum().backward()
        assert optimizer.stats()["rows_read"] == 4
        optimizer.step()
        assert optimizer.stats()["rows_written"] == 4 + 2


def test_a_lightning_loop_saved_and_resumed(tmp_path):
    small = {"words": 50, "dim": 8, "batches": 20}
    whole = lightning_loop.main(tmp_path / "whole", epochs=4, **small)
    parts = lightning_loop.main(tmp_path / "parts", epochs=1, **small) + lightning_loop.main(
        tmp_path / "parts", epochs=4, **small
    )
    assert parts == whole
    assert table(tmp_path / "parts", "embedding") == table(tmp_path / "whole", "embedding")
    assert np.mean(whole[-20:]) < 0.5 * np.mean(whole[:20])


def test_an_accelerate_loop_with_and_without_scaling(tmp_path):
    scaled = accelerate_loop.main(tmp_path / "scaled", steps=150, words=100, mixed=True)
    plain = accelerate_loop.main(tmp_path / "plain", steps=150, words=100, mixed=False)
    np.testing.assert_allclose(scaled, plain, rtol=1e-4)
    assert np.mean(plain[-20:]) < 0.5 * np.mean(plain[:20])


def test_a_skipped_step_is_noticed(tmp_path):
    layer = dsa.DiskEmbedding(4, 2, state_dir=tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with dsa.DiskSparseAdam(layer.parameters(), lr=0.1) as inner:
        optimizer = accelerate_loop.Prepared(inner, scaler)
        for factor, skipped in ((float("inf"), True), (1.0, False)):
            optimizer.zero_grad()
            scaler.scale(layer(torch.tensor([1])).sum() * factor).backward()
            optimizer.step()
            assert optimizer.step_was_skipped is skipped
        assert inner.global_step == 1


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(tmp_path, capsys):
    code = "import runpy; runpy.run_module('dsa.examples.resume_after_kill', run_name='__main__')"
    with start(code, tmp_path / "killed") as child:
        for line in child.stdout:
            if line.startswith("step 30 "):
                break
        os.kill(child.pid, signal.SIGKILL)
        lines = child.stdout.read().splitlines() or [line]
    assert child.returncode == -signal.SIGKILL
    steps = int(lines[-1].split()[1]) + 50
    rest = resume_after_kill.main(tmp_path / "killed", steps=steps)
    whole = resume_after_kill.main(tmp_path / "whole", steps=steps)
    assert 30 <= len(rest) <= 60
    assert whole[-len(rest) :] == rest
    assert table(tmp_path / "killed", "embedding") == table(tmp_path / "whole", "embedding")
    assert f"step {steps}" in capsys.readouterr().out


def test_a_directory_is_made_where_the_command_line_names_none(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["recipe", "here"])
    assert dsa.examples.directory_given() == "here"
    monkeypatch.setattr("sys.argv", ["recipe"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = dsa.examples.directory_given()
    assert Path(made).parent == tmp_path
    assert os.listdir(made) == []
    assert capsys.readouterr().out == f"in {made}\n"


def test_every_recipe_is_listed_and_can_be_run_from_the_command_line():
    names = [module.name for module in pkgutil.iter_modules(dsa.examples.__path__)]
    assert len(names) >= 6
    for name in names:
        module = importlib.import_module(f"dsa.examples.{name}")
        assert f"`dsa.examples.{name}`" in dsa.examples.__doc__
        assert callable(module.main)
        code = Path(module.__file__).read_text("utf-8")
        assert "main(directory_given())" in code.partition('\nif __name__ == "__main__":\n')[2]
