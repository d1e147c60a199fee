"""The one door for rows and gradients: a dictionary as oracle, every dtype, and everything it refuses."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa.errors import DSAError, GradientError, RowIndexError, RowTypeError
from dsa.optimizers.tensors import to_array
from dsa.state.coalesce import as_gradient, as_rows, coalesce, merge, require_finite

LARGEST = 2**63 - 1
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "longdouble"]


def summed(rows, grad):
    """The oracle: float32 sums in the order of occurrence, in a dictionary."""
    sums = {}
    for row, values in zip(rows, np.asarray(grad, dtype=np.float32), strict=True):
        sums[int(row)] = sums[int(row)] + values if int(row) in sums else values.copy()
    ordered = sorted(sums)
    merged = np.array([sums[row] for row in ordered], dtype=np.float32).reshape(len(ordered), grad.shape[1])
    return np.array(ordered, dtype=np.int64), merged


def admitted(indices, grad, rows=LARGEST, dim=None):
    """What a step does with a batch before it reads anything."""
    checked = as_rows(to_array(indices), rows, "entity")
    gradient = to_array(grad)
    distinct, gradients = coalesce(
        checked, as_gradient(gradient, checked, dim or gradient.shape[1], "entity")
    )
    require_finite(gradients, distinct, "entity")
    return distinct, merge(gradients)


def assert_same(actual, expected):
    assert actual[0].dtype == np.int64
    assert actual[1].dtype == np.float32
    assert actual[0].tolist() == expected[0].tolist()
    assert actual[1].shape == expected[1].shape
    assert actual[1].tobytes() == expected[1].tobytes()


SMALL_ROWS = st.integers(0, 5)
HUGE_ROWS = st.integers(LARGEST - 4, LARGEST - 1)
ANY_ROWS = st.integers(0, LARGEST - 1)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def batches(draw, values=FINITE):
    rows = draw(st.lists(st.one_of(SMALL_ROWS, HUGE_ROWS, ANY_ROWS), max_size=40))
    dim = draw(st.integers(1, 5))
    numbers = draw(st.lists(values, min_size=len(rows) * dim, max_size=len(rows) * dim))
    return np.array(rows, np.int64), np.array(numbers, np.float32).reshape(len(rows), dim)


@given(batches())
def test_agrees_with_a_dictionary_bit_by_bit(batch):
    rows, grad = batch
    copies = rows.copy(), grad.copy()
    assert_same(admitted(rows, grad), summed(rows, grad))
    assert rows.tobytes() == copies[0].tobytes()
    assert grad.tobytes() == copies[1].tobytes()


@given(batches(st.integers(-1000, 1000)), st.randoms())
def test_order_does_not_matter_where_sums_are_exact(batch, random):
    rows, grad = batch
    order = list(range(len(rows)))
    random.shuffle(order)
    assert_same(admitted(rows[order], grad[order]), admitted(rows, grad))


@given(batches())
def test_coalescing_twice_changes_nothing(batch):
    once = admitted(*batch)
    assert_same(admitted(*once), once)


@pytest.mark.parametrize("count", [1_000, 5_000])
@pytest.mark.parametrize("span", [3, 700, 2**40, LARGEST])
def test_large_batches(count, span):
    """Both ways of sorting: row and position packed into one integer, or a stable argsort."""
    generator = np.random.default_rng(span % 1_000)
    rows = generator.integers(0, span, count)
    grad = generator.standard_normal((count, 3)).astype(np.float32)
    assert_same(admitted(rows, grad), summed(rows, grad))


def test_c01_two_backwards_before_one_step():
    rows, grad = admitted([7, 1, 3, 8, 1, 3], np.ones((6, 3), np.float32))
    assert rows.tolist() == [1, 3, 7, 8]
    assert grad.tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_c02_duplicates_are_summed(order):
    grad = np.array([[1.0], [2.0], [-4.0]], np.float32)[list(order)]
    rows, merged = admitted([2, 2, 2], grad)
    assert rows.tolist() == [2]
    assert merged.tolist() == [[-1.0]]


def test_c04_empty_batch():
    rows, grad = admitted(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))
    assert rows.shape == (0,)
    assert rows.dtype == np.int64
    assert grad.shape == (0, 4)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_dtypes(dtype):
    indices = np.array([5, 0, 5, 100], dtype)
    assert as_rows(indices, 101, "entity").tolist() == [5, 0, 5, 100]
    assert as_rows(indices, 101, "entity").dtype == np.int64


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
def test_foreign_byte_order(dtype):
    indices = np.array([5, 0, 300], np.dtype(dtype).newbyteorder(">"))
    assert as_rows(indices, 301, "entity").tolist() == [5, 0, 300]
    grad = np.array([[1.0], [2.0], [3.0]], ">f4")
    assert as_gradient(grad, np.arange(3), 1, "entity").tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_dtypes(dtype):
    grad = np.array([[0.1, -3.0], [1 / 3, 0.0]], dtype)
    checked = as_gradient(grad, np.arange(2), 2, "entity")
    assert checked.dtype == np.float32
    assert checked.tobytes() == grad.astype(np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensor_dtypes(dtype):
    grad = torch.tensor([[0.1, -3.0], [1 / 3, 0.0], [7.0, 1.0]], dtype=dtype, requires_grad=True)
    rows, merged = admitted(torch.tensor([4, 2, 4], dtype=torch.int32), grad)
    assert_same((rows, merged), summed([4, 2, 4], grad.detach().float().numpy()))


def test_half_precision_sums_in_single_precision():
    """In float16 the sum of 70,000 would be infinite, and 2,048 + 1 would stay 2,048."""
    grad = np.array([[65_000.0], [5_000.0], [2_048.0], [1.0]], np.float16)
    _, merged = admitted([0, 0, 1, 1], grad)
    assert merged.tolist() == [[float(np.float16(65_000.0)) + 5_000.0], [2_049.0]]


def test_views_of_every_kind():
    base = np.arange(48, dtype=np.float32).reshape(6, 8)
    rows = np.array([9, 9, 3, 9, 1, 3, 0, 3])[::-2]
    for grad in (base[:4, ::2], base[::-1][:4, 1:5], np.asfortranarray(base[:4, :4]), base.T[:4, :4]):
        assert_same(admitted(rows, grad), summed(rows, grad))
    strided = torch.arange(48.0).reshape(8, 6).t()
    assert_same(
        admitted(torch.tensor([2, 0, 2, 1, 1, 0]), strided), summed([2, 0, 2, 1, 1, 0], strided.numpy())
    )
    broadcast = np.broadcast_to(np.float32(2.5), (3, 2))
    assert_same(admitted([1, 0, 1], broadcast), summed([1, 0, 1], broadcast))


def test_arrays_that_may_not_be_written():
    rows, grad = np.array([3, 1, 3]), np.array([[1.0], [5.0], [2.0]], np.float32)
    rows.setflags(write=False)
    grad.setflags(write=False)
    assert_same(admitted(rows, grad), summed(rows, grad))
    assert_same(admitted(rows[:1], grad[:1]), summed(rows[:1], grad[:1]))


def test_signed_zero_survives():
    assert np.signbit(admitted([1, 0], np.array([[-0.0], [1.0]], np.float32))[1][1, 0])


@pytest.mark.parametrize(
    ("indices", "wrong"),
    [
        (np.array([3, -1, 2]), "-1"),
        (np.array([3, 10]), "10"),
        (np.array([-(2**63)]), str(-(2**63))),
        (np.array([LARGEST]), str(LARGEST)),
        (np.array([-1], np.int8), "-1"),
        (np.array([255], np.uint8), "255"),
        (np.array([2**63], np.uint64), str(2**63)),
        (np.array([2**64 - 1], np.uint64), str(2**64 - 1)),
        (np.array([0, 2**63 + 5], np.uint64), str(2**63 + 5)),
        (np.array([2**32 - 1], np.uint32), str(2**32 - 1)),
    ],
)
def test_rows_outside_the_table(indices, wrong):
    with pytest.raises(
        RowIndexError, match=rf"index {wrong} is outside table 'entity', whose rows are 0 to 9"
    ):
        as_rows(indices, 10, "entity")
    with pytest.raises(IndexError):
        as_rows(indices, 10, "entity")


@pytest.mark.parametrize(
    ("indices", "what"),
    [
        (np.array([True] * 10), "a boolean mask"),
        (np.array([2.0]), "float64"),
        (np.array([2.0], np.float16), "float16"),
        (np.array([2j]), "complex128"),
        (np.array([2**70], object), "object"),
        (np.array(["1"]), "str"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.array([1], "m8[s]"), "timedelta64"),
        (np.array(3), r"shape \(\)"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        (np.empty((0, 2), np.int64), r"shape \(0, 2\)"),
    ],
)
def test_indices_that_are_none(indices, what):
    with pytest.raises(RowTypeError, match=what):
        as_rows(indices, 10, "entity")
    with pytest.raises(TypeError):
        as_rows(indices, 10, "entity")


@pytest.mark.parametrize(
    ("grad", "error", "what"),
    [
        (np.ones((2, 3), np.int64), RowTypeError, "int64.*pass a floating one"),
        (np.ones((2, 3), bool), RowTypeError, "bool"),
        (np.ones((2, 3), complex), RowTypeError, "complex128"),
        (np.ones((2, 3), object), RowTypeError, "object"),
        (np.ones((3, 3)), GradientError, r"shape \(3, 3\) but 2 indices .* need \(2, 3\)"),
        (np.ones((2, 2)), GradientError, r"shape \(2, 2\)"),
        (np.ones(6), GradientError, r"shape \(6,\)"),
        (np.ones((2, 3, 1)), GradientError, r"shape \(2, 3, 1\)"),
        (np.ones(()), GradientError, r"shape \(\)"),
        (np.array([[0.0] * 3, [0.0, np.nan, 0.0]]), GradientError, "in row 1 of the batch"),
        (np.array([[0.0, 0.0, np.inf], [0.0] * 3]), GradientError, "in row 0 of the batch"),
        (np.array([[0.0] * 3, [-np.inf, 0.0, 0.0]], np.float16), GradientError, "in row 1 of the batch"),
        (np.array([[0.0] * 3, [1e39, 0.0, 0.0]]), GradientError, "float32 can't represent in row 1"),
    ],
)
def test_gradients_that_are_none(grad, error, what):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error, match=what):
            admitted([0, 1], grad, dim=3)
    assert issubclass(error, DSAError)


@pytest.mark.parametrize("values", [(3e38, 3e38), (-3e38, -3e38, 3e38), (3e38, 3e38, -3e38)])
def test_a_sum_that_overflows(values):
    rows = np.array([4, *[9] * len(values)])
    grad = np.array([[1.0, 1.0], *[[0.0, value] for value in values]], np.float32)
    with pytest.raises(GradientError, match="summed gradient of row 9 of table 'entity' overflows"):
        admitted(rows, grad)


def test_large_numbers_that_do_not_overflow():
    _, merged = admitted([1, 1], np.array([[3e38], [-3e38]], np.float32))
    assert merged.tolist() == [[0.0]]
