"""What the fused passes promise for any bytes and any batch.

No crash, no silent nonsense, and no dependence of a row's result on the company that it is updated in.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sampling import at_radius, fresh_records, used_records

from dsa.kernels.adam import adam_step
from dsa.kernels.poincare import riemannian_adam_step
from dsa.kernels.report import merge_reports
from dsa.kernels.threads import run_slices, thread_limit
from dsa.rules.conventions import AdamOptions
from dsa.schema import adam_schema

LAST = 2**31 - 1
FLAT = {"flat": {}, "flat, row": {"second_moment": "row"}}
BALL = {
    "ball": {},
    "ball, sqrt": {"v_transport": "sqrt"},
    "ball, frame": {"second_moment": "frame"},
    "ball, row": {"second_moment": "row"},
}
KERNELS = FLAT | BALL
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


def update(kernel, records, grad, stamp=5, threads=1, **changes):
    """Run the kernel of that name in place, on slices for several threads, and return the merged report."""
    options = AdamOptions(**({"lr": 1e-2} | KERNELS[kernel] | changes))

    def run(start, stop):
        part = records[start:stop], grad[start:stop], options
        if kernel in FLAT:
            report = adam_step(*part, stamp=stamp, step=3)
        else:
            report = riemannian_adam_step(*part, k=1.0, stamp=stamp, step=3)
        return report._replace(bad=start + report.bad if report.bad >= 0 else -1)

    with thread_limit(threads):
        return merge_reports(run_slices(run, len(records)))


def second_moment(kernel):
    return KERNELS[kernel].get("second_moment", "coordinate")


def dtype_of(kernel, dim):
    per = "row" if second_moment(kernel) == "row" else "element"
    return adam_schema(dim, second_moment_per=per).dtype


def is_plausible(record):
    """Tell whether training could have produced a record."""
    numbers = np.concatenate([np.atleast_1d(record[name]) for name in "wmv"])
    return bool(
        np.isfinite(numbers).all() and np.min(record["v"]) >= 0 and record["t"] >= 0 and record["s"] >= 0
    )


def check_report(kernel, before, after, grad, report, **changes):
    """The report names the first row that fails by itself, and all is well when it names none."""
    alone = [
        update(kernel, before[i : i + 1].copy(), grad[i : i + 1], **changes).bad for i in range(len(before))
    ]
    failing = [i for i, bad in enumerate(alone) if bad == 0]
    assert report.bad == (failing[0] if failing else -1)
    for i, record in enumerate(before):
        if not is_plausible(record):
            assert i in failing
    if report.bad == -1:
        assert all(map(is_plausible, after))
        np.testing.assert_array_equal(after["t"], np.minimum(before["t"].astype(np.int64) + 1, LAST))
        np.testing.assert_array_equal(after["s"], 5)


# --- any bytes ------------------------------------------------------------------------------------


@every_kernel
@given(data=st.data(), dim=st.integers(1, 5), rows=st.integers(1, 5))
def test_random_bytes_never_crash(kernel, data, dim, rows):
    dtype = dtype_of(kernel, dim)
    raw = data.draw(st.binary(min_size=rows * dtype.itemsize, max_size=rows * dtype.itemsize))
    before = np.frombuffer(raw, dtype)
    records = before.copy()
    grad = np.ones((rows, dim), np.float32)
    check_report(kernel, before, records, grad, update(kernel, records, grad))


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
positive32s = st.floats(min_value=0.0, width=32, allow_nan=False, allow_infinity=False)
rates = st.sampled_from([0.0, 1e-3, 1.0, 1e3])
betas = st.sampled_from([0.0, 0.5, 0.9, 0.999, 0.9999999])
decays = st.sampled_from([0.0, 1e-2, 10.0])
floors = st.sampled_from([1e-30, 1e-8, 1.0])
decay_modes = st.sampled_from(["l2", "decoupled"])


@every_kernel
@given(
    data=st.data(), lr=rates, beta1=betas, beta2=betas, eps=st.sampled_from([1e-30, 1e-8, 1.0]), decay=decays
)
def test_finite_numbers_give_finite_numbers_or_a_report(kernel, data, lr, beta1, beta2, eps, decay):
    dim, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    before = np.zeros(rows, dtype_of(kernel, dim))
    for name, numbers in (("w", float32s), ("m", float32s), ("v", positive32s)):
        before[name] = data.draw(arrays(np.float32, before[name].shape, elements=numbers))
    before["v"] = np.abs(before["v"])  # -0.0 counts as a negative number
    before["t"] = data.draw(arrays(np.int32, rows, elements=st.integers(0, LAST)))
    grad = data.draw(arrays(np.float32, (rows, dim), elements=float32s))
    mode = data.draw(decay_modes)
    placement = data.draw(st.sampled_from(["corrected", "uncorrected"]))
    changes = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": decay,
        "weight_decay_mode": mode,
        "eps_placement": placement,
        "maximize": data.draw(st.booleans()),
        "max_step": data.draw(st.sampled_from([None, 1e-3, 2.0])),
    }
    records = before.copy()
    check_report(kernel, before, records, grad, update(kernel, records, grad, **changes), **changes)


moderate = st.floats(-1e3, 1e3, width=32)


@every_kernel
@given(data=st.data(), dim=st.integers(1, 6))
def test_plausible_numbers_of_ordinary_size_are_always_updated(kernel, data, dim):
    """No row of a healthy run may be refused: any weight in the ball, gradients up to 1000."""
    rows = 4
    before = np.zeros(rows, dtype_of(kernel, dim))
    before["w"] = data.draw(arrays(np.float32, (rows, dim), elements=st.floats(-1.0, 1.0, width=32)))
    before["m"] = data.draw(arrays(np.float32, (rows, dim), elements=moderate))
    before["v"] = data.draw(arrays(np.float32, before["v"].shape, elements=st.floats(0.0, 1e6, width=32)))
    before["v"] = np.abs(before["v"])
    before["t"] = data.draw(arrays(np.int32, rows, elements=st.integers(0, LAST - 1)))
    grad = data.draw(arrays(np.float32, (rows, dim), elements=moderate))
    changes = {
        "weight_decay": data.draw(decays),
        "weight_decay_mode": data.draw(st.sampled_from(["l2", "decoupled"])),
    }
    records = before.copy()
    assert update(kernel, records, grad, **changes).bad == -1
    assert all(map(is_plausible, records))
    if kernel in BALL:
        assert (np.linalg.norm(records["w"].astype(float), axis=1) <= 1 - 1e-5 + 1.2e-7).all()


# --- poisons --------------------------------------------------------------------------------------

POISONS = [
    *[(name, value) for name in ("w", "m", "v") for value in (np.nan, -np.nan, np.inf, -np.inf)],
    *[("v", -1.0), ("v", -1e-45), ("t", -1), ("t", -(2**31)), ("s", -1)],
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("field", "value"), POISONS)
@every_kernel
def test_a_poisoned_record_is_named_by_its_position(kernel, field, value, threads):
    rng = np.random.default_rng(0)
    healthy = used_records(rng, 0.1 * rng.normal(size=(1100, 3)), second_moment(kernel), 0.1)
    grad = rng.normal(size=(1100, 3)).astype(np.float32)
    for changes in ({}, {"beta1": 0.0, "beta2": 0.0}, {"lr": 0.0}):
        records = healthy.copy()
        for position in (800, 1090):
            if records[field].ndim == 2:
                records[field][position, 1] = value
            else:
                records[field][position] = value
        assert update(kernel, records, grad, threads=threads, **changes).bad == 800


@every_kernel
def test_the_first_of_several_poisoned_rows_is_named_whichever_thread_meets_it(kernel):
    rng = np.random.default_rng(0)
    records = fresh_records(0.1 * rng.normal(size=(2000, 2)), second_moment(kernel))
    records["t"][[300, 900, 1500]] = -5
    assert update(kernel, records, np.ones((2000, 2), np.float32), threads=2).bad == 300


@every_kernel
def test_a_counter_rests_at_its_last_value(kernel):
    """Bias corrections are 1 long before, so that the row goes on as it should."""
    records = fresh_records([[0.1, 0.2]], second_moment(kernel))
    records["t"] = LAST - 1
    grad = np.ones((1, 2), np.float32)
    assert update(kernel, records, grad, bias_correction="row").bad == -1
    assert records["t"] == LAST
    assert np.isfinite(records["w"]).all()
    assert (records["w"] < [[0.1, 0.2]]).all()
    moved = records["w"].copy()
    assert update(kernel, records, grad, bias_correction="row").bad == -1
    assert records["t"] == LAST
    assert (records["w"] < moved).all()


# --- the company of a row -------------------------------------------------------------------------


@every_kernel
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.sampled_from([1, 2, 3, 4, 7, 8, 16, 31, 64]),
    rows=st.sampled_from([1, 2, 5, 1024, 1300]),
)
def test_neither_threads_nor_order_nor_split_change_a_bit(kernel, seed, dim, rows):
    rng = np.random.default_rng(seed)
    weights = at_radius(rng, rows, dim, rng.choice([0.0, 0.3, 0.9, 0.999, 0.99999], rows), 1.0)
    before = used_records(rng, weights, second_moment(kernel), 1e-3)
    grad = rng.normal(size=(rows, dim)).astype(np.float32)
    whole = before.copy()
    report = update(kernel, whole, grad)
    assert report.bad == -1

    threaded = before.copy()
    assert update(kernel, threaded, grad, threads=2) == report
    assert threaded.tobytes() == whole.tobytes()

    order = rng.permutation(rows)
    shuffled = before[order]
    assert update(kernel, shuffled, grad[order]) == report
    assert shuffled.tobytes() == whole[order].tobytes()

    cut = int(rng.integers(0, rows + 1))
    first, second = before[:cut].copy(), before[cut:].copy()
    parts = update(kernel, first, grad[:cut]), update(kernel, second, grad[cut:])
    assert first.tobytes() + second.tobytes() == whole.tobytes()
    assert parts[0].clamped + parts[1].clamped == report.clamped
    assert parts[0].far + parts[1].far == report.far
    assert max(parts[0].longest, parts[1].longest) == report.longest
