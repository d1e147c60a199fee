"""Decay that rows make up for, beside dense AdamW, through every door by which weights are read."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import zarr
from current_files import journal_file
from nursery import start

import dsa
from dsa import init
from dsa.backends import Zarr
from dsa.errors import CheckpointError, GradientError, StateCorruptError, StateMismatchError, StateWarning
from dsa.rules.conventions import TORCH_ADAMW
from dsa.state.metadata import read_metadata, write_metadata

ROWS, DIM = 40, 4
WD = 0.3


def make(path, source=None, **options):
    first = init.Normal(ROWS, DIM, seed=3) if source is None else source
    return dsa.DiskEmbedding(
        len(source) if source is not None else ROWS,
        DIM,
        init=first,
        state=options.pop("state", "catch_up_adam"),
        state_dir=path,
        **options,
    )


def adam(embedding, lr=0.1, **options):
    given = {"weight_decay": WD, "weight_decay_mode": "decoupled", "weight_decay_catch_up": True}
    return dsa.DiskSparseAdam(embedding.parameters(), lr=lr, **(given | options))


def explicit(path, rows=ROWS, **options):
    given = {"weight_decay": WD, "weight_decay_mode": "decoupled", "weight_decay_catch_up": True, "lr": 0.1}
    return dsa.DiskSparseRiemannianAdam(
        {"entity": init.Normal(rows, DIM, seed=3)}, k=0.0, disk_dir=path, **(given | options)
    )


def batch_of(step, size=6):
    draws = np.random.default_rng(step)
    rows = draws.choice(ROWS - 10, size, replace=False)  # the last ten are never touched
    return rows, draws.standard_normal((size, DIM)).astype(np.float32)


def take(embedding, optimizer, step, size=6):
    rows, grad = batch_of(step, size)
    optimizer.zero_grad()
    (embedding(torch.from_numpy(rows)) * torch.from_numpy(grad)).sum().backward()
    optimizer.step()


def every(embedding):
    return embedding.weight[torch.arange(embedding.num_embeddings)].detach()


@pytest.mark.parametrize("maximize", [False, True])
def test_all_rows_are_those_of_dense_adamw_where_it_keeps_no_moments(tmp_path, maximize):
    """Without momentum a zero gradient moves nothing but by decay: then both agree in every row."""
    embedding = make(tmp_path)
    first = every(embedding)
    options = {"betas": (0.0, 0.0), "eps": 1e-3, "maximize": maximize}
    ours = adam(embedding, convention=TORCH_ADAMW, **options)
    dense = torch.nn.Embedding.from_pretrained(first.clone(), freeze=False)
    theirs = torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=WD, **options)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda n: 1.0 / (1 + n % 7)) for each in (ours, theirs)
    ]
    for step in range(40):
        size = 0 if step % 9 == 4 else 6
        take(embedding, ours, step, size)
        take(dense, theirs, step, size)
        for schedule in schedules:
            schedule.step()
        if step % 5 == 0:
            torch.testing.assert_close(every(embedding), dense.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(every(embedding), dense.weight.detach(), rtol=1e-5, atol=1e-6)
    untouched = slice(ROWS - 10, ROWS)
    torch.testing.assert_close(
        every(embedding)[untouched], dense.weight.detach()[untouched], rtol=3e-6, atol=0
    )
    assert (every(embedding)[untouched].abs() < 0.9 * first[untouched].abs()).all()
    embedding.close()


def test_rows_that_nothing_touches_are_those_of_dense_adamw(tmp_path):
    """With moments, too: a row without a gradient has none."""
    embedding = make(tmp_path)
    dense = torch.nn.Embedding.from_pretrained(every(embedding).clone(), freeze=False)
    ours, theirs = adam(embedding), torch.optim.AdamW(dense.parameters(), lr=0.1, weight_decay=WD)
    for step in range(30):
        take(embedding, ours, step)
        take(dense, theirs, step)
    torch.testing.assert_close(
        every(embedding)[ROWS - 10 :], dense.weight.detach()[ROWS - 10 :], rtol=2e-6, atol=0
    )
    embedding.close()


@pytest.mark.parametrize("mode", ["decoupled", "unscaled"])
def test_a_program_in_float64_that_lets_every_row_decay_in_every_step(tmp_path, mode):
    """Of moments only those of the batch move, as in all of dsa: that is the difference to dense AdamW."""
    rate = WD if mode == "decoupled" else 0.02
    w = init.Normal(ROWS, DIM, seed=3)
    out = np.empty((ROWS, DIM), np.float32)
    w.fill(np.arange(ROWS), out)
    w, m, v, t = out.astype(np.float64), np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM)), np.zeros(ROWS)
    with explicit(tmp_path, weight_decay=rate, weight_decay_mode=mode) as optimizer:
        for step in range(50):
            lr = 0.1 * (1 + step % 3) / 3
            optimizer.param_groups[0]["lr"] = lr
            rows, grad = batch_of(step, 0 if step % 8 == 5 else 6)
            optimizer.step({"entity": (rows, grad)})
            w *= 1 - (lr * rate if mode == "decoupled" else rate)
            t[rows] += 1
            m[rows] = 0.9 * m[rows] + 0.1 * grad
            v[rows] = 0.999 * v[rows] + 0.001 * grad.astype(np.float64) ** 2
            corrected = m[rows] / (1 - 0.9 ** t[rows, None])
            w[rows] -= lr * corrected / (np.sqrt(v[rows] / (1 - 0.999 ** t[rows, None])) + 1e-8)
            if step % 10 == 9:
                found = optimizer.read_rows(np.arange(ROWS)).numpy()
                np.testing.assert_allclose(found, w, rtol=2e-5, atol=1e-6)


def test_a_step_begins_at_the_weight_that_was_read(tmp_path):
    """Bit for bit: with a gradient of zero nothing but the decay of that step is between the two."""
    with explicit(tmp_path) as optimizer:
        for step in range(12):
            optimizer.step({"entity": batch_of(step)})
        row = np.array([ROWS - 1])
        seen = optimizer.read_rows(row).numpy()
        optimizer.step({"entity": (row, np.zeros((1, DIM), np.float32))})
        sums = np.cumsum([-math.log1p(-0.1 * WD)] * 13)
        left = np.float32(1.0 + math.expm1(float(np.float32(sums[11])) - float(np.float32(sums[12]))))
        assert optimizer.read_rows(row).numpy().tobytes() == (left * seen).tobytes()


def test_every_door_shows_the_same_weights(tmp_path):
    embedding = make(tmp_path / "s")
    optimizer = adam(embedding)
    for step in range(9):
        take(embedding, optimizer, step)
    ids = torch.arange(ROWS)
    expected = every(embedding)
    assert torch.equal(embedding(ids).detach(), expected)
    assert torch.equal(torch.nn.functional.embedding(ids, embedding.weight).detach(), expected)
    assert torch.equal(embedding.weight[3:9].detach(), expected[3:9])
    with dsa.open_state(tmp_path / "s") as view:  # beside training
        assert torch.equal(torch.from_numpy(view["embedding"].weights(np.arange(ROWS))), expected)
        norms = np.linalg.norm(expected.numpy().astype(np.float64), axis=1)
    optimizer.export_weights(tmp_path / "w.safetensors")
    optimizer.export_weights(tmp_path / "w.zarr")
    optimizer.export_checkpoint(tmp_path / "c")
    safetensors = pytest.importorskip("safetensors.torch")
    assert torch.equal(safetensors.load_file(tmp_path / "w.safetensors")["embedding"], expected)
    assert np.array_equal(zarr.open_group(tmp_path / "w.zarr", mode="r")["embedding/w"][:], expected.numpy())
    group = zarr.open_group(tmp_path / "c", mode="r")["embedding"]
    left = np.exp(group["l"][:].astype(np.float64) - np.float32(group.attrs["decay"]))
    np.testing.assert_allclose(group["w"][:] * left[:, None], expected, rtol=2e-7)
    touched = group["s"][:] > 0
    assert 0 < touched.sum() < ROWS
    (summary,) = dsa.summarize(tmp_path / "s").tables
    assert summary.weight_norms.maximum == pytest.approx(norms[touched].max(), rel=1e-6)
    read_only = dsa.DiskEmbedding.open(tmp_path / "s")
    assert torch.equal(read_only(ids), expected)
    model = torch.nn.Sequential(embedding)
    dsa.materialize_(model)
    assert torch.equal(model[0].weight.detach(), expected)
    embedding.close()
    with dsa.open_state(tmp_path / "s") as view:
        assert torch.equal(torch.from_numpy(view["embedding"].weights(np.arange(ROWS))), expected)


def test_weights_that_are_set_decay_from_then_on(tmp_path):
    embedding = make(tmp_path, max_norm=1.0)
    optimizer = adam(embedding)
    for step in range(5):
        take(embedding, optimizer, step)
    row = torch.tensor([ROWS - 1])
    chosen = torch.tensor([[0.5, -0.25, 0.125, 0.0625]])
    embedding.set_rows(row, chosen)
    assert torch.equal(embedding.weight[row].detach(), chosen)
    take(embedding, optimizer, 5)
    torch.testing.assert_close(embedding.weight[row].detach(), (1 - 0.1 * WD) * chosen, rtol=1e-6, atol=0)
    embedding.set_rows(row, 10 * chosen)
    clipped = embedding(row).detach()  # which is written: its norm is over 1
    assert float(clipped.norm()) == pytest.approx(1.0)
    assert torch.equal(embedding.weight[row].detach(), clipped)
    everything = torch.linspace(-1, 1, ROWS * DIM).reshape(ROWS, DIM)
    embedding.load_state_dict({"weight": everything})
    assert torch.equal(every(embedding), everything)
    take(embedding, optimizer, 6, 0)
    torch.testing.assert_close(every(embedding), (1 - 0.1 * WD) * everything, rtol=1e-6, atol=0)
    embedding.close()


def test_resetting_moments_leaves_weights_as_they_are_read(tmp_path):
    with explicit(tmp_path) as optimizer:
        for step in range(5):
            optimizer.step({"entity": batch_of(step)})
        before = optimizer.read_rows(np.arange(ROWS))
        optimizer.set_curvature(0.0, reset_moments=True, name="entity")
        assert torch.equal(optimizer.read_rows(np.arange(ROWS)), before)


@pytest.mark.parametrize("source", ["rule", "array"])
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_rows_that_are_added_begin_with_their_first_weights(tmp_path, source, backend):
    first = None if source == "rule" else np.ones((ROWS, DIM), np.float32)
    embedding = make(tmp_path / "s", first, backend=backend)
    optimizer = adam(embedding)
    for step in range(5):
        take(embedding, optimizer, step)
    before = every(embedding)
    added = None if source == "rule" else np.full((3, DIM), 2.0, np.float32)
    optimizer.close()
    dsa.grow_tables(
        tmp_path / "s", {"embedding": ROWS + 3}, init=None if added is None else {"embedding": added}
    )
    whole = init.Normal(ROWS + 3, DIM, seed=3) if source == "rule" else np.ones((ROWS + 3, DIM), np.float32)
    embedding = dsa.DiskEmbedding(
        ROWS + 3,
        DIM,
        init=whole,
        state="catch_up_adam",
        state_dir=tmp_path / "s",
        backend=backend,
        resume=True,
    )
    optimizer = adam(embedding)
    found = every(embedding)
    assert torch.equal(found[:ROWS], before)
    if source == "rule":
        expected = np.empty((3, DIM), np.float32)
        whole.fill(np.arange(ROWS, ROWS + 3), expected)
        assert np.array_equal(found[ROWS:].numpy(), expected)
    else:
        assert (found[ROWS:] == 2.0).all()
    take(embedding, optimizer, 7, 0)
    torch.testing.assert_close(every(embedding)[ROWS:], (1 - 0.1 * WD) * found[ROWS:], rtol=1e-6, atol=0)
    now = every(embedding)
    optimizer.export_checkpoint(tmp_path / "c")
    optimizer.close()
    dsa.import_checkpoint(tmp_path / "c", tmp_path / "again")
    with dsa.open_state(tmp_path / "again") as view:
        assert np.array_equal(view["embedding"].weights(np.arange(ROWS + 3)), now.numpy())


def test_ids_begin_with_their_first_weights(tmp_path):
    """Whenever they come: what others have decayed by is not theirs."""
    whole = init.Normal(ROWS, DIM, seed=3)
    with explicit(tmp_path, rows=None) as optimizer:
        for step in range(5):
            rows, grad = batch_of(step)
            optimizer.step({"entity": (rows, grad)})
        before = optimizer.read_rows([batch_of(0)[0][0]])
        optimizer.step({"entity": ([ROWS - 1], np.zeros((1, DIM), np.float32))})
        expected = np.empty((1, DIM), np.float32)
        whole.fill(np.array([ROWS - 1]), expected)
        found = optimizer.read_rows([ROWS - 1]).numpy()
        np.testing.assert_allclose(found, (1 - 0.1 * WD) * expected, rtol=1e-6)
        old = optimizer.read_rows([batch_of(0)[0][0]])
        torch.testing.assert_close(old, (1 - 0.1 * WD) * before, rtol=1e-6, atol=0)
        optimizer.delete([ROWS - 1])
        optimizer.step({"entity": batch_of(7)})
        optimizer.step({"entity": ([ROWS - 1], np.zeros((1, DIM), np.float32))})
        np.testing.assert_allclose(optimizer.read_rows([ROWS - 1]).numpy(), found, rtol=1e-6)


def trained_weights(path, until=12, **options):
    with explicit(path, **options) as optimizer:
        for step in range(optimizer.global_step, until):
            optimizer.step({"entity": batch_of(step)})
        return optimizer.read_rows(np.arange(ROWS)).numpy().tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "zarr"},
        {"backend": Zarr(compression="zstd")},
        {"async_writes": True},
        {"durability": "power"},
        {"durability": "none"},
        {"allocate": "sparse"},
    ],
    ids=str,
)
def test_storage_makes_no_difference(tmp_path, options):
    expected = trained_weights(tmp_path / "plain")
    assert trained_weights(tmp_path / "other", **options) == expected
    trained_weights(tmp_path / "parts", 7, **options)
    assert trained_weights(tmp_path / "parts", resume=True, **options) == expected


_CHILD = """
import os, sys
sys.path.insert(0, sys.argv[2])
from tests.optimizers.test_catch_up import batch_of, explicit
optimizer = explicit(sys.argv[1], durability="none")
for step in range(6):
    optimizer.step({"entity": batch_of(step)})
