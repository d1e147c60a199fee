"""`DiskEmbedding` beside `torch.nn.Embedding`: what goes in and out, and what is read and written."""

import os
import threading

import numpy as np
import pytest
import torch
from layers import backward, contents, row, step, weights
from torch.utils.checkpoint import checkpoint

from dsa import DiskEmbedding, init
from dsa.errors import RowIndexError, RowTypeError, StateClosedError

IDS = {
    "1-D": torch.tensor([1, 2, 3]),
    "repeated": torch.tensor([5, 1, 5, 5]),
    "2-D": torch.tensor([[1, 3], [3, 4]]),
    "int32": torch.tensor([[[1]]], dtype=torch.int32),
    "not contiguous": torch.arange(8).reshape(2, 4).T[1:, :],
    "none": torch.empty(0, dtype=torch.int64),
    "none, 3-D": torch.empty(2, 0, 3, dtype=torch.int64),
    "padding only": torch.tensor([3, 3]),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("padding", [None, 3, -7])
def test_values_and_gradients_are_torchs(make, ids, padding):
    torch.manual_seed(0)
    reference = torch.nn.Embedding(10, 4, padding_idx=padding, sparse=True)
    layer = make.pretrained(reference, padding_idx=padding)
    expected, output = reference(ids), layer(ids)
    assert torch.equal(output, expected)
    direction = torch.randn(expected.shape)
    (expected * direction).sum().backward()
    (output * direction).sum().backward()
    np.testing.assert_allclose(
        layer.weight.grad.to_dense(), reference.weight.grad.to_dense(), rtol=1e-6, atol=1e-7
    )


def test_a_single_id(make):
    layer = make.disk(10, 4, 0.5)
    output = layer(torch.tensor(3))
    assert output.tolist() == [0.5] * 4
    output.sum().backward()
    assert layer.weight.grad.to_dense()[3].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([-1]), RowIndexError, "index -1 is outside table 'embedding', whose rows are 0 to 9"),
        (torch.tensor([10]), RowIndexError, "index 10 is outside"),
        (torch.tensor([1.0]), RowTypeError, "of dtype float32: pass integer row numbers"),
        (torch.tensor([True]), RowTypeError, "a boolean mask"),
        ([1, 2], TypeError, "list"),
    ],
)
def test_ids_that_mean_nothing(make, ids, error, message):
    layer = make.disk(10, 4)
    with pytest.raises(error, match=message):
        layer(ids)


def test_weights_start_as_torchs_do(make):
    """Drawn from N(0, 1), seeded by torch's generator."""
    torch.manual_seed(7)
    first = weights(make.disk(500, 16, init=None, where="first"))
    second = weights(make.disk(500, 16, init=None, where="second"))
    torch.manual_seed(7)
    again = weights(make.disk(500, 16, init=None, where="again"))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert abs(first.mean()) < 0.05
    assert abs(first.std() - 1.0) < 0.05


def test_the_padding_row_starts_at_zero_and_stays(make):
    layer = make.disk(10, 4, init=None, padding_idx=2)
    optimizer = make.adam(layer, weight_decay=0.1)
    step(layer, optimizer, [1, 2, 2])
    assert row(layer, 2) == [0.0] * 4
    assert layer.weight.grad._indices().tolist() == [[1]]


def test_a_trained_padding_row_is_not_zeroed_on_resume(make):
    layer, optimizer = make.pair("disk", 10, 4)
    step(layer, optimizer, [2])
    optimizer.close()
    layer = make.disk(10, 4, padding_idx=2, resume=True)
    np.testing.assert_allclose(row(layer, 2), -0.1, rtol=1e-5)


def test_each_distinct_row_of_a_lookup_is_read_once(make):
    layer, optimizer = make.pair("disk", 10, 4)
    layer(torch.tensor([[1, 2, 2], [2, 1, 7]]))
    assert optimizer.stats()["rows_read"] == 3
    layer(torch.tensor([], dtype=torch.int64))
    assert optimizer.stats()["rows_read"] == 3


