"""`DiskSparseRiemannianAdam` as its users call it: sources, steps, reads, schedulers, tables of errors."""

import copy
import inspect
import math
import os
import pickle
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
import zarr
from current_files import record_checksum, table_file

import dsa
from dsa import DiskSparseRiemannianAdam, conventions, init
from dsa.backends import Memmap
from dsa.errors import (
    CorruptRowError,
    DSAError,
    GradientError,
    RowIndexError,
    RowTypeError,
    StateClosedError,
    StateWarning,
)

ROWS, DIM = 12, 3


def build(path, tables=None, **options):
    options = {"lr": 0.1, "k": 0.0} | options
    return DiskSparseRiemannianAdam(tables or {"entity": init.Zeros(ROWS, DIM)}, disk_dir=path, **options)


@pytest.fixture
def optimizer(tmp_path):
    with build(tmp_path / "state") as optimizer:
        yield optimizer


def ones(count, dim=DIM):
    return np.ones((count, dim), np.float32)


def raw(path):
    """The bytes of every table of a directory as they are in the files."""
    return {file.name: file.read_bytes()[4096:] for file in sorted(Path(path).glob("*.dsa"))}


def fields(path, name, rows, dim):
    """Decode the records of a closed table: w, m, v, t, s per row, packed or padded."""
    words = np.fromfile(table_file(path, name), np.int32, offset=4096).reshape(rows, -1)
    w, m, v = (words[:, dim * i : dim * (i + 1)].view(np.float32) for i in range(3))
    return w, m, v, words[:, 3 * dim], words[:, 3 * dim + 1]


# ---------------------------------------------------------------- where tables come from

WEIGHTS = np.random.default_rng(0).uniform(-0.1, 0.1, (ROWS, DIM))


def memmap(path):
    array = np.memmap(path / "weights.f32", np.float32, "w+", shape=WEIGHTS.shape)
    array[:] = WEIGHTS
    return array


def zarr_array(path):
    array = zarr.create_array(path / "weights.zarr", shape=WEIGHTS.shape, chunks=(5, 2), dtype="float64")
    array[:] = WEIGHTS
    return array


