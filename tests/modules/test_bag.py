"""`DiskEmbeddingBag` beside `torch.nn.EmbeddingBag`."""

import itertools

import numpy as np
import pytest
import torch
from layers import contents

from dsa import DiskEmbeddingBag
from dsa.optimizers.weight_access import bag_rows

FORMS = [
    (mode, padding, last, weighted)
    for mode, padding, last, weighted in itertools.product(
        ("sum", "mean", "max"), (None, 3), (False, True), (False, True)
    )
    if mode == "sum" or not weighted
]
BATCHES = {
    "offsets": (12, torch.tensor([0, 3, 3, 7])),
    "one bag": (12, torch.tensor([0])),
    "two dimensions": ((3, 4), None),
    "no ids": (0, torch.tensor([0, 0])),
}


def random_batch(shape, offsets, last, weighted):
    draws = torch.Generator().manual_seed(len(str(shape)))
    ids = torch.randint(0, 10, (shape,) if isinstance(shape, int) else shape, generator=draws)
    if last and offsets is not None:
        offsets = torch.cat([offsets, torch.tensor([ids.numel()])])
    factors = torch.randn(ids.shape, generator=draws) if weighted else None
    return ids, offsets, factors


@pytest.mark.parametrize(("mode", "padding", "last", "weighted"), FORMS)
def test_values_and_gradients_are_torchs(make, mode, padding, last, weighted):
    torch.manual_seed(0)
    reference = torch.nn.EmbeddingBag(10, 4, mode=mode, padding_idx=padding, include_last_offset=last)
    layer = make.pretrained(
        reference, kind=DiskEmbeddingBag, mode=mode, padding_idx=padding, include_last_offset=last
    )
    for shape, offsets in BATCHES.values():
        ids, given, factors = random_batch(shape, offsets, last, weighted)
        held = [None if factors is None else factors.clone().requires_grad_() for _ in range(2)]
        expected, output = reference(ids, given, held[0]), layer(ids, given, held[1])
        np.testing.assert_allclose(output.detach(), expected.detach(), rtol=1e-6, atol=1e-7)
        reference.weight.grad = layer.weight.grad = None
        direction = torch.randn(expected.shape)
        (expected * direction).sum().backward()
        (output * direction).sum().backward()
        gradient = layer.weight.grad
        assert gradient.is_sparse
        np.testing.assert_allclose(gradient.to_dense(), reference.weight.grad, rtol=1e-5, atol=1e-6)
        if weighted:
            np.testing.assert_allclose(held[1].grad, held[0].grad, rtol=1e-5, atol=1e-6)


WRONG = {
    "no offsets": (torch.tensor([1, 2]), None),
    "offsets do not begin at 0": (torch.tensor([1, 2]), torch.tensor([1])),
    "offsets beyond the ids": (torch.tensor([1, 2]), torch.tensor([0, 5])),
    "offsets of a matrix": (torch.tensor([[1, 2]]), torch.tensor([0])),
    "no dimension": (torch.tensor(1), torch.tensor([0])),
}


@pytest.mark.parametrize("arguments", WRONG.values(), ids=WRONG)
def test_torchs_complaints_pass_through(make, arguments):
    layer, reference = make.bag(10, 4), torch.nn.EmbeddingBag(10, 4)
    with pytest.raises((ValueError, RuntimeError)) as expected:
        reference(*arguments)
    with pytest.raises((ValueError, RuntimeError)) as given:
        layer(*arguments)
    assert (type(given.value), str(given.value)) == (type(expected.value), str(expected.value))


def test_each_distinct_row_is_read_once(make):
    layer = make.bag(10, 4)
    optimizer = make.adam(layer)
    layer(torch.tensor([1, 2, 2, 2, 1]), torch.tensor([0, 2]))
    assert optimizer.stats()["rows_read"] == 2


def test_max_norm_and_padding(make):
    layer = make.bag(4, 2, 3.0, mode="sum", max_norm=1.0, padding_idx=-1)
    assert layer.padding_idx == 3
    np.testing.assert_allclose(layer(torch.tensor([[1, 3]])).detach(), [[0.7071068] * 2], rtol=1e-6)
    assert "padding_idx=3, max_norm=1.0" in repr(layer)


def test_evaluation_writes_nothing(make):
    layer = make.bag(4, 2, 3.0, max_norm=1.0)
    layer.flush()
    before = contents(make.directory())
    layer.eval()
    np.testing.assert_allclose(layer(torch.tensor([[1], [2]])).detach(), 0.7071068, rtol=1e-6)
    assert contents(make.directory()) == before


def test_a_torch_bag_is_taken_over(make):
    reference = torch.nn.EmbeddingBag(5, 3, mode="sum", padding_idx=1, include_last_offset=True)
    layer = DiskEmbeddingBag.from_pretrained(reference, state_dir=make.directory())
    make.callback(layer.close)
    assert (layer.mode, layer.padding_idx, layer.include_last_offset) == ("sum", 1, True)
    assert not layer.weight.requires_grad
    ids = torch.arange(5)[:, None]
    assert torch.equal(layer(ids), reference(ids).detach())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "min"}, "mode='min' is not known: use 'sum', 'mean' or 'max'"),
        ({"scale_grad_by_freq": True}, "does not exist for sparse gradients"),
        ({"sparse": False}, "a gradient as large as the table"),
        ({"padding_idx": 10}, "padding_idx=10 is outside the table of 10 rows"),
    ],
)
def test_what_cannot_be_is_refused_before_a_file_is_made(make, options, message):
    with pytest.raises(ValueError, match=message):
        make.bag(10, 4, **options)
    assert not make.directory().exists()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_sums_are_added_up_in_the_order_of_the_ids(seed, last):
    draws = np.random.default_rng(seed)
    starts = np.sort(draws.integers(0, 60, 30))
    starts[0] = 0
    offsets = torch.from_numpy(np.append(starts, 60) if last else starts)
    inverse = torch.from_numpy(draws.integers(0, 12, 60))  # many of each, in any order
    values = torch.from_numpy(draws.standard_normal((13, 5)).astype(np.float32)).requires_grad_()
    for ids, where in ((inverse, offsets), (inverse.reshape(20, 3), None)):
        last_too = last and where is not None
        ours = bag_rows(values, ids, where, "sum", None, last_too, None)
        theirs = torch.nn.functional.embedding_bag(
            ids, values, where, mode="sum", include_last_offset=last_too
        )
        given = torch.from_numpy(draws.standard_normal(ours.shape).astype(np.float32))
        (found,), (expected,) = (torch.autograd.grad(each, values, given) for each in (ours, theirs))
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(found, expected)
        where = torch.arange(0, 60, 3) if where is None else where
        bags = np.searchsorted(where.numpy()[: len(given)], np.arange(60), side="right") - 1
        one_by_one = np.zeros((13, 5), np.float32)
        np.add.at(one_by_one, inverse.numpy(), given.numpy()[bags])
        assert found.numpy().tobytes() == one_by_one.tobytes()


def test_bags_that_change_before_the_backward_pass(make):
    layer, offsets = make.bag(10, 4, mode="sum"), torch.tensor([0, 2])
    sums = layer(torch.tensor([1, 2, 3]), offsets)
    offsets += 1
    sums.backward(torch.tensor([[1.0], [5.0]]).expand(2, 4))
    assert layer.weight.grad.to_dense()[:4, 0].tolist() == [0.0, 1.0, 1.0, 5.0]