def test_lookups_before_one_step_are_one_update(make):
    layer, optimizer = make.pair("disk", 10, 2)
    head, tail = layer(torch.tensor([1, 2])), layer(torch.tensor([2, 3]))
    (head * tail + head).sum().backward()
    assert layer.weight.grad._nnz() == 3
    optimizer.step()
    assert make.records(layer, 10, 2)["t"].tolist() == [0, 1, 1, 1, *[0] * 6]
    assert optimizer.stats()["rows_written"] == 3


def test_a_lookup_sees_the_step_before(make):
    layer = make.disk(4, 1, async_writes=True)
    optimizer = make.adam(layer)
    for number in range(1, 6):
        step(layer, optimizer, [1])
        np.testing.assert_allclose(row(layer, 1), -0.1 * number, rtol=1e-5)


def test_no_grad_and_evaluation_write_nothing(make):
    layer = make.disk(10, 4, init=np.full((10, 4), 3.0, np.float32), padding_idx=1, max_norm=1.0)
    layer.flush()
    before = contents(make.directory())
    with torch.no_grad():
        values = layer(torch.tensor([1, 2]))
    assert not values.requires_grad
    np.testing.assert_allclose(values[1], 0.5, rtol=1e-6)
    layer.eval()
    assert layer(torch.tensor([3])).requires_grad
    with torch.inference_mode():
        layer(torch.tensor([4]))
    assert contents(make.directory()) == before
    layer.train()
    layer(torch.tensor([4]))
    assert contents(make.directory()) != before


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_other_norms(make, norm_type):
    torch.manual_seed(0)
    reference = torch.nn.Embedding(6, 3, max_norm=0.8, norm_type=norm_type, sparse=True)
    layer = make.pretrained(reference, max_norm=0.8, norm_type=norm_type)
    ids = torch.tensor([0, 1, 1, 4])
    np.testing.assert_allclose(layer(ids).detach(), reference(ids).detach(), rtol=1e-6)
    layer.max_norm = None
    np.testing.assert_allclose(weights(layer), reference.weight.detach(), rtol=1e-6)


def test_max_norm_keeps_moments_and_counters(make):
    layer, optimizer = make.pair("disk", 4, 2)
    layer.max_norm = 0.05
    step(layer, optimizer, [1])
    before = make.records(layer, 4, 2)[1]
    layer(torch.tensor([1]))
    after = make.records(layer, 4, 2)[1]
    assert np.linalg.norm(after["w"]) <= 0.05
    assert np.linalg.norm(before["w"]) > 0.1
    assert (after["m"].tolist(), after["v"].tolist(), after["t"]) == (
        before["m"].tolist(),
        before["v"].tolist(),
        1,
    )


def test_backward_twice(make):
    layer = make.disk(10, 2)
    loss = layer(torch.tensor([1, 2, 1])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert layer.weight.grad.to_dense()[1:3].tolist() == [[4.0, 4.0], [2.0, 2.0]]


def test_a_penalty_on_a_gradient(make):
    """The second derivative goes through the lookup."""
    torch.manual_seed(0)
    reference = torch.nn.Embedding(10, 3)
    layer = make.pretrained(reference)
    for each in (reference, layer):
        output = each(torch.tensor([1, 2, 1]))
        (gradient,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
        gradient.square().sum().backward()
    np.testing.assert_allclose(layer.weight.grad.to_dense(), reference.weight.grad, rtol=1e-5)


def test_the_gradient_can_be_asked_for(make):
    layer = make.disk(10, 2)
    (gradient,) = torch.autograd.grad(layer(torch.tensor([1, 2, 1])).sum(), layer.weight)
    assert gradient.to_dense()[:3].tolist() == [[0.0, 0.0], [2.0, 2.0], [1.0, 1.0]]
    assert layer.weight.grad is None


def test_activation_checkpointing(make):
    layer = make.disk(10, 2)
    checkpoint(layer, torch.tensor([1, 1, 2]), use_reentrant=False).sum().backward()
    assert layer.weight.grad.to_dense()[1:3].tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_hooks(make):
    layer = make.disk(10, 2)
    seen = []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.is_sparse))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter is layer.weight))
    layer.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    backward(layer, [1])
    assert seen == [torch.Size([1, 2]), True, True]