SOURCES = {
    "tensor": lambda path: torch.from_numpy(WEIGHTS),
    "float32 tensor": lambda path: torch.from_numpy(WEIGHTS).float(),
    "half tensor": lambda path: torch.from_numpy(WEIGHTS).half(),
    "bfloat16 tensor": lambda path: torch.from_numpy(WEIGHTS).bfloat16(),
    "parameter": lambda path: torch.nn.Parameter(torch.from_numpy(WEIGHTS)),
    "embedding": lambda path: torch.nn.Embedding.from_pretrained(torch.from_numpy(WEIGHTS)).weight,
    "transposed tensor": lambda path: torch.from_numpy(WEIGHTS.T.copy()).t(),
    "numpy": lambda path: WEIGHTS,
    "numpy of float16": lambda path: WEIGHTS.astype(np.float16),
    "Fortran order": lambda path: np.asfortranarray(WEIGHTS),
    "big endian": lambda path: WEIGHTS.astype(">f8"),
    "reversed": lambda path: WEIGHTS[::-1],
    "read only": lambda path: np.broadcast_to(WEIGHTS[0], WEIGHTS.shape),
    "memmap": memmap,
    "zarr": zarr_array,
    "FromArray": lambda path: init.FromArray(WEIGHTS),
    "FromArray of zarr": lambda path: init.FromArray(zarr_array(path)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_weights_from_an_array(tmp_path, kind):
    source = SOURCES[kind](tmp_path)
    array = source.array if isinstance(source, init.FromArray) else source
    values = (
        array[:].detach().float().numpy()
        if isinstance(array, torch.Tensor)
        else np.asarray(array[:], np.float32)
    )
    with build(tmp_path / "state", {"entity": source}) as optimizer:
        rows = optimizer.read_rows(torch.arange(ROWS))
        assert rows.dtype == torch.float32
        assert rows.numpy().tobytes() == values.tobytes()
        optimizer.step({"entity": ([0], ones(1))})
    if isinstance(array, torch.Tensor):
        assert array[:].detach().float().numpy().tobytes() == values.tobytes(), (
            "the caller's array was changed"
        )


@pytest.mark.parametrize(
    "rule", [init.Normal(ROWS, DIM, 0.1, seed=7), init.Uniform(ROWS, DIM, -0.2, 0.1, seed=7)]
)
def test_weights_from_a_rule(tmp_path, rule):
    expected = np.empty((ROWS, DIM), np.float32)
    rule.fill(np.arange(ROWS), expected)
    with build(tmp_path / "state", {"entity": rule}) as optimizer:
        optimizer.step({"entity": ([5], np.zeros((1, DIM), np.float32))})
        assert optimizer.read_rows([4]).numpy().tobytes() == expected[4:5].tobytes()
        assert optimizer.read_rows(range(ROWS)).numpy().tobytes() == expected.tobytes()


def test_tables_in_a_list_are_numbered(tmp_path):
    with build(tmp_path, [torch.zeros(3, 2), init.Zeros(4, 1)]) as optimizer:
        optimizer.step({"param_1": ([3], ones(1, 1))})
        assert optimizer.read_rows([3], "param_1").tolist() == [[pytest.approx(-0.1)]]
        assert optimizer.read_rows([2], "param_0").tolist() == [[0.0, 0.0]]
        assert optimizer.param_groups[0]["names"] == ["param_0", "param_1"]


def test_a_tuple_of_tables(tmp_path):
    with build(tmp_path, (torch.zeros(3, 2),)) as optimizer:
        assert optimizer.read_rows([1]).shape == (1, 2)


@pytest.mark.parametrize("k", [2, np.float32(2.0), np.int64(2), torch.tensor(2.0), {"entity": 2}])
def test_kinds_of_curvature(tmp_path, k):
    with build(tmp_path, {"entity": torch.full((2, 2), 0.1)}, k=k) as optimizer:
        assert "k=2" in repr(optimizer)
        optimizer.step({"entity": ([0], ones(1, 2))})
    with build(tmp_path, {"entity": torch.full((2, 2), 0.1)}, k=k, resume=True):
        pass


def test_a_curvature_for_each_table(tmp_path):
    tables = {
        "flat": torch.full((2, 2), 5.0),
        "ball": torch.full((2, 2), 0.1),
        "small": torch.full((2, 2), 0.01),
    }
    with build(tmp_path, tables, k={"flat": 0.0, "small": 100.0, "ball": 1.0}) as optimizer:
        assert "flat: 2 x 2, k=0; " not in repr(optimizer)
        assert "flat: 2 x 2, k=0, ball: 2 x 2, k=1, small: 2 x 2, k=100" in repr(optimizer)
        assert optimizer.read_rows([0], "flat").tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("k", [0.25, 1.0, 9.0])
def test_fresh_rows_stay_within_a_fraction_of_the_ball(tmp_path, fraction, k):
    radius = 1.0 / math.sqrt(k)
    array = np.random.default_rng(1).standard_normal((ROWS, DIM)) * 3.0
    with pytest.warns(
        StateWarning, match="the longest row of table 'entity' has norm .* scaled by"
    ) as caught:
        optimizer = build(tmp_path / "array", {"entity": array}, k=k, init_max_norm_fraction=fraction)
    assert [warning.filename for warning in caught] == [__file__]
    longest = np.linalg.norm(array, axis=1).max()
    with optimizer:
        weights = optimizer.read_rows(range(ROWS)).numpy()
        np.testing.assert_allclose(weights, array * (fraction * radius / longest), rtol=2e-5)
        assert np.linalg.norm(weights.astype(np.float64), axis=1).max() < radius
    rule = init.Normal(ROWS, DIM, std=2.0, seed=1)
    drawn = np.empty((ROWS, DIM), np.float32)
    rule.fill(np.arange(ROWS), drawn)
    with build(tmp_path / "rule", {"entity": rule}, k=k, init_max_norm_fraction=fraction) as optimizer:
        weights = optimizer.read_rows(range(ROWS)).numpy()
    norms = np.linalg.norm(drawn, axis=1, keepdims=True)
    np.testing.assert_allclose(weights, drawn * np.minimum(1.0, fraction * radius / norms), rtol=2e-5)


def test_flat_tables_and_short_rows_are_not_scaled(tmp_path):
    array = np.array([[30.0, 40.0], [0.0, 0.1]])
    with build(tmp_path / "flat", {"entity": array}, k=0.0) as optimizer:
        assert optimizer.read_rows([0, 1]).tolist() == array.astype(np.float32).tolist()
    with build(tmp_path / "ball", {"entity": array / 100.0}, k=1.0) as optimizer:
        assert optimizer.read_rows([0, 1]).tolist() == (array / 100.0).astype(np.float32).tolist()


def test_retain_params(tmp_path):
    weights = torch.zeros(4, 2, requires_grad=True)
    with build(tmp_path / "kept", {"entity": weights}, retain_params=True) as optimizer:
        (kept,) = optimizer.param_groups[0]["params"]
        assert kept.data_ptr() == weights.data_ptr()
        optimizer.step({"entity": ([0], ones(1, 2))})
        assert not weights.any(), "the disk has the weights; the caller's tensor is not written"
    with build(tmp_path / "freed", {"entity": weights}) as optimizer:
        (placeholder,) = optimizer.param_groups[0]["params"]
        assert placeholder.numel() == 0
    with (
        pytest.warns(StateWarning, match="retain_params=True keeps nothing") as caught,
        build(tmp_path / "rule", retain_params=True) as optimizer,
    ):
        assert optimizer.param_groups[0]["params"][0].numel() == 0
    assert [warning.filename for warning in caught] == [__file__]


# ---------------------------------------------------------------- stepping


def test_a_step_touches_the_rows_of_its_batch(tmp_path):
    with build(tmp_path / "state") as optimizer:
        optimizer.step({"entity": ([7, 2], ones(2))})
        optimizer.step({"entity": ([7], ones(1))})
        assert optimizer.global_step == 2
    w, m, v, t, s = fields(tmp_path / "state", "entity", ROWS, DIM)
    assert t.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 0]
    assert s.tolist() == [0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 0]
    assert np.flatnonzero(w.any(axis=1)).tolist() == [2, 7]
    np.testing.assert_allclose(m[[2, 7], 0], [0.1, 0.19], rtol=1e-6)
    np.testing.assert_allclose(v[[2, 7], 0], [1e-3, 1.999e-3], rtol=1e-6)


def test_duplicates_are_one_update(tmp_path):
    grad = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, -1.0], [1.0, 1.0, 1.0]], np.float32)
    with build(tmp_path / "one") as optimizer:
        optimizer.step({"entity": ([5, 5, 1], grad)})
    with build(tmp_path / "two") as optimizer:
        optimizer.step({"entity": ([1, 5], np.stack([grad[2], grad[0] + grad[1]]))})
    assert raw(tmp_path / "one") == raw(tmp_path / "two")
    assert fields(tmp_path / "one", "entity", ROWS, DIM)[3][[1, 5]].tolist() == [1, 1]


INDICES = {
    "list": lambda rows: list(rows),
    "tuple": lambda rows: tuple(rows),
    "range": lambda rows: range(min(rows), max(rows) + 1, max(rows) - min(rows)),
    "int64 tensor": lambda rows: torch.tensor(rows),
    "int32 tensor": lambda rows: torch.tensor(rows, dtype=torch.int32),
    "int16 tensor": lambda rows: torch.tensor(rows, dtype=torch.int16),
    "uint8 tensor": lambda rows: torch.tensor(rows, dtype=torch.uint8),
    "int64": lambda rows: np.array(rows),
    "int32": lambda rows: np.array(rows, np.int32),
    "uint64": lambda rows: np.array(rows, np.uint64),
    "strided": lambda rows: np.array([rows[0], -1, rows[1], -1])[::2],
}
GRADIENTS = {
    "list": lambda grad: grad.tolist(),
    "tensor": torch.from_numpy,
    "needs grad": lambda grad: torch.from_numpy(grad).requires_grad_(),
    "double": lambda grad: torch.from_numpy(grad).double(),
    "half": lambda grad: torch.from_numpy(grad).half(),
    "bfloat16": lambda grad: torch.from_numpy(grad).bfloat16(),
    "transposed": lambda grad: torch.from_numpy(grad.T.copy()).t(),
    "numpy": lambda grad: grad,
    "float64": lambda grad: grad.astype(np.float64),
    "float16": lambda grad: grad.astype(np.float16),
    "Fortran order": np.asfortranarray,
    "big endian": lambda grad: grad.astype(">f4"),
}


