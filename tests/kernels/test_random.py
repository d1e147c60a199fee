"""The counter-based generator: the published vectors, independent oracles, frozen values, statistics."""

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa.kernels import random
from dsa.kernels.random import MAX_NORMAL, fill_normal, fill_uniform, philox4x32, standard_normal
from dsa.schema import adam_schema
from tests.kernels.oracles import oracle_philox

FILLS = [fill_normal, fill_uniform]
KEYS = [0, 1, 39_999_999, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, -1, -(2**63)]
SEEDS = [0, 1, 2**32, 2**63 + 11, 2**64 - 1]
DIMS = [1, 2, 3, 4, 5, 8, 127, 128]

# (key, seed): the float32 patterns of the first five elements.
FROZEN_NORMAL = {
    (0, 0): [0xBE82FA50, 0x3F96BB4F, 0x3F2153B7, 0x3E88FDEB, 0x3D2B4C1F],
    (1, 0): [0x3FF51846, 0xBEB4AC05, 0x3F01CC4F, 0xBFE489AA, 0x3F4F4E56],
    (39_999_999, 0): [0xBF878E01, 0x3E8EBF4C, 0xBD76C793, 0x3F6C897F, 0xBF73C313],
    (2**32 + 5, 2**63 + 11): [0xBEA1A529, 0x3EB2A70D, 0x3F155794, 0x3F072A0E, 0xBBB5AA34],
    (-1, 2**64 - 1): [0xBF056498, 0xBF233683, 0x3F23EA12, 0xBFDBEA30, 0x3DED3602],
    (2**63 - 1, 20240229): [0x3EF051EC, 0xBEF96231, 0x3EDB129C, 0xBEC0DAB8, 0xBF90D0A0],
}
FROZEN_UNIFORM = {
    (0, 0): [0x3ECC4FD2, 0x3F6169C6, 0x3F3C57AC, 0x3F1B00DC, 0x3F044516],
    (1, 0): [0x3F78E4CD, 0x3EB96402, 0x3F31A575, 0x3D17EFF6, 0x3F4A7CF7],
    (39_999_999, 0): [0x3E144529, 0x3F1C1BFD, 0x3EF3B37B, 0x3F527EF7, 0x3E2E9747],
    (2**32 + 5, 2**63 + 11): [0x3EC09181, 0x3F22ED09, 0x3F385D86, 0x3F3384D0, 0x3EFEDE1B],
    (-1, 2**64 - 1): [0x3E9A31B0, 0x3E86158D, 0x3F3D2FA2, 0x3D2FAE11, 0x3F0BCD84],
    (2**63 - 1, 20240229): [0x3F2E3BC0, 0x3EA04EE1, 0x3F2A66B1, 0x3EB4D7EE, 0x3E040B91],
}
# Word: the float64 quantile, to the last bit.
FROZEN_QUANTILES = {
    0: "-0x1.95a1198fcf3d4p+2",
    12345: "-0x1.22445dd52d97ap+2",
    322122546: "-0x1.708522723041ap+0",
    322122547: "-0x1.7085226b1fc71p+0",
    1500000000: "-0x1.8ca750609fe18p-2",
    2**31: "0x1.40d931ff62707p-32",
    3000000001: "0x1.0a465c7068c57p-1",
}
# SHA-256 of 2,048 rows of 128, little endian.
FROZEN_TABLES = {
    fill_normal: "996aff16319176ad909ccd662cdcbecedc19f62c084c483f57131b1310ece064",
    fill_uniform: "5455e7f8c73d52873ad6d2355f3c098c0fb98f9340d06b6084510dd8f1b8a9a2",
}


