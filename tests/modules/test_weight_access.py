"""`layer.weight` as a tensor: rows by index and by functional calls; compiled models; what must not kill."""

import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from layers import row, weights
from torch.nn import functional

from dsa import DiskEmbedding, DiskEmbeddingBag
from dsa.errors import RowIndexError, RowTypeError

ROWS, DIM = 20, 3

INDICES = {
    "an int": 4,
    "the last": -1,
    "a numpy int": np.int64(7),
    "a tensor": torch.tensor([3, 1, 3]),
    "a matrix": torch.tensor([[3, -1], [0, 3]]),
    "a number in a tensor": torch.tensor(5),
    "int32": torch.tensor([3, 1], dtype=torch.int32),
    "a list": [2, 2, 5],
    "an empty list": [],
    "an array": np.array([[1], [9]]),
    "a slice": slice(2, 6),
    "a slice with steps": slice(-1, None, 1),
    "every third": slice(1, None, 3),
    "rows and an element": (torch.tensor([3, 1]), 2),
    "rows and elements": (slice(2, 6), slice(0, 2)),
    "one number": (3, 1),
}


@pytest.fixture
def twins(make):
    """A table in memory and one on disk of the same weights."""
    torch.manual_seed(0)
    plain = torch.nn.Embedding(ROWS, DIM)
    return plain, make.pretrained(plain)


def gradients_agree(plain, disk, expected, found):
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=0)
    direction = torch.randn(expected.shape)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()
    assert disk.weight.grad.is_sparse
    torch.testing.assert_close(disk.weight.grad.to_dense(), plain.weight.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("which", INDICES)
def test_rows_by_index_and_their_gradients_are_torchs(twins, which):
    plain, disk = twins
    index = INDICES[which]
    gradients_agree(plain, disk, plain.weight[index], disk.weight[index])


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_functional_embedding(twins, padding_idx):
    plain, disk = twins
    ids = torch.tensor([[3, 19], [0, 3]])
    expected = functional.embedding(ids, plain.weight, padding_idx)
    gradients_agree(plain, disk, expected, functional.embedding(ids, disk.weight, padding_idx))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_functional_embedding_bag(twins, mode):
    plain, disk = twins
    ids, offsets = torch.tensor([3, 19, 0, 3]), torch.tensor([0, 3, 3])
    expected = functional.embedding_bag(ids, plain.weight, offsets, mode=mode)
    gradients_agree(
        plain, disk, expected, functional.embedding_bag(ids, disk.weight, offsets=offsets, mode=mode)
    )


def test_index_select(twins):
    plain, disk = twins
    ids = torch.tensor([3, 1])
    gradients_agree(plain, disk, plain.weight.index_select(0, ids), disk.weight.index_select(0, ids))
    with pytest.raises(RuntimeError, match="'index_select'"):
        torch.index_select(disk.weight, 1, torch.tensor([0]))


def test_functional_max_norm_writes_as_torchs_does(twins):
    plain, disk = twins
    with torch.no_grad():
        plain.weight.mul_(9)
    disk.load_state_dict(plain.state_dict())
    ids = torch.tensor([1, 2])
    functional.embedding(ids, plain.weight, max_norm=1.0)
    functional.embedding(ids, disk.weight, max_norm=1.0)
    torch.testing.assert_close(weights(disk), plain.weight.detach(), rtol=1e-5, atol=1e-6)


NOT_ROWS = {
    "None": (None, TypeError, "None selects the whole table"),
    "an ellipsis": (..., TypeError, "Ellipsis selects the whole table"),
    "True": (True, TypeError, "True selects the whole table"),
    "a mask": (torch.zeros(ROWS, dtype=torch.bool), TypeError, r"is a mask.*pass mask.nonzero\(\)\[:, 0\]"),
    "floats": (torch.tensor([1.0]), RowTypeError, "'embedding'"),
    "beyond": (ROWS, RowIndexError, str(ROWS)),
    "before": (-ROWS - 1, RowIndexError, "'embedding'"),
    "two lists": (([1], [2]), TypeError, "does not index rows"),
    "a string": ("w", (RowTypeError, TypeError), "embedding|str"),
}


@pytest.mark.parametrize("which", NOT_ROWS)
def test_what_is_no_row_is_refused(make, which):
    layer = make.disk(ROWS, DIM)
    index, error, message = NOT_ROWS[which]
    with pytest.raises(error, match=message):
        layer.weight[index]


def test_a_slice_is_bounded(make):
    layer = make.disk(10**8, 64, allocate="sparse", init=None)
    assert layer.weight[10**8 - 2 :].shape == (2, 64)
    with pytest.raises(ValueError, match=r"takes 25,600,000,000 bytes of memory: .* at most 1048576 rows"):
        layer.weight[:]
    with pytest.raises(ValueError, match="takes"):
        layer.weight.data[:]


def test_a_mean_of_bags_of_the_weight_of_a_ball_is_refused(make):
    layer = make.disk(ROWS, DIM, k=1.0)
    with pytest.raises(ValueError, match="a 'mean' of points of the ball is not one of its points"):
        functional.embedding_bag(torch.tensor([[1, 2]]), layer.weight)


def test_d26_metadata_answers_through_data_too(make):
    layer = make.disk(ROWS, DIM, 0.5)
    data = layer.weight.data
    assert (data.device, data.dtype, data.shape) == (torch.device("cpu"), torch.float32, (ROWS, DIM))
    assert (data.numel(), data.dim(), data.size(1), len(data), data.is_sparse) == (60, 2, 3, ROWS, False)
    assert {parameter.device for parameter in layer.parameters()} == {torch.device("cpu")}
    rows = data[torch.tensor([1, 2])]
    assert rows.tolist() == [[0.5] * 3] * 2
    assert not rows.requires_grad
    assert "DiskParameter('embedding'" in repr(data)


def test_d16_the_weight_can_not_be_replaced(make):
    layer = make.disk(ROWS, DIM, 0.5)
    with pytest.raises(TypeError, match=r"can't be replaced by a Parameter: set some rows by set_rows"):
        layer.weight = torch.nn.Parameter(torch.zeros(ROWS, DIM))
    with pytest.raises(RuntimeError, match=r"resume=False.*init="):
        layer.reset_parameters()
    assert row(layer, 1) == [0.5] * 3


def test_d26_sparse_adam_over_the_weight_names_the_optimizer_to_use(make):
    layer = make.disk(ROWS, DIM)
    optimizer = torch.optim.SparseAdam([layer.weight])
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"use dsa\.DiskSparseAdam"):
        optimizer.step()