def step_with(path, indices, grad, **options):
    with build(path, {"entity": torch.full((ROWS, DIM), 0.25)}, **options) as optimizer:
        for _ in range(2):
            optimizer.step({"entity": (indices, grad)})
    return raw(path)


@pytest.mark.parametrize("k", [0.0, 1.0])
def test_every_kind_of_batch_gives_the_same_bytes(tmp_path, k):
    rows, grad = [2, 9], np.array([[1.0, -2.0, 0.5], [0.25, 8.0, -1.0]], np.float32)
    expected = step_with(tmp_path / "expected", np.array(rows), grad, k=k)
    for kind, make in INDICES.items():
        assert step_with(tmp_path / f"rows {kind}", make(rows), grad, k=k) == expected, kind
    for kind, make in GRADIENTS.items():
        assert step_with(tmp_path / f"grad {kind}", rows, make(grad), k=k) == expected, kind


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_tensors_on_a_gpu(tmp_path):
    rows, grad = torch.tensor([2, 9, 2]), torch.randn(3, DIM)
    expected = step_with(tmp_path / "cpu", rows, grad, k=1.0)
    assert step_with(tmp_path / "gpu", rows.cuda(), grad.cuda(), k=1.0) == expected
    assert step_with(tmp_path / "mixed", rows, grad.cuda(), k=1.0) == expected
    with build(tmp_path / "source", {"entity": torch.zeros(3, 2, device="cuda")}) as optimizer:
        assert optimizer.read_rows(torch.tensor([1], device="cuda")).device.type == "cpu"


def test_the_batch_belongs_to_the_caller(tmp_path):
    """Nothing writes into what was handed over, and changing it afterwards changes nothing."""
    results = []
    for spoil in (False, True):
        rows, grad = np.arange(ROWS), np.full((ROWS, DIM), 0.5, np.float32)
        path = tmp_path / str(spoil)
        with build(path, weight_decay=0.1, k=1.0) as optimizer:
            for _ in range(3):
                optimizer.step({"entity": (rows, grad)})
                assert rows.tolist() == list(range(ROWS))
                assert (grad == 0.5).all()
                if spoil:
                    rows[:], grad[:] = 0, np.nan
                    rows, grad = np.arange(ROWS), np.full((ROWS, DIM), 0.5, np.float32)
        results.append(raw(path))
    assert results[0] == results[1]


def test_what_may_not_be_written_may_be_read(tmp_path):
    rows, grad = np.arange(ROWS), np.full((ROWS, DIM), 0.5, np.float32)
    for array in (rows, grad):
        array.setflags(write=False)
    for k in (0.0, 1.0):
        with build(tmp_path / str(k), k=k, weight_decay=0.1) as optimizer:
            optimizer.step({"entity": (rows, grad)})
            optimizer.read_rows(rows)


@pytest.mark.parametrize("durability", ["process", "power", "none"])
@pytest.mark.parametrize("empty", [[], np.empty(0, np.int64), torch.empty(0, dtype=torch.int32)])
def test_an_empty_batch(tmp_path, empty, durability):
    with build(tmp_path / "state", durability=durability) as optimizer:
        optimizer.step({"entity": ([1], ones(1))})
        optimizer.flush()
        before = raw(tmp_path / "state")
        optimizer.step({"entity": (empty, np.empty((0, DIM), np.float32))})
        optimizer.step({})
        assert optimizer.global_step == 3
        optimizer.flush()
        assert raw(tmp_path / "state") == before
        assert optimizer.read_rows(empty).shape == (0, DIM)
        assert optimizer.read_rows(empty).dtype == torch.float32


def test_a_table_that_is_left_out_does_not_change(tmp_path):
    with build(tmp_path, [init.Zeros(3, 2), init.Zeros(3, 2)]) as optimizer:
        optimizer.step({"param_0": ([0], ones(1, 2))})
        assert not optimizer.read_rows(range(3), "param_1").any()


def test_per_row_and_per_parameter_counters(tmp_path):
    """C06: a row first met at the thousandth step."""
    for convention, expected in (
        ({}, -0.00099999999),
        ({"bias_correction": "parameter"}, -0.00251456592),
        ({"convention": conventions.TORCH_SPARSE_ADAM}, -0.00251456592),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        with build(path, {"entity": init.Zeros(2, 1)}, lr=1e-3, **convention) as optimizer:
            for _ in range(999):
                optimizer.step({"entity": ([0], ones(1, 1))})
            optimizer.step({"entity": ([1], ones(1, 1))})
            assert optimizer.read_rows([1]).item() == pytest.approx(expected, rel=1e-5)


def test_the_parameter_counter_survives_a_resume(tmp_path):
    tables = {"entity": init.Zeros(2, 1)}
    for resume in (None, True):
        with build(tmp_path, tables, lr=1e-3, bias_correction="parameter", resume=resume) as optimizer:
            for _ in range(5):
                optimizer.step({"entity": ([0], ones(1, 1))})
            if resume:
                optimizer.step({"entity": ([1], ones(1, 1))})
                hats = (0.1 / (1 - 0.9**11)) / math.sqrt(0.001 / (1 - 0.999**11))
                assert optimizer.read_rows([1]).item() == pytest.approx(-1e-3 * hats, rel=1e-5)


# C07: fresh rows, lr 1e-3, one gradient each
PLACEMENTS = [
    (conventions.TORCH_SPARSE_ADAM, (-0.00099999968, -0.00099684769, -0.00024025307, -3.1523e-6)),
    (conventions.DSA_ADAM, (-0.00099999999, -0.0009999, -0.00090909, -9.0909e-5)),
]


@pytest.mark.parametrize(("convention", "expected"), PLACEMENTS)
def test_where_epsilon_sits(tmp_path, convention, expected):
    with build(tmp_path, {"entity": init.Zeros(4, 1)}, lr=1e-3, convention=convention) as optimizer:
        optimizer.step({"entity": (range(4), np.array([[1.0], [1e-4], [1e-7], [1e-9]], np.float32))})
        assert optimizer.read_rows(range(4))[:, 0].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "touched", "expected"), [("l2", 1.0, 0.9), ("decoupled", 1.0, 0.89), ("decoupled", 0.0, 0.99)]
)
def test_weight_decay(tmp_path, mode, touched, expected):
    """C08: decay is lazy, so that the untouched row keeps its weight exactly."""
    with build(tmp_path, {"entity": torch.ones(2, 1)}, weight_decay=0.1, weight_decay_mode=mode) as optimizer:
        optimizer.step({"entity": ([0], np.full((1, 1), touched, np.float32))})
        assert optimizer.read_rows([0]).item() == pytest.approx(expected, rel=1e-6)
        assert optimizer.read_rows([1]).item() == 1.0


