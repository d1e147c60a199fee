"""The parameter that stands for a table: what may be asked of it, and what would compute with no weights."""

import copy

import numpy as np
import pytest
import torch
from layers import backward, row, step

from dsa import DiskEmbedding, init

ROWS, DIM = 100_000_000, 64
"""25.6 GB as a dense tensor."""


@pytest.fixture
def huge(make):
    return make.disk(ROWS, DIM, init=init.Normal(ROWS, DIM, seed=1), allocate="sparse")


def test_counting_and_printing(huge):
    model = torch.nn.Sequential(huge, torch.nn.Linear(DIM, 1))
    assert sum(parameter.numel() for parameter in model.parameters()) == ROWS * DIM + DIM + 1
    assert (
        sum(parameter.numel() * parameter.element_size() for parameter in huge.parameters()) == ROWS * DIM * 4
    )
    assert repr(huge).startswith(f"DiskEmbedding({ROWS}, {DIM}, table='embedding', state_dir=")
    wanted = f"DiskParameter('embedding': {ROWS} x {DIM} in "
    assert wanted in repr(huge.weight)
    assert wanted in str(list(model.parameters()))
    assert wanted in f"{huge.weight}"
    assert "DiskEmbedding" in str(model)


def test_what_trainers_ask(huge):
    weight = huge.weight
    assert isinstance(weight, torch.nn.Parameter)
    assert (weight.shape, weight.dtype, weight.device.type) == ((ROWS, DIM), torch.float32, "cpu")
    assert (weight.ndim, weight.dim(), weight.size(0), len(weight)) == (2, 2, ROWS, ROWS)
    assert weight.is_leaf
    assert weight.requires_grad
    assert weight.is_floating_point()
    assert not weight.is_sparse
    assert not weight.is_complex()
    assert weight.grad is None
    assert weight in {weight}
    assert weight in [weight]
    assert next(huge.parameters()) is weight
    assert dict(huge.named_parameters()) == {"weight": weight}


PENALISE, READ = "penalise or tie those instead", r"use weight\[ids\] to read rows"
DRAW, WRITE = "use init= of the layer", r"use the layer's set_rows\(ids, weights\) for some rows"
OPTIMIZE, DISTRIBUTE = "use dsa.DiskSparseAdam", "_set_params_and_buffers_to_ignore_for_model"

COMPUTATIONS = {
    "norm": (lambda weight: weight.norm(), PENALISE),
    "sum": (lambda weight: weight.sum(), PENALISE),
    "pow": (lambda weight: weight**2, PENALISE),
    "matmul": (lambda weight: torch.ones(1, ROWS) @ weight, PENALISE),
    "linear": (lambda weight: torch.nn.functional.linear(torch.ones(DIM), weight), PENALISE),
    "unbind": (list, READ),
    "detach": (lambda weight: weight.detach(), DISTRIBUTE),
    "clone": (lambda weight: weight.clone(), READ),
    "cpu": (lambda weight: weight.cpu(), READ),
    "tolist": (lambda weight: weight.tolist(), READ),
    "__array__": (np.asarray, READ),
    "zeros_like": (torch.zeros_like, OPTIMIZE),
    "isfinite": (torch.isfinite, PENALISE),
    "uniform_": (torch.nn.init.xavier_uniform_, DRAW),
    "normal_": (torch.nn.init.normal_, DRAW),
    "constant_": (lambda weight: torch.nn.init.constant_(weight, 1.0), DRAW),
    "kaiming_uniform_": (torch.nn.init.kaiming_uniform_, DRAW),
    "zero_": (lambda weight: weight.zero_(), DRAW),
    "new_tensor": (torch.nn.init.trunc_normal_, DRAW),
    "new_empty": (torch.nn.init.orthogonal_, DRAW),
    "eye": (torch.nn.init.eye_, DRAW),
    "copy_": (lambda weight: weight.copy_(torch.ones(DIM)), WRITE),
    "__setitem__": (lambda weight: weight.__setitem__(3, torch.ones(DIM)), WRITE),
    "view": (lambda weight: torch.nn.utils.parameters_to_vector([weight]), READ),
    "set data": (lambda weight: setattr(weight, "data", torch.zeros(2, 2)), WRITE),
    "set __setitem__ of data": (lambda weight: weight.data.__setitem__(3, torch.ones(DIM)), WRITE),
    "set normal_ of data": (lambda weight: weight.data.normal_(), DRAW),
    "set norm of data": (lambda weight: weight.data.norm(dim=1), PENALISE),
    "set normalize of data": (lambda weight: torch.nn.functional.normalize(weight.data), PENALISE),
    "set __truediv__ of data": (lambda weight: weight.data / 2, PENALISE),
    "set __rmul__ of data": (lambda weight: 2 * weight.data, PENALISE),
    "set __imul__ of data": (lambda weight: weight.data.__imul__(2), PENALISE),
    "set cpu of data": (lambda weight: weight.data.cpu(), READ),
    "T": (lambda weight: weight.T, PENALISE),
    "mT": (lambda weight: weight.mT, PENALISE),
    "H": (lambda weight: weight.H, PENALISE),
    "real": (lambda weight: weight.real, PENALISE),
}


@pytest.mark.parametrize("computation", COMPUTATIONS)
def test_computing_with_it_is_refused_with_advice_that_fits(huge, computation):
    name = computation.removeprefix("set ").removesuffix(" of data")
    called, advice = COMPUTATIONS[computation]
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=f"^{name!r} was called on .* table on disk.*: .*{advice}"),
    ):
        called(huge.weight)
    assert huge(torch.tensor([ROWS - 1])).shape == (1, DIM)


