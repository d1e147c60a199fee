"""The programs of the original project's documents run as they stand, but for sizes and paths."""

import ast
import gc
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

import dsa
from dsa.errors import StateExistsError
from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam

PROGRAMS = Path(__file__).parent / "original"


def run(name, **constants):
    """Execute a program whose top-level constants have other values, and return its variables."""
    path = PROGRAMS / f"{name}.py"
    tree = ast.parse(path.read_text("utf-8"), str(path))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            (target,) = statement.targets
            statement.value.value = constants.pop(target.id, statement.value.value)
    assert not constants, f"{name} has no constants {sorted(constants)}"
    variables = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(tree, str(path), "exec"), variables)
    return variables


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed_losses(capsys):
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("epoch")]
    return [float(line[-1]) for line in lines]


def test_local_training(tmp_path, capsys):
    run("local_training", num_entities=2_000, dim=16)
    losses = printed_losses(capsys)
    assert len(losses) == 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2 * losses[0]
    assert list(tmp_path.iterdir()) == []


def test_local_training_twice_is_the_same(capsys):
    for _ in range(2):
        run("local_training", num_entities=2_000, dim=16)
    losses = printed_losses(capsys)
    assert losses[:4] == losses[4:]


def test_local_training_over_what_a_killed_run_left(capsys):
    """Its first lines remove the directory, so that it starts anew."""
    weights = {"entity_emb": torch.zeros(7, 3)}
    DiskSparseRiemannianAdam(weights, k=0.0, disk_dir="./dsa_local_cache").shutdown()
    run("local_training", num_entities=500, dim=4)
    assert len(printed_losses(capsys)) == 4


def test_kaggle_notebook(tmp_path, capsys):
    variables = run(
        "kaggle_notebook", KAGGLE_CACHE_DIR=str(tmp_path / "working/cache"), num_entities=2_000, dim=16
    )
    losses = printed_losses(capsys)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert list((tmp_path / "working").iterdir()) == []
    assert variables["optimizer"].global_step == 10


def test_hyperbolic_workflow():
    variables = run("hyperbolic_workflow", num_entities=2_000)
    emb = variables["emb"]
    assert emb.shape == (1024, 64)
    assert emb.norm(dim=1).max() < 1.0
    checkpoint = dsa.open_checkpoint("./checkpoints/run-001")
    checkpoint.verify()
    (table,) = checkpoint.tables
    assert (checkpoint.global_step, table.name, table.k, table.rows) == (20, "hyperbolic_nodes", 0.5, 2_000)


def test_the_hyperbolic_state_goes_on_and_its_checkpoint_brings_it_back():
    variables = run("hyperbolic_workflow", num_entities=500)
    rows, params = np.arange(500), {"hyperbolic_nodes": torch.zeros(500, 64)}
    with pytest.warns(dsa.errors.StateWarning, match="k"):
        again = DiskSparseRiemannianAdam(params, lr=1e-3, k=1.0, disk_dir="./hyperbolic_cache", resume=True)
    with again:
        assert again.global_step == 20
        before = again.read_rows(rows)
        again.step({"hyperbolic_nodes": variables["batches"][0]}, current_k=0.25)
        assert not torch.equal(again.read_rows(rows), before)
        again.import_checkpoint("./checkpoints/run-001", verify_hashes=True)
        assert again.global_step == 20
        assert torch.equal(again.read_rows(rows), before)


def forget(variables):
    variables.clear()
    gc.collect()


def test_the_post():
    """It never closes its optimizer: that is warned of, and no step is lost."""
    variables = run("forum_post", num_embeddings=3_000, embedding_dim=16, batches=7)
    rows = torch.unique(torch.cat(variables["dataloader"]))
    torch.manual_seed(0)
    layer = torch.nn.EmbeddingBag(3_000, 16, sparse=True)
    changed = (variables["embedding"].weight != layer.weight).any(dim=1)
    assert torch.equal(changed.nonzero().squeeze(1), rows)
    with pytest.warns(ResourceWarning, match="never closed"):
        forget(variables)
    with pytest.raises(StateExistsError, match="pass resume=True to continue it or resume=False"):
        dsa.DiskSparseAdam(layer.parameters(), lr=0.001, state_dir="./opt_state_cache")
    with dsa.DiskSparseAdam(layer.parameters(), state_dir="./opt_state_cache", resume=True) as optimizer:
        assert optimizer.global_step == 7
        checkpoint = dsa.open_checkpoint(optimizer.export_checkpoint("./moments"))
    assert checkpoint.tables[0].touched_rows == len(rows)


def test_the_constructor_of_the_reference():
    """Names, order and defaults; what came later is by keyword."""
    reference = {
        "params": inspect.Parameter.empty,
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "weight_decay_mode": "l2",
        "k": 1.0,
        "disk_dir": "./disk_cache",
        "max_queue_size": 150,
        "resume": None,
        "put_timeout": 5.0,
        "retain_params": False,
        "init_max_norm_fraction": 0.5,
    }
    parameters = list(inspect.signature(DiskSparseRiemannianAdam).parameters.values())
    count = len(reference)
    assert {each.name: each.default for each in parameters[:count]} == reference
    assert [each.name for each in parameters[:count]] == list(reference)
    assert all(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters[:count])
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters[count:])


def test_the_methods_of_the_reference():
    """Each is called with the arguments, and by the names, that the reference gives."""
    weights = torch.randn(50, 4, generator=torch.Generator().manual_seed(1)) * 0.01
    optimizer = DiskSparseRiemannianAdam([weights], lr=0.1)
    indices, gradients = torch.tensor([3, 4, 3]), torch.ones(3, 4)
    optimizer.step(updates={"param_0": (indices, gradients)}, current_k=None)
    optimizer.step(updates={"param_0": (indices.numpy(), gradients.numpy())}, current_k=torch.tensor(0.5))
    assert optimizer.read_rows(indices, name=None).shape == (3, 4)
    optimizer.set_curvature(0.25, reset_moments=False)
    assert optimizer.reproject_all(name=None) == 0
    saved = optimizer.read_rows(torch.arange(50))

    optimizer.export_checkpoint("first")
    optimizer.save_checkpoint("second")
    optimizer.step(updates={"param_0": (indices, gradients)})
    optimizer.import_checkpoint("first", verify_hashes=True)
    assert torch.equal(optimizer.read_rows(torch.arange(50)), saved)
    optimizer.load_checkpoint("second")
    assert optimizer.global_step == 2
    with pytest.raises(ValueError, match="json"):
        optimizer.save_checkpoint("checkpoint.json")

    for refused in (optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(NotImplementedError, match="resume=True"):
            refused()
    optimizer.shutdown()
    optimizer.shutdown()