def test_set_rows_is_a_transaction_that_survives_and_is_exported(make):
    layer = make.disk(ROWS, DIM, 0.5)
    optimizer = make.adam(layer)
    layer(torch.tensor([7])).sum().backward()
    optimizer.step()
    moments = make.records(layer, ROWS, DIM)["m"][7].tolist()
    layer.set_rows(torch.tensor([7, 2]), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert (row(layer, 7), row(layer, 2), row(layer, 3)) == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [0.5] * 3)
    assert make.records(layer, ROWS, DIM)["m"][7].tolist() == moments
    layer.close()
    again = make.disk(ROWS, DIM, 0.5, resume=True)
    assert row(again, 2) == [4.0, 5.0, 6.0]


BAD_ROWS = {
    "twice": ([1, 1], torch.zeros(2, DIM), ValueError, "row 1 of table 'embedding' comes twice"),
    "another shape": ([1], torch.zeros(2, DIM), ValueError, r"\(2, 3\) are not those of 1 rows"),
    "not finite": ([1], torch.full((1, DIM), torch.nan), ValueError, "nan"),
    "integers": ([1], torch.zeros(1, DIM, dtype=torch.int64), TypeError, "int64"),
    "beyond": ([ROWS], torch.zeros(1, DIM), RowIndexError, "20"),
    "outside the ball": ([1], torch.ones(1, DIM), ValueError, "norm 1.732051, outside the ball of k=1"),
}


@pytest.mark.parametrize("which", BAD_ROWS)
def test_set_rows_refuses_what_can_not_be_and_changes_nothing(make, which):
    layer = make.disk(ROWS, DIM, k=1.0)
    before = weights(layer)
    ids, values, error, message = BAD_ROWS[which]
    with pytest.raises(error, match=message):
        layer.set_rows(torch.tensor(ids), values)
    assert torch.equal(weights(layer), before)


class Model(torch.nn.Module):
    def __init__(self, items, bags):
        super().__init__()
        self.items, self.bags, self.head = items, bags, torch.nn.Linear(DIM, 2)

    def forward(self, ids):
        return self.head(torch.relu(self.items(ids) + 1.0) * self.bags(ids[:, None]))


# Where warnings are errors, the compiler stumbles over one of its own at any break between two layers.
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_d15_compiled_models_leave_the_graph_for_the_lookup(make, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    items, bags = make.disk(ROWS, DIM, init=None, name="items"), make.bag(ROWS, DIM, init=None, name="bags")
    model = Model(items, bags)
    compiled = torch.compile(model, backend=backend)
    for size in (3, 5, 6):
        ids = torch.arange(size)
        expected, found = model(ids), compiled(ids)
        torch.testing.assert_close(found.detach(), expected.detach())
        expected.square().sum().backward()
        wanted = [parameter.grad.to_dense() for parameter in model.parameters()]
        model.zero_grad()
        found.square().sum().backward()
        for gradient, parameter in zip(wanted, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), gradient)
        model.zero_grad()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(ids), model(ids))
    torch._dynamo.reset()