@pytest.mark.parametrize("method", ["SparseAdam", "Adam", "AdamW", "SGD", "Adagrad"])
def test_other_optimizers_fail_instead_of_doing_nothing(make, method):
    layer = make.disk(10, 4)
    before = row(layer, 1)
    backward(layer, [1])

    def work():
        getattr(torch.optim, method)(layer.parameters(), lr=0.1).step()

    with pytest.raises(RuntimeError, match=r"a table on disk|does not support sparse gradients"):
        work()
    assert row(layer, 1) == before


def test_torchs_clipping_takes_the_norm_of_rows_that_come_twice(make):
    layer = make.disk(10, 4)
    backward(layer, [1, 1])
    assert float(torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)) == 4.0
    assert torch.allclose(layer.weight.grad.coalesce().values(), torch.full((1, 4), 0.5))


@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_conversion_of_a_model_takes_no_memory(huge, convert):
    model = convert(torch.nn.Sequential(huge, torch.nn.Linear(DIM, 1)))
    assert model[0].weight is huge.weight
    assert huge.weight.dtype == model[1].weight.dtype
    assert huge(torch.tensor([1])).dtype == huge.weight.dtype
    assert huge.weight.shape == (ROWS, DIM)


def test_moving_to_the_meta_device_is_refused_and_leaves_the_layer_usable(make):
    layer = make.disk(10, 4, 0.5)
    with pytest.raises(
        (RuntimeError, NotImplementedError), match=r"'meta'.*table on disk|table on disk.*'meta'"
    ):
        layer.to("meta")
    assert row(layer, 1) == [0.5] * 4


def test_sharing_memory_does_nothing(make):
    layer, optimizer = make.pair("disk", 10, 4, 0.5)
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 1)).share_memory()
    assert model[1].weight.is_shared()
    step(layer, optimizer, [1])
    np.testing.assert_allclose(row(layer, 1), 0.4, rtol=1e-6)


def test_freezing(make):
    layer = make.disk(10, 4)
    assert layer.requires_grad_(False) is layer
    assert not layer(torch.tensor([1])).requires_grad
    layer.requires_grad_(True)
    backward(layer, [1])
    assert layer.weight.grad._nnz() == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_gradients_by_the_module(make, set_to_none):
    layer = make.disk(10, 4)
    backward(layer, [1])
    layer.zero_grad(set_to_none=set_to_none)
    assert layer.weight.grad is None if set_to_none else layer.weight.grad._nnz() == 0


def test_averaging_a_model_is_refused(make):
    """`swa_utils.AveragedModel` makes a deep copy."""
    with pytest.raises(
        TypeError, match=r"two owners would write to one directory; save the module's state_dict\(\)"
    ):
        torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(make.disk(10, 4)))
    with pytest.raises(TypeError, match="can't be copied"):
        copy.copy(make.disk(10, 4, where="other").weight)


def test_two_layers_can_share_one_table(make):
    first, second = make.disk(10, 4, name="first"), make.disk(10, 4, name="second")
    second.weight = first.weight
    model = torch.nn.ModuleList([first, second])
    assert list(model.parameters()) == [first.weight]
    optimizer = make.adam(model)
    (first(torch.tensor([1])).sum() + second(torch.tensor([1])).sum()).backward()
    assert first.weight.grad.to_dense()[1].tolist() == [2.0] * 4
    optimizer.step()
    assert row(second, 1) == row(first, 1)


CONSTRUCTIONS = [
    ({"num_embeddings": 0}, ValueError, "rows is 0"),
    ({"embedding_dim": -1}, ValueError, "dim is -1"),
    ({"padding_idx": 10}, ValueError, "padding_idx=10 is outside the table of 10 rows"),
    ({"padding_idx": -11}, ValueError, "padding_idx=-11 is outside"),
    ({"padding_idx": 1.5}, TypeError, "padding_idx=1.5"),
    ({"max_norm": -1.0}, ValueError, "max_norm=-1.0"),
    ({"max_norm": float("nan")}, ValueError, "max_norm=nan"),
    ({"max_norm": 1.0, "k": 1.0}, ValueError, "means nothing on a ball"),
    ({"scale_grad_by_freq": True}, ValueError, "does not exist for sparse gradients"),
    ({"sparse": False}, ValueError, "a gradient as large as the table"),
    ({"dtype": torch.int64}, (TypeError, ValueError), "int64"),
    ({"dtype": torch.complex64}, (TypeError, ValueError), "complex64"),
    ({"device": "meta"}, ValueError, "meta"),
    ({"name": ""}, ValueError, "a table's name can't be empty"),
    ({"init": init.Zeros(10, 3)}, ValueError, "init gives 10 x 3 but the module is 10 x 4"),
    ({"k": -1.0}, ValueError, "k"),
    ({"state": "adamax"}, ValueError, "state='adamax' is not known: use one of"),
    ({"init_max_norm_fraction": 0.0}, ValueError, "init_max_norm_fraction=0.0 is out of range"),
    ({"backend": "parquet"}, ValueError, "backend='parquet' is not known"),
    ({"allocate": "lazily"}, ValueError, "allocate='lazily' is not known"),
    ({"durability": "always"}, ValueError, "durability='always' is not known"),
    ({"resume": "auto"}, TypeError, "resume='auto' is not a choice"),
]


@pytest.mark.parametrize(("options", "error", "message"), CONSTRUCTIONS)
def test_what_cannot_be_is_refused_before_a_file_is_made(make, options, error, message):
    given = {"num_embeddings": 10, "embedding_dim": 4, "state_dir": make.directory(), **options}
    with pytest.raises(error, match=message):
        DiskEmbedding(**given)
    assert not make.directory().exists() or not list(make.directory().iterdir())
    make.disk(10, 4)


def test_a_device_that_is_not_there_leaves_nothing_behind(make):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        make.disk(10, 4, device="cuda")
    make.disk(10, 4)
