"""D42: parameters of any number of dimensions with sparse gradients of rows, as SparseAdam takes them."""

import copy

import numpy as np
import pytest
import torch

from dsa import DiskSparseAdam
from dsa.errors import GradientError

SHAPES = [(7,), (7, 1), (7, 3), (7, 2, 3), (3_000, 2, 2, 2)]


def start(shape, dtype=torch.float32, strided=False):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if strided and len(shape) > 1:
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.nn.Parameter(values)


def set_gradient(parameter, number):
    """A gradient with duplicates, every third one empty."""
    draws = np.random.default_rng(number)
    dim = parameter[0].numel()
    count = 0 if number % 3 == 2 else 2 * len(parameter)
    rows = torch.from_numpy(draws.integers(0, len(parameter), count))
    values = torch.from_numpy(draws.standard_normal((count, dim), np.float32))
    values = values.reshape(count, *parameter.shape[1:])
    parameter.grad = torch.sparse_coo_tensor(
        rows[None], values.to(parameter.dtype), parameter.shape, check_invariants=True
    )


def train(parameter, optimizer, first=0, last=7):
    for number in range(first, last):
        set_gradient(parameter, number)
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity_with_torch(tmp_path, shape, strided):
    parameter = start(shape)
    expected = train(parameter, torch.optim.SparseAdam([parameter], lr=0.05))
    parameter = start(shape, strided=strided)
    with DiskSparseAdam(
        [parameter], 0.05, state_dir=tmp_path / "state", bias_correction="parameter"
    ) as optimizer:
        trained = train(parameter, optimizer)
    assert trained.shape == shape
    torch.testing.assert_close(trained, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_state_of_torch_is_taken_over(tmp_path, shape):
    parameter = start(shape)
    torchs = torch.optim.SparseAdam([parameter], lr=0.05)
    middle = train(parameter, torchs, last=4)
    saved = copy.deepcopy(torchs.state_dict())
    expected = train(parameter, torchs, first=4)
    parameter = torch.nn.Parameter(middle)
    with DiskSparseAdam(
        [parameter], 0.05, state_dir=tmp_path / "state", bias_correction="parameter"
    ) as optimizer:
        optimizer.load_state_dict(saved)
        trained = train(parameter, optimizer, first=4)
    torch.testing.assert_close(trained, expected, rtol=2e-6, atol=1e-7)


def test_a_state_of_another_shape_is_refused(tmp_path):
    other = start((7, 6))
    torchs = torch.optim.SparseAdam([other], lr=0.05)
    train(other, torchs, last=1)
    with DiskSparseAdam([start((7, 2, 3))], 0.05, state_dir=tmp_path / "state") as optimizer:
        saved = torchs.state_dict()
        saved["state"][0]["exp_avg"] = torch.zeros(7, 5)
        with pytest.raises(ValueError, match=r"exp_avg.*\(7, 5\)"):
            optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)], ids=str)
def test_shorter_floats(tmp_path, shape, dtype):
    flat = torch.nn.Parameter(start(shape, dtype).detach().reshape(7, -1).clone())
    parameter = start(shape, dtype)
    with DiskSparseAdam([flat], state_dir=tmp_path / "flat") as optimizer:
        expected = train(flat, optimizer)
    with DiskSparseAdam([parameter], state_dir=tmp_path / "shaped") as optimizer:
        trained = train(parameter, optimizer)
    assert trained.dtype == dtype
    assert torch.equal(trained.reshape(7, -1), expected)
    assert not torch.equal(trained, start(shape, dtype))


@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)], ids=str)
def test_state_and_weights_come_back_from_a_checkpoint(tmp_path, shape):
    parameter = start(shape)
    with DiskSparseAdam([parameter], 0.05, state_dir=tmp_path / "state") as optimizer:
        middle = train(parameter, optimizer, last=3)
        optimizer.export_checkpoint(tmp_path / "checkpoint")
        expected = train(parameter, optimizer, first=3)
        optimizer.import_checkpoint(tmp_path / "checkpoint")
        assert torch.equal(parameter, middle)
        assert torch.equal(train(parameter, optimizer, first=3), expected)


@pytest.mark.parametrize(("shape", "sparse"), [((7, 3), 2), ((7, 2, 3), 2), ((7, 2, 3), 3)])
def test_a_gradient_of_elements_is_explained(tmp_path, shape, sparse):
    parameter = start(shape)
    before = parameter.detach().clone()
    with DiskSparseAdam([("it", parameter)], state_dir=tmp_path / "state") as optimizer:
        for gradient in (torch.ones(shape), torch.zeros(shape)):
            parameter.grad = gradient.to_sparse(sparse)
            with pytest.raises(GradientError, match=rf"'it' has sparse_dim={sparse}: .*to_sparse\(1\)"):
                optimizer.step()
        assert torch.equal(parameter, before)
        assert optimizer.global_step == 0
        parameter.grad = torch.ones(shape).to_sparse(sparse).to_dense().to_sparse(1)
        optimizer.step()
        assert optimizer.global_step == 1