@pytest.mark.parametrize("mode", ["l2", "decoupled"])
def test_weight_decay_on_the_ball_pulls_to_the_origin(tmp_path, mode):
    weights = torch.tensor([[0.3, 0.0], [0.3, 0.0]])
    with build(
        tmp_path, {"entity": weights}, k=1.0, lr=0.01, weight_decay=0.5, weight_decay_mode=mode
    ) as optimizer:
        for _ in range(5):
            optimizer.step({"entity": ([0], np.zeros((1, 2), np.float32))})
        pulled, kept = optimizer.read_rows([0, 1]).tolist()
    assert 0.0 <= pulled[0] < 0.3
    assert kept == pytest.approx([0.3, 0.0])


@pytest.mark.parametrize("mode", ["l2", "decoupled"])
def test_flat_steps_are_those_of_torch(tmp_path, mode):
    """Where the definitions coincide: every row in every step, against Adam and AdamW."""
    weights = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    parameter = torch.nn.Parameter(weights.clone())
    reference = (torch.optim.Adam if mode == "l2" else torch.optim.AdamW)(
        [parameter], lr=0.1, weight_decay=0.1
    )
    with build(tmp_path, {"entity": weights}, weight_decay=0.1, weight_decay_mode=mode) as optimizer:
        for step in range(20):
            grad = torch.randn(6, 2, generator=torch.Generator().manual_seed(step))
            parameter.grad = grad
            reference.step()
            optimizer.step({"entity": (torch.arange(6), grad)})
        torch.testing.assert_close(optimizer.read_rows(range(6)), parameter.data, rtol=2e-5, atol=2e-6)


# ---------------------------------------------------------------- reading


def test_rows_come_in_the_order_asked_for(tmp_path):
    with build(tmp_path, {"entity": torch.arange(12.0).reshape(4, 3) / 100}) as optimizer:
        rows = optimizer.read_rows(torch.tensor([3, 0, 3, 1]))
        assert (rows[:, 0] * 100).round().tolist() == [9.0, 0.0, 9.0, 3.0]
        rows.fill_(7.0)
        assert optimizer.read_rows([0])[0, 0] == 0.0
        assert rows.device.type == "cpu"
        assert not rows.requires_grad


def test_reading_writes_nothing(tmp_path):
    """C48: a hundred reads, of rows touched and untouched."""
    path = tmp_path / "state"
    with build(path, {"entity": init.Normal(1_000, DIM, seed=1)}, k=1.0) as optimizer:
        optimizer.step({"entity": ([5], ones(1))})
        optimizer.flush()
        before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()}
        for seed in range(100):
            optimizer.read_rows(np.random.default_rng(seed).integers(0, 1_000, 50))
        assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.iterdir()} == before


def test_rows_read_are_inside_the_ball(tmp_path):
    with build(
        tmp_path, {"entity": init.Normal(50, 2, seed=1)}, k=4.0, lr=3.0, second_moment="row"
    ) as optimizer:
        for seed in range(30):
            grad = np.random.default_rng(seed).standard_normal((50, 2))
            optimizer.step({"entity": (range(50), grad)})
            assert torch.linalg.vector_norm(optimizer.read_rows(range(50)).double(), dim=1).max() < 0.5


# ---------------------------------------------------------------- schedulers

SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "LambdaLR from zero": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, step / 4)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, 4),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(tmp_path, kind):
    """C10 in the explicit form: equal to torch.optim.Adam at every step, with every row in every batch."""
    weights = torch.linspace(-1, 1, 20).reshape(10, 2)
    parameter = torch.nn.Parameter(weights.clone())
    reference = torch.optim.Adam([parameter], lr=0.05)
    with build(tmp_path, {"entity": weights}, lr=0.05) as optimizer:
        assert isinstance(optimizer, torch.optim.Optimizer)
        ours, theirs = SCHEDULERS[kind](optimizer), SCHEDULERS[kind](reference)
        for step in range(10):
            grad = torch.randn(10, 2, generator=torch.Generator().manual_seed(step))
            parameter.grad = grad
            reference.step()
            optimizer.step({"entity": (torch.arange(10), grad)})
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
            assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"]
            torch.testing.assert_close(optimizer.read_rows(range(10)), parameter.data, rtol=1e-5, atol=1e-6)
            for scheduler in (ours, theirs):
                scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))


def test_c11_warm_up_from_zero(tmp_path):
    with build(tmp_path / "state", {"entity": init.Zeros(1, 1)}, lr=0.1) as optimizer:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
        seen = []
        for _ in range(3):
            optimizer.step({"entity": ([0], ones(1, 1))})
            seen.append(optimizer.read_rows([0]).item())
            scheduler.step()
    assert seen[0] == 0.0
    assert seen[1:] == pytest.approx([-0.05, -0.15], abs=2e-7)
    _, m, _, t, _ = fields(tmp_path / "state", "entity", 1, 1)
    assert m[0, 0] == pytest.approx(0.271)
    assert t[0] == 3


def test_every_hyper_parameter_of_the_group_is_read(tmp_path):
    group = {"lr": 0.02, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.3}
    with build(tmp_path / "set", {"entity": torch.ones(3, 2)}) as optimizer:
        optimizer.param_groups[0].update(group)
        optimizer.step({"entity": ([1], ones(1, 2))})
    options = {"lr": 0.02, "beta1": 0.5, "beta2": 0.8, "eps": 1e-3, "weight_decay": 0.3}
    with build(tmp_path / "made", {"entity": torch.ones(3, 2)}, **options) as optimizer:
        optimizer.step({"entity": ([1], ones(1, 2))})
    assert raw(tmp_path / "set") == raw(tmp_path / "made")