def oracle_probabilities(key, seed, dim):
    """The probabilities u of a row's elements, as exact floats."""
    pattern = key % 2**64
    words = []
    for block in range(-(-dim // 4)):
        counter = [pattern % 2**32, pattern // 2**32, block, 0]
        words += oracle_philox(counter, [seed % 2**32, seed // 2**32])
    return [(word + 0.5) / 2**32 for word in words[:dim]]


def generate(fill, keys, seed, dim, **options):
    out = np.full((len(keys), dim), np.nan, np.float32)
    fill(np.array(keys, np.int64), seed, out, **options)
    return out


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert list(philox4x32(*map(np.uint64, counter + key))) == expected
    assert oracle_philox(counter, key) == expected


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_agrees_with_python_integers(words):
    assert list(philox4x32(*map(np.uint64, words))) == oracle_philox(words[:4], words[4:])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", DIMS)
def test_uniform_is_the_rounded_probability(dim, seed):
    rows = generate(fill_uniform, KEYS, seed, dim)
    expected = np.array([oracle_probabilities(key, seed, dim) for key in KEYS])
    np.testing.assert_array_equal(rows, expected.astype(np.float32))
    scaled = generate(fill_uniform, KEYS, seed, dim, low=-0.25, high=0.5)
    np.testing.assert_array_equal(scaled, (-0.25 + 0.75 * expected).astype(np.float32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dim", DIMS)
def test_normal_is_the_quantile_of_the_probability(dim, seed):
    inverse = NormalDist().inv_cdf
    expected = np.array([[inverse(u) for u in oracle_probabilities(key, seed, dim)] for key in KEYS])
    for mean, std in ((0.0, 1.0), (-2.0, 0.01)):
        rows = generate(fill_normal, KEYS, seed, dim, mean=mean, std=std)
        np.testing.assert_array_max_ulp(rows, (mean + std * expected).astype(np.float32), maxulp=1)


def test_quantile_agrees_with_fifty_digits():
    # 322122547 is about where |u - 1/2| passes 0.425.
    edges = [0, 1, 2, 3, 1000, 322122546, 322122547, 322122548, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    words = edges + np.random.default_rng(0).integers(0, 2**32, 300).tolist()
    with mpmath.workdps(50):
        for word in words:
            u = (mpmath.mpf(word) + 0.5) / 2**32
            exact = mpmath.sqrt(2) * mpmath.erfinv(2 * u - 1)
            assert abs(standard_normal(np.uint32(word)) / exact - 1) < 2e-15


@given(st.integers(0, 2**32 - 1))
def test_quantile_is_odd_and_bounded(word):
    value = standard_normal(np.uint32(word))
    assert value == -standard_normal(np.uint32(2**32 - 1 - word))
    assert 0.0 < abs(value) < MAX_NORMAL
    assert (value > 0.0) == (word >= 2**31)


@pytest.mark.parametrize(("fill", "frozen"), [(fill_normal, FROZEN_NORMAL), (fill_uniform, FROZEN_UNIFORM)])
def test_values_are_those_of_every_release(fill, frozen):
    for (key, seed), patterns in frozen.items():
        assert generate(fill, [key], seed, 5).view(np.uint32)[0].tolist() == patterns
    table = generate(fill, 1_000_003 * np.arange(2048), 5, 128)
    assert hashlib.sha256(table.astype("<f4").tobytes()).hexdigest() == FROZEN_TABLES[fill]


def test_quantiles_are_those_of_every_release():
    for word, pattern in FROZEN_QUANTILES.items():
        assert standard_normal(np.uint32(word)).hex() == pattern


def test_the_compiler_fuses_and_reorders_nothing():
    # Plain Python, with the compiler off, says what z is to the last bit of float64. A mean of -(std z) then
    # leaves exactly zero, where float32 would hide a difference.
    program = """
import sys
import numpy as np
from dsa.kernels.random import standard_normal
for word in sys.argv[1:]:
    print(float(standard_normal(np.uint32(word))).hex())
"""
    words = [int(u * 2**32) for u in oracle_probabilities(7, 2**64 - 3, 128)]
    root = str(Path(random.__file__).parents[2])
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": root}
    command = [sys.executable, "-W", "error", "-c", program, *map(str, words)]
    lines = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    exact = [float.fromhex(line) for line in lines]
    assert [standard_normal(np.uint32(word)) for word in words] == exact
    for j, z in enumerate(exact):
        assert generate(fill_normal, [7], 2**64 - 3, 128, mean=-(0.3 * z), std=0.3)[0, j] == 0.0


@pytest.mark.parametrize("fill", FILLS)
@given(data=st.data())
def test_a_row_does_not_depend_on_its_batch(fill, data):
    keys = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=12))
    seed = data.draw(st.integers(0, 2**64 - 1))
    dim = data.draw(st.sampled_from(DIMS))
    order = data.draw(st.permutations(range(len(keys))))
    cut = data.draw(st.integers(0, len(keys)))
    together = generate(fill, keys, seed, dim)
    shuffled = generate(fill, [keys[i] for i in order], seed, dim)
    split = np.concatenate([generate(fill, keys[:cut], seed, dim), generate(fill, keys[cut:], seed, dim)])
    np.testing.assert_array_equal(shuffled, together[list(order)])
    np.testing.assert_array_equal(split, together)


@pytest.mark.parametrize("fill", FILLS)
def test_an_element_does_not_depend_on_the_dimension(fill):
    widest = generate(fill, KEYS, 3, 128)
    for dim in DIMS:
        np.testing.assert_array_equal(generate(fill, KEYS, 3, dim), widest[:, :dim])


@pytest.mark.parametrize("fill", FILLS)
def test_only_the_named_positions_of_a_record_field_are_written(fill):
    records = np.zeros(6, adam_schema(dim=5).dtype)
    records.view(np.uint8)[:] = 0xAB
    before = records.copy()
    keys, positions = np.array([70, 2**40, 9]), np.array([4, 0, 3])
    fill(keys, 11, records["w"], positions=positions)
    np.testing.assert_array_equal(records["w"][positions], generate(fill, keys, 11, 5))
    before["w"][positions] = records["w"][positions]
    assert records.tobytes() == before.tobytes()


@pytest.mark.parametrize("fill", FILLS)
def test_no_holes_write_nothing(fill):
    out = np.ones((3, 2), np.float32)
    fill(np.array([], np.int64), 0, out, positions=np.array([], np.int64))
    assert (out == 1.0).all()
    fill(np.array([], np.int64), 0, np.empty((0, 2), np.float32))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("out_strides", ["reversed", "transposed", "every second"])
def test_any_strides_are_filled(fill, out_strides):
    out = {
        "reversed": np.zeros((4, 5), np.float32)[::-1, ::-1],
        "transposed": np.zeros((5, 4), np.float32).T,
        "every second": np.zeros((8, 10), np.float32)[::2, ::2],
    }[out_strides]
    keys = np.arange(8)[::2]
    keys.flags.writeable = False
    fill(keys, 5, out)
    np.testing.assert_array_equal(out, generate(fill, [0, 2, 4, 6], 5, 5))


@pytest.mark.parametrize("fill", FILLS)
def test_what_does_not_fit_is_refused_and_nothing_is_written(fill):
    out = np.zeros((3, 2), np.float32)
    keys = np.arange(2)
    frozen = out.copy()
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="out is float64, keys are int64"):
        fill(keys, 0, out.astype(np.float64))
    with pytest.raises(TypeError, match="keys are int32"):
        fill(keys.astype(np.int32), 0, out)
    with pytest.raises(TypeError, match="positions uint8"):
        fill(keys, 0, out, positions=np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match=r"keys \(2,\) and positions \(3,\): pass .* one key for each row"):
        fill(keys, 0, out)
    with pytest.raises(ValueError, match=r"out has shape \(6,\)"):
        fill(keys, 0, out.ravel())
    with pytest.raises(ValueError, match=r"read-only: pass .* out\.copy\(\)"):
        fill(np.arange(3), 0, frozen)
    with pytest.raises(IndexError, match="from 1 to 3 but out has 3 rows"):
        fill(keys, 0, out, positions=np.array([1, 3]))
    with pytest.raises(IndexError, match="from -1 to 0"):
        fill(keys, 0, out, positions=np.array([0, -1]))
    for seed in (-1, 2**64):
        with pytest.raises(OverflowError):
            fill(np.arange(3), seed, out)
    assert not out.any()


def kolmogorov(values, distribution):
    """sqrt(n) times the largest distance between empirical and exact distribution function."""
    exact = np.array([distribution(value) for value in np.sort(values.ravel()).tolist()])
    steps = np.arange(len(exact) + 1) / len(exact)
    return math.sqrt(len(exact)) * max(np.max(steps[1:] - exact), np.max(exact - steps[:-1]))


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 11])
def test_distributions(seed):
    # 1.95 is exceeded by chance once in a thousand samples; the seeds are fixed, so this never flickers.
    keys = range(10_000_000, 10_000_400)
    normal = generate(fill_normal, keys, seed, 127, mean=0.5, std=2.0)
    uniform = generate(fill_uniform, keys, seed, 127, low=-3.0, high=1.0)
    assert kolmogorov(normal, NormalDist(0.5, 2.0).cdf) < 1.95
    assert kolmogorov(uniform, lambda value: (value + 3.0) / 4.0) < 1.95


def test_moments():
    values = generate(fill_normal, range(8192), 4, 128).astype(np.float64)
    n = values.size
    # Standard errors of the mean, variance, skewness and kurtosis of n normal numbers, four of each.
    assert abs(values.mean()) < 4 * math.sqrt(1 / n)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Six standard errors for the largest of 8,192 row means and of 128 column means.
    assert np.abs(values.mean(axis=1)).max() < 6 / math.sqrt(128)
    assert np.abs(values.mean(axis=0)).max() < 6 / math.sqrt(8192)


def test_neighbouring_rows_elements_and_seeds_are_uncorrelated():
    values = generate(fill_normal, range(2048), 0, 128).astype(np.float64)
    others = generate(fill_normal, range(2048), 1, 128).astype(np.float64)
    far = generate(fill_normal, [2**32 + row for row in range(2048)], 0, 128).astype(np.float64)
    pairs = [(values[1:], values[:-1]), (values, others), (values, far)]
    pairs += [(values[:, lag:], values[:, :-lag]) for lag in (1, 2, 3, 4)]
    for left, right in pairs:
        assert abs((left * right).mean()) < 5 / math.sqrt(left.size)
