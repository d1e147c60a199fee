"""Initialisers: their weights, their JSON, their refusals; arrays of every kind read in blocks."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dsa import init
from dsa.errors import StateCorruptError
from dsa.kernels.random import fill_normal, fill_uniform
from dsa.rules.init import FromArray, Normal, Uniform, Zeros, as_initializer, from_json
from dsa.schema import adam_schema

RULES = [
    Normal(10, 3),
    Normal(100_000_000, 128, std=0.02, mean=-0.1, seed=2**64 - 1),
    Uniform(5, 1),
    Uniform(7, 5, low=-0.001, high=0.001, seed=12),
    Zeros(40_000_000, 3),
]


def weights(rule, keys):
    out = np.full((len(keys), rule.dim), np.nan, np.float32)
    rule.fill(np.array(keys), out)
    return out


def collect(source, block_rows):
    blocks = list(source.blocks(block_rows))
    assert [start for start, _ in blocks] == list(range(0, source.rows, block_rows))
    return np.concatenate([block for _, block in blocks])


# Lazy rules


def test_weights_are_those_of_the_kernels():
    keys = np.array([3, 99_999_999, 0, 2**40])
    out = np.empty((4, 5), np.float32)
    fill_normal(keys, 6, out, mean=-1.0, std=0.5)
    np.testing.assert_array_equal(weights(Normal(100_000_000, 5, 0.5, -1.0, 6), keys), out)
    fill_uniform(keys, 6, out, low=0.25, high=2.0)
    np.testing.assert_array_equal(weights(Uniform(9, 5, 0.25, 2.0, 6), keys), out)
    np.testing.assert_array_equal(weights(Zeros(9, 5), keys), np.zeros((4, 5)))


def test_defaults():
    assert Normal(2, 3) == Normal(rows=2, dim=3, std=1.0, mean=0.0, seed=0)
    assert Uniform(2, 3) == Uniform(rows=2, dim=3, low=-1.0, high=1.0, seed=0)


def test_the_size_of_a_table_does_not_change_its_weights():
    assert weights(Normal(1, 4), [0]).tobytes() == weights(Normal(2**63 - 1, 4), [0]).tobytes()


@pytest.mark.parametrize("rule", RULES)
def test_only_the_named_positions_are_written(rule):
    records = np.ones(4, adam_schema(rule.dim).dtype)
    rule.fill(np.array([8, 1]), records["w"], np.array([3, 1]))
    np.testing.assert_array_equal(records["w"][[3, 1]], weights(rule, [8, 1]))
    assert (records["w"][[0, 2]] == 1.0).all()
    assert (records["m"] == 1.0).all()


@pytest.mark.parametrize("rule", RULES)
def test_an_output_of_another_width_is_refused(rule):
    with pytest.raises(ValueError, match=rf"rows have {rule.dim} elements, pass \(B, {rule.dim}\)"):
        rule.fill(np.arange(2), np.empty((2, rule.dim + 1), np.float32))
    with pytest.raises(ValueError, match=r"one key for each row of out"):
        rule.fill(np.arange(2), np.empty((3, rule.dim), np.float32))


def test_bounds_that_coincide_and_no_deviation_give_a_constant():
    assert (weights(Uniform(9, 7, low=0.3, high=0.3), [1, 2]) == np.float32(0.3)).all()
    assert (weights(Normal(9, 7, std=0.0, mean=0.3), [1, 2]) == np.float32(0.3)).all()


def test_the_largest_parameters_stay_finite():
    largest = float(np.finfo(np.float32).max)
    keys = list(range(2000))
    assert np.isfinite(weights(Uniform(2000, 8, -largest, largest), keys)).all()
    assert np.isfinite(weights(Normal(2000, 8, std=largest / 6.4), keys)).all()


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_their_parameters(rule):
    stored = json.loads(json.dumps(rule.to_json()))
    assert from_json(stored) == rule
    assert from_json(stored).to_json() == rule.to_json()
    assert hash(from_json(stored)) == hash(rule)
    assert [from_json(stored) == other for other in RULES] == [rule is other for other in RULES]


@given(
    rows=st.integers(1, 2**63 - 1),
    dim=st.integers(1, 2**31 - 1),
    std=st.floats(0.0, 1e30),
    mean=st.floats(-1e30, 1e30),
    seed=st.integers(0, 2**64 - 1),
)
def test_json_keeps_every_bit(rows, dim, std, mean, seed):
    rule = Normal(rows, dim, std, mean, seed)
    assert from_json(json.loads(json.dumps(rule.to_json()))) == rule


def test_other_numbers_become_python_numbers():
    rule = Normal(
        np.int64(4), np.int32(2), std=np.float32(0.5), mean=Fraction(1, 4), seed=np.uint64(2**64 - 1)
    )
    assert rule == Normal(4, 2, 0.5, 0.25, 2**64 - 1)
    assert json.loads(json.dumps(rule.to_json())) == rule.to_json()
    assert json.dumps(Uniform(4, 2, low=-1, high=1).to_json()) == json.dumps(Uniform(4, 2).to_json())


def test_rules_are_frozen():
    with pytest.raises(AttributeError):
        Normal(1, 1).seed = 2
    with pytest.raises((AttributeError, TypeError)):
        Zeros(1, 1).std = 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Normal(0, 3), ValueError, r"rows is 0: choose an integer from 1 to 2\*\*63 - 1"),
        (lambda: Zeros(2**63, 3), ValueError, "rows is 9223372036854775808"),
        (lambda: Zeros(3, 0), ValueError, r"dim is 0: choose an integer from 1 to 2\*\*31 - 1"),
        (lambda: Uniform(3, -1), ValueError, "dim is -1"),
        (lambda: Normal(3, 2, seed=-1), ValueError, r"seed is -1: choose an integer from 0 to 2\*\*64 - 1"),
        (lambda: Uniform(3, 2, seed=2**64), ValueError, "seed is 18446744073709551616"),
        (lambda: Normal(3.0, 2), TypeError, "rows is 3.0: pass an integer"),
        (lambda: Normal(True, 2), TypeError, "rows is True: pass an integer"),
        (lambda: Normal(3, 2, seed=None), TypeError, "seed is None: pass an integer"),
        (lambda: Normal(3, 2, std="1"), TypeError, "std is '1': pass a number"),
        (lambda: Normal(3, 2, std=True), TypeError, "std is True: pass a number"),
        (lambda: Normal(3, 2, std=-0.5), ValueError, "std is -0.5: pass a standard deviation >= 0"),
        (lambda: Normal(3, 2, std=float("nan")), ValueError, "std is nan: .* choose a finite number"),
        (lambda: Normal(3, 2, mean=float("inf")), ValueError, "mean is inf"),
        (lambda: Normal(3, 2, std=1e38), ValueError, r"std 1e\+38 overflows float32: choose smaller"),
        (lambda: Uniform(3, 2, low=1.0, high=-1.0), ValueError, "low is 1.0 and high is -1.0: swap them"),
        (lambda: Uniform(3, 2, low=-1e39), ValueError, r"low -1e\+39 or high 1.0 overflows float32"),
    ],
)
def test_arguments_that_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"kind": "orthogonal", "rows": 3, "dim": 2},
            r"unknown kind 'orthogonal': this release knows \['normal'",
        ),
        ({"rows": 3, "dim": 2}, "unknown kind None"),
        ({"kind": ["zeros"], "rows": 3, "dim": 2}, r"unknown kind \['zeros'\]"),
        ("normal", "unknown kind None"),
        (None, "unknown kind None"),
        ({"kind": "zeros", "rows": 3}, r"kind 'zeros' has parameters \['rows', 'dim'\]"),
        ({"kind": "zeros", "rows": 3, "dim": 2, "seed": 0}, "kind 'zeros' has parameters"),
        ({"kind": "normal", "rows": 3, "dim": 2, "std": 1.0, "mean": 0.0}, "'seed'"),
        ({"kind": "zeros", "rows": "3", "dim": 2}, "rows is '3': pass an integer"),
        ({"kind": "zeros", "rows": 3.5, "dim": 2}, "rows is 3.5"),
        ({"kind": "zeros", "rows": 0, "dim": 2}, "rows is 0"),
        ({"kind": "normal", "rows": 3, "dim": 2, "std": -1.0, "mean": 0.0, "seed": 0}, "std is -1.0"),
        ({"kind": "normal", "rows": 3, "dim": 2, "std": 10**400, "mean": 0.0, "seed": 0}, "too large"),
    ],
)
def test_descriptions_that_are_refused(data, message):
    with pytest.raises(StateCorruptError, match=message):
        from_json(data)


# Arrays


def sample(rows=23, dim=5, dtype=np.float64):
    return np.random.default_rng(0).normal(size=(rows, dim)).astype(dtype)


def as_memmap(values, directory):
    mapped = np.memmap(directory / "values", values.dtype, "w+", shape=values.shape)
    mapped[:] = values
    return mapped


def as_zarr(values, directory):
    return zarr.create_array(directory / "values.zarr", data=values, chunks=(4, 3))


class Lines:
    """The least that counts as an array: a shape and slices, here of nested lists."""

    def __init__(self, values):
        self.lines = values.tolist()
        self.shape = values.shape
        self.asked = []

    def __getitem__(self, rows):
        self.asked.append((rows.start, rows.stop))
        return self.lines[rows]


MAKERS = {
    "ndarray": lambda values, _: values,
    "transposed": lambda values, _: np.asfortranarray(values),
    "strided": lambda values, _: np.repeat(np.repeat(values, 2, 0), 3, 1)[::2, ::3],
    "big-endian": lambda values, _: values.astype(values.dtype.newbyteorder(">")),
    "memmap": as_memmap,
    "zarr": as_zarr,
    "tensor": lambda values, _: torch.from_numpy(values),
    "transposed tensor": lambda values, _: torch.from_numpy(values.T.copy()).T,
    "parameter": lambda values, _: torch.nn.Parameter(torch.from_numpy(values)),
    "graph": lambda values, _: torch.from_numpy(values).requires_grad_() * 1.0,
    "slices only": lambda values, _: Lines(values),
}


@pytest.mark.parametrize("block_rows", [1, 4, 7, 23, 1000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("maker", MAKERS)
def test_any_array_is_read_block_by_block(maker, dtype, block_rows, tmp_path):
    values = sample(dtype=dtype)
    source = FromArray(MAKERS[maker](values, tmp_path))
    assert (source.rows, source.dim) == (23, 5)
    np.testing.assert_array_equal(collect(source, block_rows), values.astype(np.float32))


@pytest.mark.parametrize("maker", MAKERS)
def test_blocks_belong_to_the_caller(maker, tmp_path):
    values = sample(dtype=np.float32)
    array = MAKERS[maker](values, tmp_path)
    expected = values.copy()
    for _, block in FromArray(array).blocks(10):
        assert type(block) is np.ndarray
        assert block.dtype == np.float32
        assert block.flags.c_contiguous
        block[:] = 7.0
    np.testing.assert_array_equal(collect(FromArray(array), 10), expected)
    np.testing.assert_array_equal(values, expected)


def test_bfloat16_tensors_are_read():
    values = torch.from_numpy(sample(dtype=np.float32)).bfloat16()
    np.testing.assert_array_equal(collect(FromArray(values), 6), values.float().numpy())


def test_no_more_than_a_block_is_asked_for():
    lines = Lines(sample())
    blocks = FromArray(lines).blocks(8)
    assert lines.asked == []
    next(blocks)
    assert lines.asked == [(0, 8)]
    assert len(list(blocks)) == 2
    assert lines.asked == [(0, 8), (8, 16), (16, 23)]


def test_strict_floating_point_settings_do_not_disturb_a_conversion():
    values = np.array([[1e-300, 1.0]])
    with np.errstate(all="raise"):
        assert collect(FromArray(values), 1).tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("maker", ["ndarray", "tensor", "zarr"])
def test_a_row_that_is_not_finite_is_named(maker, number, tmp_path):
    values = sample(dtype=np.float32)
    values[17, 2] = number
    values[20, 0] = number
    blocks = FromArray(MAKERS[maker](values, tmp_path)).blocks(10)
    assert next(blocks)[0] == 0
    with pytest.raises(ValueError, match=f"row 17 of the array holds {number} at element 2, .*: replace"):
        next(blocks)


@pytest.mark.parametrize("maker", ["ndarray", "tensor"])
def test_a_number_too_large_for_float32_is_refused(maker, tmp_path):
    values = sample()
    values[3, 4] = -1e39
    with pytest.raises(ValueError, match=r"row 3 of the array holds -inf at element 4, .* clip"):
        collect(FromArray(MAKERS[maker](values, tmp_path)), 10)


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.zeros(3), ValueError, r"shape \(3,\) and is no table: reshape it to \(rows, dim\)"),
        (np.zeros((3, 2, 1)), ValueError, r"shape \(3, 2, 1\)"),
        (np.float32(1.0), ValueError, r"shape \(\)"),
        (np.zeros((3, 0)), ValueError, r"shape \(3, 0\) and is no table: reshape"),
        (np.zeros((0, 3)), ValueError, r"shape \(0, 3\)"),
        (torch.zeros(3), ValueError, r"shape \(3,\)"),
        (torch.zeros(3, 0), ValueError, r"shape \(3, 0\)"),
        (np.zeros((3, 2), np.int64), TypeError, r"holds int64: .* convert it with \.astype\('float32'\)"),
        (np.zeros((3, 2), np.uint8), TypeError, "holds uint8"),
        (np.zeros((3, 2), bool), TypeError, "holds bool"),
        (np.zeros((3, 2), np.complex64), TypeError, "holds complex64"),
        (np.zeros((3, 2), object), TypeError, "holds object"),
        (np.zeros((3, 2), "U1"), TypeError, "holds <U1"),
        (
            torch.zeros(3, 2, dtype=torch.int32),
            TypeError,
            r"holds torch.int32: .* convert it with \.float\(\)",
        ),
        (torch.zeros(3, 2, dtype=torch.bool), TypeError, "holds torch.bool"),
        (torch.zeros(3, 2, dtype=torch.complex64), TypeError, "holds torch.complex64"),
        (torch.zeros(3, 2, device="meta"), ValueError, "meta device and holds no numbers: pass dsa.init"),
        (torch.zeros(3, 2).to_sparse(), TypeError, r"torch.sparse_coo: convert it with \.to_dense\(\)"),
        ([[1.0, 2.0]], TypeError, r"'list' is not an array: .* numpy\.asarray\(list\)"),
        (None, TypeError, "'NoneType' is not an array"),
        ("normal", TypeError, "'str' is not an array"),
    ],
)
def test_arrays_that_are_refused(array, error, message):
    with pytest.raises(error, match=message):
        FromArray(array)
    with pytest.raises(error, match=message):
        as_initializer(array)


def test_the_numbers_of_an_array_without_a_dtype_are_checked_as_they_come():
    with pytest.raises(TypeError, match="holds int64"):
        collect(FromArray(Lines(np.zeros((3, 2), np.int64))), 2)


def test_slices_of_another_shape_are_refused():
    lines = Lines(sample(rows=4, dim=3))
    lines.shape = (6, 3)
    blocks = FromArray(lines).blocks(5)
    with pytest.raises(
        ValueError, match=r"slice \[0:5\] of the array has shape \(4, 3\): .* rows of 3 numbers"
    ):
        next(blocks)


def test_a_block_has_at_least_one_row():
    with pytest.raises(ValueError, match="block_rows=0 is out of range: pass at least 1"):
        FromArray(sample()).blocks(0)


# What an optimizer accepts


def test_as_initializer_keeps_initialisers_and_wraps_arrays():
    source = FromArray(sample())
    for value in (*RULES, source):
        assert as_initializer(value) is value
    array = sample()
    assert as_initializer(array).array is array
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert as_initializer(parameter).array is parameter


def test_lazy_rules_are_told_from_arrays_by_the_union():
    assert all(isinstance(rule, init.Initializer) for rule in RULES)
    assert not isinstance(FromArray(sample()), init.Initializer)


def test_this_floor_leaves_torch_alone():
    # The package's own __init__ imports the optimizers, so an empty package stands in for it.
    program = """
import sys, types
import numpy as np
package = sys.modules["dsa"] = types.ModuleType("dsa")
package.__path__ = [sys.argv[1]]
from dsa.rules.init import as_initializer
assert len(list(as_initializer(np.ones((2, 2))).blocks(1))) == 2
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(Path(init.__file__).parents[1])], check=True)