optimizer.step({"entity": batch_of(6, 0)})
os._exit(9)
"""


def test_a_kill_without_a_journal_loses_the_decay_of_steps_that_left_no_row(tmp_path, pytestconfig):
    with start(_CHILD, tmp_path / "s", pytestconfig.rootpath) as child:
        assert child.wait() == 9
    with pytest.warns(StateWarning, match="not closed and has no journal"):
        optimizer = explicit(tmp_path / "s", durability="none", resume=True)
    found = optimizer.read_rows(np.arange(ROWS)).numpy().tobytes()
    optimizer.close()
    stored = json.loads((tmp_path / "s" / "dsa.json").read_text())["content"]["tables"][0]
    assert stored["decay"] == float(np.float32(6 * -math.log1p(-0.1 * WD)))
    assert found == trained_weights(tmp_path / "whole", 6)  # of seven steps


@pytest.mark.parametrize("journal", ["kept", "missing", "zeros"])
def test_after_a_loss_of_power_decay_is_that_of_the_newest_row(tmp_path, monkeypatch, journal):
    path = tmp_path / "s"
    optimizer = explicit(path)
    optimizer.step({"entity": batch_of(0)})
    optimizer.flush()
    for step in range(1, 6):
        optimizer.step({"entity": batch_of(step)})
    optimizer._state.abandon()
    if journal == "missing":
        journal_file(path).unlink()
    elif journal == "zeros":
        journal_file(path).write_bytes(bytes(journal_file(path).stat().st_size))
    monkeypatch.setattr("dsa.backends.system.boot_identity", lambda: "another run of the system")
    with pytest.warns(StateWarning, match="the machine was restarted"):
        optimizer = explicit(path, resume=True)
    assert optimizer._state.tables["entity"].decay == pytest.approx(6 * -math.log1p(-0.1 * WD), rel=1e-7)
    found = optimizer.read_rows(np.arange(ROWS)).numpy().tobytes()
    optimizer.close()
    assert found == trained_weights(tmp_path / "whole", 6)


def test_what_can_not_be_made_up_for_is_refused(tmp_path):
    def refused(match, **options):
        with pytest.raises(ValueError, match=match):
            explicit(tmp_path / "none", **options)
        assert not (tmp_path / "none" / "dsa.json").exists()

    refused("weight_decay_mode='l2' is no decay that a row could make up for", weight_decay_mode="l2")
    refused("weight_decay_mode='none' is no decay", weight_decay_mode="none", weight_decay=0.0)
    refused(r"weight_decay=10\.0 with lr=0\.1 takes 1\.0 of a weight", weight_decay=10.0)
    refused("does not go with second_moment='row'", second_moment="row")
    with pytest.raises(ValueError, match=r"'catch_up_adam' .* works in flat space only, and k=1\.0"):
        dsa.DiskSparseRiemannianAdam(
            {"entity": init.Normal(ROWS, DIM)},
            disk_dir=tmp_path / "ball",
            weight_decay_mode="decoupled",
            weight_decay_catch_up=True,
        )
    plain = torch.nn.Embedding(ROWS, DIM, sparse=True)
    with pytest.raises(ValueError, match="weights are a parameter in memory, which is read as it is"):
        dsa.DiskSparseAdam(
            plain.parameters(),
            state_dir=tmp_path / "memory",
            weight_decay_mode="decoupled",
            weight_decay_catch_up=True,
        )


def test_a_step_that_is_refused_takes_nothing_of_a_weight(tmp_path):
    with explicit(tmp_path) as optimizer:
        optimizer.step({"entity": batch_of(0)})
        before = optimizer.read_rows(np.arange(ROWS)).numpy().tobytes()
        rows, grad = batch_of(1)
        grad[-1] = np.inf
        with pytest.raises(GradientError):
            optimizer.step({"entity": (rows, grad)})
        assert optimizer.read_rows(np.arange(ROWS)).numpy().tobytes() == before


@pytest.mark.parametrize(
    "described",
    [
        {"decay": -1.0},
        {"decay": "0.1x"},
        {"decay": None},
        {"decay": math.nan},
        {"decay": math.inf},
        {"added": [[5, 9.0]]},
        {"added": [[5, math.nan]]},
        {"added": [5]},
        {"added": None},
    ],
)
def test_a_description_of_no_decay_is_damage(tmp_path, described):
    trained_weights(tmp_path, 3)
    stored = read_metadata(tmp_path)
    stored.tables[0] |= described
    write_metadata(tmp_path, stored)
    for look in (lambda: explicit(tmp_path, resume=True), lambda: dsa.open_state(tmp_path)):
        with pytest.raises(StateCorruptError, match=r"the description of table 'entity' in .* can't be read"):
            look()


@pytest.mark.parametrize(
    "described", [{"decay": 0.0}, {"added": [[5, 0.0]]}, {"decay": "x"}, {"decay": None}]
)
def test_another_decay_in_a_checkpoint_is_noticed(tmp_path, described):
    with explicit(tmp_path / "s") as optimizer:
        optimizer.step({"entity": batch_of(0)})
        optimizer.export_checkpoint(tmp_path / "c")
    group = zarr.open_group(tmp_path / "c", mode="r+")["entity"]
    assert set(described) <= set(group.attrs)
    group.attrs.update(described)
    with pytest.raises(CheckpointError):
        dsa.open_checkpoint(tmp_path / "c")


def test_a_rate_that_takes_all_is_refused_in_the_step_that_has_it(tmp_path):
    with explicit(tmp_path) as optimizer:
        optimizer.step({"entity": batch_of(0)})
        before = optimizer.read_rows(np.arange(ROWS))
        optimizer.param_groups[0]["lr"] = 4.0
        with pytest.raises(ValueError, match=r"weight_decay=0\.3 with lr=4\.0 takes"):
            optimizer.step({"entity": batch_of(1)})
        assert optimizer.global_step == 1
        assert torch.equal(optimizer.read_rows(np.arange(ROWS)), before)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step({"entity": batch_of(1)})
        assert torch.equal(optimizer.read_rows(np.arange(ROWS)), before)


def test_another_rule_is_refused_by_name(tmp_path):
    embedding = make(tmp_path / "a", state="adam")
    with pytest.raises(
        StateMismatchError, match=r"'adam' .* computes 'catch_up_adam' .weight_decay_catch_up"
    ):
        adam(embedding)
    embedding.close()
    trained_weights(tmp_path / "b", 2)
    with pytest.raises(StateMismatchError, match=r"'catch_up_adam' .weight_decay_catch_up=True. .* 'adam'"):
        explicit(tmp_path / "b", weight_decay_catch_up=False, resume=True)