def test_lookups_from_several_threads(make):
    layer = make.disk(1000, 8, init=init.Normal(1000, 8, seed=1))
    expected, wrong = weights(layer), []

    def look(seed):
        draws = torch.Generator().manual_seed(seed)
        for _ in range(50):
            ids = torch.randint(0, 1000, (64,), generator=draws)
            if not torch.equal(layer(ids).detach(), expected[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Pairs(torch.utils.data.Dataset):
    def __init__(self, layer=None):
        self.layer = layer

    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.tensor([index, index + 1])
        return ids if self.layer is None else self.layer(ids).detach()


forking = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@forking
def test_training_beside_forked_workers(make):
    layer, optimizer = make.pair("disk", 10, 2)
    for batch in torch.utils.data.DataLoader(
        Pairs(), batch_size=2, num_workers=2, multiprocessing_context="fork"
    ):
        step(layer, optimizer, batch)
    assert make.records(layer, 10, 2)["t"].tolist() == [1, 1, 2, 1, 2, 1, 2, 1, 1, 0]


@forking
def test_a_forked_worker_cannot_look_up_and_does_no_harm(make):
    layer, optimizer = make.pair("disk", 10, 2)
    loader = torch.utils.data.DataLoader(Pairs(layer), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(
        StateClosedError,
        match="fork of it: use the optimizer or module in the process that made it",
    ):
        next(iter(loader))
    step(layer, optimizer, [1])
    assert optimizer.global_step == 1


def test_each_kind_of_weights_is_taken_over(make):
    given = np.arange(12, dtype=np.float32).reshape(4, 3)
    mapped = np.lib.format.open_memmap(make.path / "weights.npy", "w+", np.float32, given.shape)
    mapped[:] = given
    tensor = torch.from_numpy(given)
    sources = [
        given,
        mapped,
        tensor,
        tensor.bfloat16(),
        torch.nn.Parameter(tensor),
        torch.nn.Embedding.from_pretrained(tensor),
    ]
    for number, source in enumerate(sources):
        layer = make.pretrained(source, where=f"state{number}")
        assert np.array_equal(weights(layer), given)
        assert layer.weight.requires_grad


def test_weights_of_a_zarr_array_are_taken_over(make):
    zarr = pytest.importorskip("zarr")
    given = np.arange(12, dtype=np.float32).reshape(4, 3)
    array = zarr.create_array(
        store=str(make.path / "weights.zarr"), shape=given.shape, chunks=(2, 3), dtype="f4"
    )
    array[:] = given
    assert np.array_equal(weights(make.pretrained(array)), given)


def test_a_module_that_is_taken_over_keeps_its_options(make):
    """Or its padding row would be trained."""
    reference = torch.nn.Embedding(6, 3, padding_idx=2, max_norm=1.0, norm_type=1.0)
    layer = make.pretrained(reference)
    assert (layer.padding_idx, layer.max_norm, layer.norm_type) == (2, 1.0, 1.0)
    other = make.pretrained(reference, where="other", padding_idx=None, max_norm=5.0)
    assert (other.padding_idx, other.max_norm) == (None, 5.0)
    with pytest.raises(ValueError, match="does not exist for sparse gradients"):
        make.pretrained(torch.nn.Embedding(6, 3, scale_grad_by_freq=True), where="third")


def test_weights_that_are_taken_over_are_frozen_as_in_torch(make):
    layer = DiskEmbedding.from_pretrained(torch.ones(4, 3), state_dir=make.directory())
    make.callback(layer.close)
    assert not layer.weight.requires_grad
    assert not layer(torch.tensor([1])).requires_grad


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (init.Zeros(4, 3), TypeError, "Zeros is a rule, not weights: pass it as init="),
        ([[1.0, 2.0]], TypeError, "'list' is not an array"),
        (np.ones((2, 2), int), TypeError, "weights are floating-point"),
        (np.array([[1.0, np.nan]]), ValueError, "row 0 of the array holds nan"),
    ],
)
def test_what_is_not_weights_is_refused(make, source, error, message):
    with pytest.raises(error, match=message):
        DiskEmbedding.from_pretrained(source, state_dir=make.directory())
    assert not make.directory().exists() or not contents(make.directory())
