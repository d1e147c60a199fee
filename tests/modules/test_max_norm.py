"""`max_norm`: a row that was scaled down and stored stays as it is, so that a repeated forward is one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsa import DiskEmbedding, DiskSparseAdam, init
from dsa.optimizers.lookup import clip_rows

ORDERS = [0.01, 0.5, 1.0, 2.0, 3.0, 7.0, math.inf]
LIMITS = [0.0, 1e-45, 1e-40, 1e-20, 1e-7, 0.3, 1.0, 20.0, 1e10, 3e38, 1e300, math.inf]
SCALES = [1e-44, 1e-38, 1e-10, 1.0, 20.0, 1e30, 1e37]


def torchs(values, max_norm, order):
    """The formula of `torch.embedding_renorm_`."""
    norms = np.linalg.norm(values.astype(np.float64), ord=order, axis=1)
    scale = np.where(norms > max_norm, max_norm / (norms + 1e-7), 1.0)
    return values * scale[:, None].astype(np.float32), scale


@given(
    order=st.sampled_from(ORDERS),
    max_norm=st.sampled_from(LIMITS) | st.floats(0.0, 1e30),
    std=st.sampled_from(SCALES),
    dim=st.integers(1, 140),
    seed=st.integers(0, 2**32),
)
def testclip_rowsped_rows_are_notclip_rowsped_again(order, max_norm, std, dim, seed):
    with np.errstate(all="ignore"):
        draws = np.random.default_rng(seed).standard_normal((40, dim))
        given_values = np.nan_to_num(draws * std).astype(np.float32)
        values = given_values.copy()
        changed = clip_rows(values, max_norm, order)
        once = values.copy()
        assert len(clip_rows(values, max_norm, order)) == 0
        for each in range(40):  # in another batch the same row is the same
            assert len(clip_rows(values[each : each + 1], max_norm, order)) == 0
        assert values.tobytes() == once.tobytes()
        untouched = np.setdiff1d(np.arange(40), changed)
        assert (once[untouched] == given_values[untouched]).all()
        expected, scale = torchs(given_values, max_norm, order)
        ordinary = (scale > 1e-30) & (np.abs(expected).max(axis=1) > 1e-30)
        np.testing.assert_allclose(once[ordinary], expected[ordinary], rtol=5e-7, atol=1e-36)


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, math.inf])
def test_a_forward_that_is_repeated_after_a_kill_changes_nothing(tmp_path, order):
    rows = np.arange(2_000)

    def build(where, resume=None):
        source = init.Normal(2_000, 16, std=20.0, seed=1)
        layer = DiskEmbedding(
            2_000, 16, max_norm=20.0, norm_type=order, state_dir=where, init=source, resume=resume
        )
        return layer, DiskSparseAdam(layer.parameters(), lr=0.1)

    def forward(layer):
        return layer(torch.from_numpy(rows)).pow(3).sum()

    def run(where, kills):
        layer, optimizer = build(where)
        loss = forward(layer)
        for _ in range(kills):
            layer.weight.state.abandon()
            layer, optimizer = build(where, resume=True)
            loss = forward(layer)
        loss.backward()
        optimizer.step()
        records = layer.weight.table.backend.read(rows)
        optimizer.close()
        return records.tobytes()

    once = run(tmp_path / "once", 0)
    assert run(tmp_path / "killed", 1) == once
    assert run(tmp_path / "killed twice", 2) == once


@pytest.mark.parametrize("order", [0.0, -1.0, math.nan, -math.inf])
def test_what_is_no_norm(tmp_path, order):
    with pytest.raises(ValueError, match=r"norm_type=.* is the p of no norm: pass a number > 0"):
        DiskEmbedding(4, 2, max_norm=1.0, norm_type=order, state_dir=tmp_path / "state")
    assert not (tmp_path / "state").exists()