def test_d15_no_compiler_is_imported_for_a_lookup(tmp_path):
    program = """
        import sys, dsa, torch
        with torch.no_grad():
            layer = dsa.DiskEmbedding(10, 2, state_dir=sys.argv[1])
            layer(torch.tensor([1]))
            layer.close()
        print("torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_modes_without_gradients(make, mode):
    layer = make.disk(ROWS, DIM, 0.5)
    with mode():
        assert layer(torch.tensor([1])).tolist() == layer.weight[[1]].tolist() == [[0.5] * 3]
    layer(torch.tensor([1])).sum().backward()
    assert layer.weight.grad._nnz() == 1


def test_copies_are_refused_whoever_makes_them(make):
    layer = make.disk(ROWS, DIM)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        pickle.dumps(layer)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        torch.save(layer, make.path / "layer.pt")


OFFSETS = {
    "none of them": ([], False, 0),
    "the last one alone": ([0], True, 0),
    "an empty bag": ([0, 2], False, 2),
    "not from 0": ([1], False, None),
    "backwards": ([0, 2, 1], False, None),
    "beyond the ids": ([0, 3], False, None),
    "far beyond, in the middle": ([0, 2**40, 2], False, None),
    "negative": ([0, -1], False, None),
    "no last one": ([], True, None),
    "a last one alone that is not 0": ([2], True, None),
}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("which", OFFSETS)
def test_d11_no_offsets_kill_the_process(make, mode, which):
    offsets, last, bags = OFFSETS[which]
    layer = make.bag(10, 4, 0.5, mode=mode, include_last_offset=last, dtype=torch.float64)
    ids, offsets = torch.tensor([1, 2]), torch.tensor(offsets, dtype=torch.int64)
    if bags is None:
        with pytest.raises((ValueError, RuntimeError), match="offset"):
            layer(ids, offsets)
        return
    output = layer(ids, offsets)
    assert (output.shape, output.dtype) == ((bags, 4), torch.float64)
    output.sum().backward()


def test_d11_floats_are_no_offsets(make):
    layer = make.bag(10, 4)
    with pytest.raises(ValueError, match="1-D tensor of integers"):
        layer(torch.tensor([1, 2]), torch.tensor([0.0]))


def test_d18_nested_tensors_are_refused_by_name(make):
    nested = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    for layer in (make.bag(10, 4, name="bags"), make.disk(10, 4)):
        with pytest.raises(RowTypeError, match=r"nested tensor: pass ids.values\(\).*ids.offsets\(\)"):
            layer(nested)
    output = make.bag(10, 4, name="more")(nested.values(), nested.offsets()[:-1])
    assert output.shape == (2, 4)


def midpoint(points, k):
    """The Möbius gyromidpoint in float64, from Ungar's sum over gamma factors (2008, theorem 6.87)."""
    points = points.astype(np.float64)
    gamma2 = 1.0 / (1.0 - k * (points**2).sum(1, keepdims=True))
    mean = (gamma2 * points).sum(0) / (gamma2 - 0.5).sum()
    half = np.tanh(0.5 * np.arctanh(np.sqrt(k) * np.linalg.norm(mean)))
    return half * mean / (np.sqrt(k) * np.linalg.norm(mean))


@pytest.mark.parametrize("k", [1.0, 0.25])
def test_d19_the_mean_of_a_bag_on_the_ball_is_a_point_of_it(make, k):
    points = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    points *= np.float32(0.49 / np.sqrt(k)) / np.linalg.norm(points, axis=1, keepdims=True)
    layer = make.bag(10, 4, k=k, init=points)
    ids, offsets = torch.tensor([1, 2, 2, 7, 4]), torch.tensor([0, 4, 5])
    found = layer(ids, offsets)
    np.testing.assert_allclose(found[0].detach(), midpoint(points[[1, 2, 2, 7]], k), rtol=1e-5)
    np.testing.assert_allclose(found[1].detach(), points[4], rtol=1e-5)
    assert not found[2].any()
    found.sum().backward()
    assert torch.isfinite(layer.weight.grad.to_dense()).all()


def test_d19_the_mean_of_a_bag_at_the_edge_stays_inside_and_far_points_cancel(make):
    edge = np.float32(1.0 - 1e-5)
    points = np.array([[edge, 0], [-edge, 0], [0, edge]], np.float32)
    layer = make.bag(3, 2, k=1.0, init=points, init_max_norm_fraction=1.0)
    found = layer(torch.tensor([[0, 1], [0, 0], [0, 2]]))
    np.testing.assert_allclose(found[0].detach(), [0.0, 0.0], atol=1e-6)
    assert (found.norm(dim=1) <= 1.0).all()


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_d19_what_has_no_meaning_on_a_ball_is_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=f"mode='{mode}' leaves the ball of k=1.0: use 'mean'"):
        DiskEmbeddingBag(10, 4, mode=mode, k=1.0, state_dir=tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_d13_what_has_an_index_is_a_padding_idx(make):
    for number, padding in enumerate((np.int64(2), torch.tensor(2))):
        layer = make.disk(10, 4, name=str(number), padding_idx=padding)
        assert layer.padding_idx == 2
        assert type(layer.padding_idx) is int


def test_d32_a_closed_module_is_named(tmp_path):
    layer = DiskEmbedding(10, 4, state_dir=tmp_path / "state")
    layer.close()
    with pytest.raises(RuntimeError, match="build the module or optimizer again"):
        layer(torch.tensor([1]))
