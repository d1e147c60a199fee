"""D13: numbers are checked, not converted from whatever looks like one."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from dsa import DiskEmbedding, DiskEmbeddingBag, DiskSparseAdam, DiskSparseRiemannianAdam, init

NO_NUMBERS = ["1e-3", "0.5", b"0.5", True, np.True_, np.array("0.5"), torch.tensor(True), None, [0.5], 0.5j]
NUMBERS = [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2), Decimal("0.5")]


def names(value):
    return f"{type(value).__name__} {value!r}"


def sparse(path, **options):
    return DiskSparseAdam([torch.nn.Parameter(torch.zeros(4, 2))], state_dir=path, **options)


def explicit(path, **options):
    return DiskSparseRiemannianAdam({"a": init.Zeros(4, 2)}, disk_dir=path, **{"k": 1.0, **options})


def disk(path, **options):
    return DiskEmbedding(4, 2, state_dir=path, **options)


CHECKED = [
    *((sparse, name) for name in ("lr", "eps", "weight_decay", "max_step")),
    *(
        (explicit, name)
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "max_step", "k", "init_max_norm_fraction")
    ),
    *((disk, name) for name in ("max_norm", "norm_type", "k", "init_max_norm_fraction")),
]
OPTIONAL = {"max_step", "max_norm"}


@pytest.mark.parametrize("value", NO_NUMBERS, ids=names)
@pytest.mark.parametrize(("make", "name"), CHECKED, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_no_number(tmp_path, make, name, value):
    if value is None and name in OPTIONAL:
        value = "None"
    with pytest.raises(TypeError, match=rf"^{name}=.*: pass a number"):
        make(tmp_path / "state", **{name: value})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("value", NUMBERS, ids=names)
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay", "beta1"])
def test_numbers_of_every_type(tmp_path, name, value):
    with explicit(tmp_path / "explicit", **{name: value}) as optimizer:
        optimizer.step({"a": ([1], np.ones((1, 2), np.float32))})
        assert optimizer.global_step == 1


@pytest.mark.parametrize("betas", [("0.9", 0.999), (0.9, True), (0.9, "0.999")])
def test_betas(tmp_path, betas):
    with pytest.raises(TypeError, match=r"^betas\[[01]\]=.*: pass a number"):
        sparse(tmp_path / "state", betas=betas)


@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", ["1e-3", True])
def test_groups(tmp_path, name, value):
    group = {"params": [torch.nn.Parameter(torch.zeros(4, 2))], name: value}
    with pytest.raises(TypeError, match=rf"^{name}="):
        DiskSparseAdam([group], state_dir=tmp_path / "state")
    with sparse(tmp_path / "state") as optimizer:
        with pytest.raises(TypeError, match=rf"^{name}="):
            optimizer.add_param_group(group)
        saved = optimizer.state_dict()
        saved["param_groups"][0][name] = value
        with pytest.raises(TypeError, match=rf"^{name}="):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0][name] != value


@pytest.mark.parametrize("make", [sparse, explicit])
def test_what_a_scheduler_sets(tmp_path, make):
    with make(tmp_path / "state") as optimizer:
        optimizer.param_groups[0]["lr"] = "1e-3"
        if make is sparse:
            parameter = optimizer.param_groups[0]["params"][0]
            parameter.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (4, 2), check_invariants=True)
        with pytest.raises(TypeError, match=r"^lr='1e-3' is of type str: pass a number"):
            optimizer.step() if make is sparse else optimizer.step({"a": ([1], np.ones((1, 2), np.float32))})
        assert optimizer.global_step == 0


@pytest.mark.parametrize("value", ["1.0", True])
def test_curvatures_of_tables(tmp_path, value):
    with pytest.raises(TypeError, match=r"^k\['a'\]="):
        explicit(tmp_path / "state", k={"a": value})
    with explicit(tmp_path / "state") as optimizer:
        for k in (value, {"a": value}):
            with pytest.raises(TypeError, match=r"^k(\['a'\])?="):
                optimizer.set_curvature(k)


@pytest.mark.parametrize("kind", [DiskEmbedding, DiskEmbeddingBag])
@pytest.mark.parametrize("value", [2, -2, np.int64(2), np.int32(-2), np.array(2), torch.tensor(2)], ids=names)
def test_a_padding_row_of_every_integer_type(tmp_path, kind, value):
    layer = kind(4, 2, padding_idx=value, state_dir=tmp_path / "state")
    assert layer.padding_idx == 2
    assert type(layer.padding_idx) is int
    layer.close()


@pytest.mark.parametrize(
    "value", ["2", 2.0, np.float64(2), torch.tensor(2.0), torch.tensor([1, 2])], ids=names
)
def test_what_is_no_row(tmp_path, value):
    with pytest.raises(TypeError, match=r"padding_idx=.* is not a row: pass an integer"):
        disk(tmp_path / "state", padding_idx=value)
