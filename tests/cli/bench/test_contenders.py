"""The contenders do the same work: their steps give the same tables."""

import numpy as np
import pytest
import torch

from dsa.cli.bench.ball_contenders import Geoopt, KernelAlone, load_geoopt, start_in_ball
from dsa.cli.bench.baselines import Naive, SparseAdam, Touch, naive_bytes, touch_bytes
from dsa.cli.bench.batches import Batch, UniformBatches, batch_of
from dsa.cli.bench.loop import all_in_memory, all_on_disk, state_on_disk
from dsa.cli.bench.ours import Ours
from dsa.rules.init import Zeros

ROWS, DIM = 60, 5


def run(contender, batches):
    for batch in batches:
        contender.prepare(batch)
        contender.step()
    return contender.weights()


def uniform(size, count):
    """Batches with duplicates."""
    source = UniformBatches(ROWS, DIM, size, seed=3)
    return [source.make(number) for number in range(count)]


def test_the_naive_layout_takes_the_same_steps(tmp_path):
    ours, naive = Ours(tmp_path / "ours", Zeros(ROWS, DIM)), Naive(tmp_path, ROWS, DIM)
    batches = uniform(40, 12)
    np.testing.assert_allclose(run(ours, batches), run(naive, batches), rtol=2e-5, atol=1e-7)
    assert np.abs(ours.weights()).max() > 5e-3
    ours.close()
    naive.close()


def test_torch_takes_the_same_steps_where_every_row_is_in_every_batch(tmp_path):
    # torch counts the steps of the parameter, dsa those of the row
    ours, sparse = Ours(tmp_path, Zeros(ROWS, DIM)), SparseAdam(ROWS, DIM)
    batches = [batch_of(np.random.default_rng(i).permutation(ROWS), DIM, seed=i) for i in range(8)]
    # and it adds eps before the bias correction, which shows where a gradient is small
    np.testing.assert_allclose(run(ours, batches), run(sparse, batches), rtol=1e-3, atol=5e-5)
    assert np.abs(sparse.weights()).max() > 3e-3
    ours.close()


@pytest.mark.parametrize("durability", ["none", "process", "power"])
def test_the_durability_changes_no_result(tmp_path, durability):
    ours = Ours(tmp_path / durability, Zeros(ROWS, DIM), durability=durability)
    plain = Ours(tmp_path / "plain", Zeros(ROWS, DIM))
    batches = uniform(40, 3)
    np.testing.assert_array_equal(run(ours, batches), run(plain, batches))
    ours.close()
    plain.close()


def test_the_backend_changes_no_result(tmp_path):
    ours = Ours(tmp_path / "zarr", Zeros(ROWS, DIM), backend="zarr")
    plain = Ours(tmp_path / "plain", Zeros(ROWS, DIM))
    batches = uniform(40, 3)
    np.testing.assert_array_equal(run(ours, batches), run(plain, batches))
    assert ours.file_bytes() > ROWS * DIM * 12
    ours.close()
    plain.close()


@pytest.mark.parametrize("which", ["state", "process", "none"])
def test_the_loops_train_alike(tmp_path, which):
    torchs = all_in_memory(ROWS, DIM)
    ours = state_on_disk(tmp_path, ROWS, DIM) if which == "state" else all_on_disk(tmp_path, ROWS, DIM, which)
    for seed in range(6):  # every row in every batch, see above
        batch = batch_of(np.random.default_rng(seed).permutation(ROWS), DIM, seed)
        for loop in (torchs, ours):
            loop.prepare(batch)
            loop.step()
    ids = torch.arange(ROWS)
    with torch.no_grad():
        found, expected = (loop.module(ids, ids) for loop in (ours, torchs))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=5e-5)
    assert expected.abs().max() > 3e-3
    ours.flush()
    assert ours.file_bytes() > ROWS * DIM * 8
    assert torchs.file_bytes() == 0
    ours.close()
    torchs.close()


@pytest.mark.parametrize(
    ("theirs", "second_moment", "v_transport"),
    [("row", "row", "tensor"), ("coordinate", "coordinate", "sqrt")],
)
def test_geoopt_takes_the_same_steps_on_the_ball(tmp_path, theirs, second_moment, v_transport):
    geoopt = load_geoopt()
    assert geoopt is not None
    ours = Ours(
        tmp_path, start_in_ball(ROWS, DIM), k=1.0, second_moment=second_moment, v_transport=v_transport
    )
    other = Geoopt(geoopt, ROWS, DIM, theirs)
    first = other.weights().copy()
    np.testing.assert_array_equal(ours.weights(), first)
    batches = uniform(40, 6)
    np.testing.assert_allclose(run(ours, batches), run(other, batches), rtol=2e-4, atol=2e-6)
    assert np.abs(ours.weights() - first).max() > 1e-3
    ours.close()
    other.close()


def test_touching_changes_nothing(tmp_path):
    touch = Touch(tmp_path, ROWS, DIM)
    path = tmp_path / "touch.dat"
    touch.flush()
    content = np.random.default_rng(0).bytes(path.stat().st_size)
    path.write_bytes(content)
    for batch in uniform(40, 3):
        touch.prepare(batch)
        touch.step()
    touch.close()
    assert path.read_bytes() == content
    assert touch.file_bytes() == touch_bytes(ROWS, DIM) == len(content)


def test_the_kernel_alone_takes_steps():
    kernel = KernelAlone("kernel", "the kernel", DIM, "row", "tensor")
    kernel.prepare(Batch(torch.arange(40), torch.ones(40, DIM)))
    kernel.step()
    kernel.step()
    assert kernel._records["t"].tolist() == [2] * 40
    kernel.prepare(Batch(torch.arange(20), torch.ones(20, DIM)))
    assert len(kernel._records) == 20


@pytest.mark.parametrize("drop", [False, True])
def test_opening_again_keeps_everything(tmp_path, drop):
    ours, naive = Ours(tmp_path / "ours", Zeros(ROWS, DIM)), Naive(tmp_path, ROWS, DIM)
    batches = uniform(40, 4)
    for contender in (ours, naive):
        before = run(contender, batches).copy()
        contender.reopen(drop=drop)
        np.testing.assert_array_equal(contender.weights(), before)
        contender.close()
    assert naive.file_bytes() == naive_bytes(ROWS, DIM)


def test_the_naive_layout_opens_files_made_earlier(tmp_path):
    naive = Naive(tmp_path, ROWS, DIM)
    before = run(naive, uniform(40, 2)).copy()
    naive.close()
    again = Naive(tmp_path, ROWS, DIM, resume=True)
    np.testing.assert_array_equal(again.weights(), before)
    again.close()