def test_a_rate_that_is_a_tensor(tmp_path):
    with build(tmp_path, lr=torch.tensor(0.5)) as optimizer:
        optimizer.step({"entity": ([1], ones(1))})
        assert optimizer.read_rows([1])[0, 0].item() == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -0.1),
        ("lr", math.nan),
        ("lr", math.inf),
        ("betas", (1.0, 0.9)),
        ("eps", 0.0),
        ("weight_decay", -1.0),
    ],
)
def test_a_scheduler_that_goes_astray(tmp_path, key, value):
    with build(tmp_path / "state") as optimizer:
        optimizer.step({"entity": ([1], ones(1))})
        optimizer.flush()
        before = raw(tmp_path / "state")
        good, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
        with pytest.raises(ValueError, match="is out of range"):
            optimizer.step({"entity": ([1], ones(1))})
        optimizer.param_groups[0][key] = good
        optimizer.flush()
        assert raw(tmp_path / "state") == before
        assert optimizer.global_step == 1
        optimizer.step({"entity": ([1], ones(1))})


def test_the_rest_of_the_optimizer_contract(optimizer):
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step({"entity": ([1], ones(1))})
    optimizer.zero_grad()
    assert calls == ["after"]
    assert optimizer.defaults == {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    with pytest.raises(NotImplementedError, match="resume=True"):
        optimizer.state_dict()
    with pytest.raises(NotImplementedError, match="resume=True"):
        optimizer.load_state_dict({})
    with pytest.raises(ValueError, match="fixed when it is made"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
    assert len(optimizer.param_groups) == 1


# ---------------------------------------------------------------- the table of errors: construction

WRONG_OPTIONS = [
    ({"lr": -1e-3}, ValueError, r"lr=-0.001 is out of range"),
    ({"lr": math.nan}, ValueError, "lr=nan is out of range"),
    ({"lr": math.inf}, ValueError, "lr=inf is out of range"),
    ({"lr": "0.1"}, TypeError, None),
    ({"beta1": 1.0}, ValueError, r"beta1=1.0 is out of range: pass a number in \[0, 1\)"),
    ({"beta1": -0.1}, ValueError, "beta1=-0.1 is out of range"),
    ({"beta2": 1.0}, ValueError, "beta2=1.0 is out of range"),
    ({"beta2": math.nan}, ValueError, "beta2=nan is out of range"),
    ({"eps": 0.0}, ValueError, "eps=0.0 is out of range: pass a finite number > 0"),
    ({"eps": -1e-8}, ValueError, "eps=-1e-08"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1 is out of range"),
    (
        {"weight_decay_mode": "L2"},
        ValueError,
        r"weight_decay_mode='L2' is not known: use one of \('l2', 'decoupled', 'unscaled', 'none'\)",
    ),
    ({"k": -1.0}, ValueError, "k=-1.0 is not the curvature of a ball"),
    ({"k": math.nan}, ValueError, "k=nan"),
    ({"k": math.inf}, ValueError, "k=inf"),
    ({"k": {"entity": -1.0}}, ValueError, "k=-1.0"),
    ({"k": {}}, ValueError, r"k names the tables \[\] but the tables are \['entity'\]"),
    ({"k": {"entity": 1.0, "other": 1.0}}, ValueError, r"k names the tables \['entity', 'other'\]"),
    ({"k": {"Entity": 1.0}}, ValueError, r"k names the tables \['Entity'\]"),
    ({"k": {0: 1.0}}, ValueError, r"k names the tables \[0\]"),
    ({"k": None}, TypeError, None),
    ({"init_max_norm_fraction": 0.0}, ValueError, "init_max_norm_fraction=0.0 is out of range"),
    ({"init_max_norm_fraction": 1.01}, ValueError, "init_max_norm_fraction=1.01"),
    ({"init_max_norm_fraction": math.nan}, ValueError, "init_max_norm_fraction=nan"),
    ({"second_moment": "rows"}, ValueError, "second_moment='rows' is not known"),
    ({"second_moment": ["row"]}, ValueError, "second_moment"),
    ({"v_transport": "root"}, ValueError, "v_transport='root' is not known"),
    ({"bias_correction": "table"}, ValueError, "bias_correction='table' is not known"),
    (
        {"weight_decay": 0.1, "convention": conventions.TORCH_SPARSE_ADAM},
        ValueError,
        "weight_decay=0.1 would have no effect",
    ),
    ({"convention": "torch"}, TypeError, "convention='torch'"),
    ({"max_step": 0.0, "k": 1.0}, ValueError, "max_step=0.0 is out of range"),
    ({"max_step": math.nan, "k": 1.0}, ValueError, "max_step=nan"),
    (
        {"max_step": 0.5, "k": 0.0},
        ValueError,
        "max_step=0.5 is a length on the ball, but every table has k=0",
    ),
    ({"backend": "mmap"}, ValueError, "backend='mmap' is not known: pass 'memmap'"),
    ({"backend": None}, ValueError, "backend=None is not known"),
    ({"backend": Memmap(stride=10)}, ValueError, "stride=10 can't hold records of 48 bytes"),
    ({"backend": Memmap(stride=46)}, ValueError, "stride=46"),
    ({"backend": Memmap(stride=True)}, ValueError, "stride=True"),
    ({"backend": Memmap(stride="wide")}, ValueError, "stride='wide'"),
    ({"allocate": "lazy"}, ValueError, "allocate='lazy' is not known: use 'reserve' or 'sparse'"),
    ({"tables": {}}, ValueError, "params holds no table"),
    ({"tables": []}, ValueError, "params holds no table"),
    ({"tables": torch.zeros(3, 2)}, TypeError, "params is a Tensor: pass a dict .* or a list"),
    ({"tables": (table for table in [torch.zeros(3, 2)])}, TypeError, "params is a generator"),
    ({"tables": "entity"}, TypeError, "params is a str"),
    ({"tables": None}, TypeError, "params is a NoneType"),
    ({"tables": {"": torch.zeros(3, 2)}}, ValueError, "'' is not a table's name"),
    ({"tables": {0: torch.zeros(3, 2)}}, ValueError, "0 is not a table's name"),
    ({"tables": {"entity": [[1.0, 2.0]]}}, TypeError, "'list' is not an array"),
    ({"tables": {"entity": None}}, TypeError, "'NoneType' is not an array"),
    ({"tables": {"entity": init.Zeros}}, TypeError, "is not an array"),
    ({"tables": {"entity": torch.zeros(3)}}, ValueError, r"shape \(3,\) and is no table: reshape"),
    ({"tables": {"entity": torch.zeros(2, 3, 4)}}, ValueError, r"shape \(2, 3, 4\)"),
    ({"tables": {"entity": torch.zeros(0, 3)}}, ValueError, r"shape \(0, 3\)"),
    ({"tables": {"entity": torch.zeros(3, 0)}}, ValueError, r"shape \(3, 0\)"),
    ({"tables": {"entity": torch.zeros(3, 2, dtype=torch.int64)}}, TypeError, r"holds torch.int64"),
    ({"tables": {"entity": np.zeros((3, 2), complex)}}, TypeError, "holds complex128"),
    ({"tables": {"entity": np.zeros((3, 2), object)}}, TypeError, "holds object"),
    ({"tables": {"entity": torch.zeros(3, 2, device="meta")}}, ValueError, "meta device"),
    ({"tables": {"entity": torch.zeros(3, 2).to_sparse()}}, TypeError, "layout torch.sparse_coo"),
    ({"tables": {"entity": torch.tensor([[1.0], [math.nan]])}}, ValueError, "row 1 of the array holds nan"),
    ({"tables": {"entity": np.array([[1e39]])}}, ValueError, "row 0 of the array holds inf"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG_OPTIONS)
def test_options_that_are_refused(tmp_path, options, error, match):
    """The right type, the right words, and no trace of the attempt but for the empty directory."""
    options = dict(options)
    tables = options.pop("tables", {"entity": init.Zeros(3, 3)})
    with pytest.raises(error, match=match):
        DiskSparseRiemannianAdam(tables, disk_dir=tmp_path / "state", **options)
    left = list((tmp_path / "state").iterdir()) if (tmp_path / "state").exists() else []
    assert [file.name for file in left if file.name != "dsa.lock"] == []


# ---------------------------------------------------------------- the table of errors: steps and reads

WRONG_STEPS = [
    (
        {"other": ([0], ones(1))},
        KeyError,
        r"there is no table 'other': name one of \['entity', 'other one'\]",
    ),
    ({None: ([0], ones(1))}, KeyError, "a table has to be named"),
    (
        {"entity": ([-1], ones(1))},
        RowIndexError,
        "index -1 is outside table 'entity', whose rows are 0 to 11",
    ),
    ({"entity": ([12], ones(1))}, RowIndexError, "index 12 is outside"),
    ({"entity": ([2**63], ones(1))}, RowIndexError, "index 9223372036854775808 is outside"),
    ({"entity": ([0, 2**40], ones(2))}, RowIndexError, "index 1099511627776 is outside"),
    ({"entity": ([2.0], ones(1))}, RowTypeError, "of dtype float64: pass integer row numbers"),
    ({"entity": (torch.tensor([2.0]), ones(1))}, RowTypeError, "of dtype float32"),
    ({"entity": ([True] * ROWS, ones(ROWS))}, RowTypeError, "a boolean mask"),
    ({"entity": (torch.ones(ROWS, dtype=torch.bool), ones(ROWS))}, RowTypeError, "a boolean mask"),
    ({"entity": ([[1, 2]], ones(2))}, RowTypeError, r"shape \(1, 2\)"),
    ({"entity": (3, ones(1))}, RowTypeError, r"shape \(\)"),
    ({"entity": (["1"], ones(1))}, RowTypeError, "dtype str"),
    ({"entity": (None, ones(1))}, RowTypeError, "dtype object"),
    ({"entity": ([1, 2], ones(3))}, GradientError, r"shape \(3, 3\) but 2 indices"),
    (
        {"entity": ([1], ones(1, 4))},
        GradientError,
        r"shape \(1, 4\) but 1 indices of a table with 3 elements",
    ),
    ({"entity": ([1], np.ones(3))}, GradientError, r"shape \(3,\)"),
    ({"entity": ([], ones(1))}, (GradientError, RowTypeError), "entity"),
    ({"entity": ([1], np.ones((1, 3), np.int32))}, RowTypeError, "gradient .* dtype int32"),
    ({"entity": ([1], torch.ones(1, 3, dtype=torch.int64))}, RowTypeError, "gradient .* dtype int64"),
    ({"entity": ([1], torch.ones(1, 3, dtype=torch.complex64))}, RowTypeError, "gradient .* dtype complex64"),
    ({"entity": ([1], None)}, RowTypeError, "gradient .* dtype object"),
    ({"entity": ([1, 2], np.array([[0.0] * 3, [0, math.nan, 0]]))}, GradientError, "in row 1 of the batch"),
    (
        {"entity": ([1], np.full((1, 3), math.inf))},
        GradientError,
        "in row 0 of the batch, which is row 1 of the table: nothing was changed",
    ),
    ({"entity": ([1], np.full((1, 3), 1e39))}, GradientError, "float32 can't represent"),
    ({"entity": ([1, 1], np.full((2, 3), 3e38))}, GradientError, "summed gradient of row 1"),
    ({"entity": ([1], np.full((1, 3), 1e30))}, GradientError, "the update of row 1 .* overflows float32"),
    ({"entity": [1]}, (TypeError, ValueError), "entity"),
    ({"entity": torch.tensor([1])}, (TypeError, ValueError), "entity"),
    ({"entity": ([1], ones(1), 3)}, (TypeError, ValueError), "entity"),
    ([("entity", ([1], ones(1)))], TypeError, "updates"),
    (None, TypeError, "updates"),
]


@pytest.mark.parametrize(("updates", "error", "match"), WRONG_STEPS)
def test_steps_that_are_refused(tmp_path, updates, error, match):
    """Also when a sound batch of another table comes with it: that one isn't stored either."""
    tables = {"entity": torch.full((ROWS, DIM), 0.1), "other one": torch.full((ROWS, DIM), 0.1)}
    with build(tmp_path, tables) as optimizer:
        optimizer.step({name: ([1], ones(1)) for name in tables})
        optimizer.flush()
        before = raw(tmp_path)
        if isinstance(updates, dict):
            updates = {"other one": ([2], ones(1)), **updates}
        with pytest.raises(error, match=match):
            optimizer.step(updates)
        optimizer.flush()
        assert raw(tmp_path) == before
        assert optimizer.global_step == 1
        optimizer.step({name: ([1], ones(1)) for name in tables})


def test_a_step_needs_its_updates(optimizer):
    with pytest.raises(TypeError, match="updates"):
        optimizer.step()


@pytest.mark.parametrize(
    ("current_k", "error"), [(-1.0, ValueError), (math.nan, ValueError), (math.inf, ValueError)]
)
def test_a_curvature_that_is_refused_by_a_step(tmp_path, current_k, error):
    with build(tmp_path, k=1.0) as optimizer:
        with pytest.raises(error, match="k"):
            optimizer.step({"entity": ([1], ones(1))}, current_k=current_k)
        assert optimizer.global_step == 0
        assert "k=1;" in repr(optimizer)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([-1],), RowIndexError, "index -1"),
        (([12],), RowIndexError, "index 12"),
        (([1.0],), RowTypeError, "float64"),
        (([True, False],), RowTypeError, "boolean mask"),
        (([[1]],), RowTypeError, r"shape \(1, 1\)"),
        ((1,), RowTypeError, r"shape \(\)"),
        (([1], "other"), KeyError, "there is no table 'other'"),
    ],
)
def test_reads_that_are_refused(optimizer, arguments, error, match):
    with pytest.raises(error, match=match):
        optimizer.read_rows(*arguments)


def test_a_name_is_needed_where_there_are_several(tmp_path):
    with build(tmp_path, [init.Zeros(3, 2), init.Zeros(3, 2)]) as optimizer:
        with pytest.raises(KeyError, match=r"a table has to be named: name one of \['param_0', 'param_1'\]"):
            optimizer.read_rows([0])
        assert optimizer.read_rows([0], "param_1").shape == (1, 2)


def test_every_error_of_ours_has_a_base_and_a_builtin():
    for name in dsa.errors.__all__:
        kind = getattr(dsa.errors, name)
        if (
            inspect.isclass(kind)
            and not issubclass(kind, Warning)
            and kind
            not in (
                DSAError,
                dsa.errors.StateError,
                dsa.errors.CheckpointError,
            )
        ):
            assert issubclass(kind, DSAError)
            builtin = next(
                base for base in kind.__mro__ if base.__module__ == "builtins" and base is not Exception
            )
            assert builtin not in (BaseException, object), f"{name} is caught by no builtin's name"


# ---------------------------------------------------------------- corrupt rows


def damage(path, row, field, value, *, sealed=True):
    """Write one number into a record of a closed table; field is the word's number in the record.

    The checksum is made to match, as if a program had stored the number, unless it is not `sealed`.
    """
    file = table_file(path, "entity")
    words = np.memmap(file, np.int32, "r+", offset=4096).reshape(ROWS, -1)
    words[row, field] = np.array([value], np.float32 if field < 3 * DIM else np.int32).view(np.int32)[0]
    if sealed:
        words[row, 3 * DIM + 2] = np.array([record_checksum(words[row, : 3 * DIM + 2])], np.uint32).view(
            np.int32
        )[0]
    words.base.flush()


FAULTS = [
    (0, math.nan, "field 'w' holds a number that is not finite"),
    (4, math.inf, "field 'm' holds a number that is not finite"),
    (6, math.nan, "field 'v' holds a number that is not finite"),
    (7, -1e-3, r"field 'v' holds -0.001\d*, a negative second moment"),
    (9, -5, "field 't' holds -5, a negative count"),
    (10, -1, "field 's' holds -1, a negative count"),
]


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("k", [0.0, 1.0])
@pytest.mark.parametrize(("field", "value", "match"), FAULTS)
def test_a_damaged_row_is_an_error_and_can_be_reset(tmp_path, field, value, match, k, sealed):
    """Whether a program has stored the number, or a disk has changed it."""
    if not sealed:
        match = "the checksum of its record does not match: it was torn by a loss of power or damaged"
    tables = {"entity": torch.full((ROWS, DIM), 0.1)}
    build(tmp_path, tables, k=k).close()
    damage(tmp_path, 5, field, value, sealed=sealed)
    with build(tmp_path, tables, k=k, resume=True) as optimizer:
        with pytest.raises(CorruptRowError, match=rf"row 5 of table 'entity' can't be used: {match}"):
            optimizer.read_rows([4, 5])
        with pytest.raises(CorruptRowError, match="reproject_all"):
            optimizer.step({"entity": ([4, 5, 6], ones(3))})
        assert optimizer.global_step == 0
        assert optimizer.read_rows([4, 6]).tolist() == [[pytest.approx(0.1)] * 3] * 2
        with pytest.warns(
            StateWarning, match="1 rows of table 'entity' held implausible values and were reset"
        ) as caught:
            optimizer.reproject_all()
        assert [warning.filename for warning in caught] == [__file__]
        assert optimizer.read_rows([5]).tolist() == [[0.0] * 3]
        optimizer.step({"entity": ([4, 5, 6], ones(3))})


def test_a_damaged_row_with_a_rule_starts_again_by_the_rule(tmp_path):
    tables = {"entity": init.Normal(ROWS, DIM, 0.1, seed=1)}
    with build(tmp_path, tables) as optimizer:
        fresh = optimizer.read_rows([5])
        optimizer.step({"entity": ([5], ones(1))})
    damage(tmp_path, 5, 7, math.nan)
    with build(tmp_path, tables, resume=True) as optimizer:
        with pytest.warns(StateWarning, match="were reset"):
            assert optimizer.reproject_all("entity") == 0
        assert torch.equal(optimizer.read_rows([5]), fresh)


def test_a_counter_rests_at_its_last_value(tmp_path):
    tables = {"entity": torch.full((ROWS, DIM), 0.1)}
    build(tmp_path, tables).close()
    damage(tmp_path, 5, 9, 2**31 - 1)
    with build(tmp_path, tables, resume=True) as optimizer:
        before = optimizer.read_rows([5])
        optimizer.step({"entity": ([5], ones(1))})
        assert not torch.equal(optimizer.read_rows([5]), before)
        assert optimizer._state.tables["entity"].backend.read(np.array([5]))["t"].item() == 2**31 - 1


def test_a_damaged_row_keeps_the_curvature_as_it_is(tmp_path):
    """A step with `current_k` that fails has changed nothing, the curvature included."""
    tables = {"entity": torch.full((ROWS, DIM), 0.1)}
    build(tmp_path, tables, k=1.0).close()
    damage(tmp_path, 5, 0, math.nan)
    with build(tmp_path, tables, k=1.0, resume=True) as optimizer:
        optimizer.flush()
        before = raw(tmp_path)
        with pytest.raises(CorruptRowError, match="row 5"):
            optimizer.step({"entity": ([5], ones(1))}, current_k=4.0)
        with pytest.raises(CorruptRowError, match="row 5"):
            optimizer.set_curvature(4.0)
        assert "k=1;" in repr(optimizer)
        optimizer.flush()
        assert raw(tmp_path) == before


def test_rows_outside_the_ball_are_brought_back(tmp_path):
    tables = {"entity": torch.full((ROWS, DIM), 0.1)}
    build(tmp_path, tables, k=1.0).close()
    damage(tmp_path, 5, 0, 30.0)
    with build(tmp_path, tables, k=1.0, resume=True) as optimizer:
        assert torch.linalg.vector_norm(optimizer.read_rows([5]).double()) < 1.0
        assert optimizer.reproject_all() == 1
        assert optimizer.reproject_all() == 0
    w, *_ = fields(tmp_path, "entity", ROWS, DIM)
    assert np.linalg.norm(w[5].astype(np.float64)) < 1.0
    assert w[4].tolist() == np.full(DIM, 0.1, np.float32).tolist()


def test_reprojecting_one_table_of_two(tmp_path):
    with build(tmp_path, [torch.full((3, 2), 0.1)] * 2, k={"param_0": 1.0, "param_1": 0.0}) as optimizer:
        assert optimizer.reproject_all() == 0
        assert optimizer.reproject_all("param_1") == 0
        with pytest.raises(KeyError, match="no table 'x'"):
            optimizer.reproject_all("x")


# ---------------------------------------------------------------- closing, copying, forking


def test_closed_is_closed(tmp_path):
    optimizer = build(tmp_path)
    optimizer.step({"entity": ([1], ones(1))})
    optimizer.close()
    optimizer.close()
    optimizer.shutdown()
    for use in (
        lambda: optimizer.step({"entity": ([1], ones(1))}),
        lambda: optimizer.step({}),
        lambda: optimizer.read_rows([1]),
        lambda: optimizer.read_rows([]),
        lambda: optimizer.set_curvature(1.0),
        lambda: optimizer.reproject_all(),
        lambda: optimizer.flush(),
    ):
        with pytest.raises(StateClosedError, match="was closed: build the module or optimizer again"):
            use()
    assert optimizer.global_step == 1
    assert "step 1" in repr(optimizer)


def test_an_error_inside_with_closes_too(tmp_path):
    def fail():
        with build(tmp_path) as optimizer:
            optimizer.step({"entity": ([1], ones(1))})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with build(tmp_path, resume=True) as optimizer:
        assert optimizer.global_step == 1


@pytest.mark.parametrize(
    "copying",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda o: pickle.dumps(o, 0), lambda o: copy.deepcopy([o])],
)
def test_c15_copies_are_refused_with_advice(optimizer, copying):
    optimizer.step({"entity": ([1], ones(1))})
    with pytest.raises(
        TypeError, match=r"can't be copied or pickled,.* build a second optimizer on a directory of its own"
    ):
        copying(optimizer)
    optimizer.step({"entity": ([1], ones(1))})
    assert optimizer.global_step == 2
    assert optimizer.read_rows([1])[0, 0].item() == pytest.approx(-0.2)


FORK = """
import gc, os, sys, traceback
import numpy as np, torch
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import StateClosedError
torch.set_num_threads(2)
rows, grad = np.arange(4000), np.ones((4000, 2), np.float32)
here, there = sys.argv[1:]
optimizer = DiskSparseRiemannianAdam({"a": init.Zeros(4000, 2)}, lr=0.1, k=1.0, disk_dir=here)
optimizer.step({"a": (rows, grad)})
before = optimizer.read_rows(rows)
def work_in_child(ending):
    code = 1
    try:
        for use in (lambda: optimizer.step({"a": (rows, grad)}), lambda: optimizer.read_rows([0]),
                    lambda: optimizer.flush(), lambda: optimizer.set_curvature(2.0),
                    lambda: optimizer.reproject_all()):
            try:
                use()
            except StateClosedError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("a child may not do this")
        optimizer.close()
        optimizer.shutdown()
        with DiskSparseRiemannianAdam({"a": init.Zeros(4000, 2)}, lr=0.1, k=1.0,
                                      disk_dir=f"{there}-{ending.__name__}-{ending.__module__}") as own:
            own.step({"a": (rows, grad)})
            assert torch.equal(own.read_rows(rows), before)
        del own
        gc.collect()
        code = 0
    except BaseException:
        traceback.print_exc()
    ending(code)

for ending in (os._exit, sys.exit):  # at once, and with all that the interpreter does at its end
    child = os.fork()
    if child == 0:
        work_in_child(ending)
    assert os.waitpid(child, 0)[1] == 0
assert optimizer.global_step == 1
assert torch.equal(optimizer.read_rows(rows), before)
try:
    DiskSparseRiemannianAdam({"a": init.Zeros(4000, 2)}, lr=0.1, k=1.0, disk_dir=here, resume=True)
except BlockingIOError:
    pass
else:
    raise AssertionError("the child released its parent's lock")
optimizer.step({"a": (rows, grad)})
optimizer.close()
with DiskSparseRiemannianAdam({"a": init.Zeros(4000, 2)}, lr=0.1, k=1.0, disk_dir=here, resume=True) as again:
    assert again.global_step == 2
print("well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_c46_a_forked_child_holds_a_closed_copy(tmp_path):
    strict = "import warnings\nwarnings.simplefilter('error')\n"
    strict += "warnings.simplefilter('ignore', DeprecationWarning)\n"
    done = nursery.run(strict + FORK, tmp_path / "here", tmp_path / "there")
    assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
