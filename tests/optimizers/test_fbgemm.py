"""Adagrad beside FBGEMM itself, where it is installed: ``fbgemm-gpu-cpu==1.8.0`` loads with torch 2.13.

``python tests/optimizers/test_fbgemm.py`` prints the largest differences.
"""

import tempfile

import numpy as np
import pytest
import torch

import dsa

ROWS, DIM, STEPS = 48, 8, 100
NAMES = {"EXACT_ADAGRAD": False, "EXACT_ROWWISE_ADAGRAD": True}


def batches():
    """Ids with repeats, and gradients from 1e-4 to 10; some rows come once in ten steps."""
    draws = np.random.default_rng(0)
    for number in range(STEPS):
        ids = draws.integers(0, ROWS if number % 10 == 0 else ROWS // 2, int(draws.integers(1, 41)))
        grads = draws.normal(size=(len(ids), DIM)) * 10.0 ** draws.integers(-4, 2)
        yield torch.from_numpy(ids), torch.from_numpy(grads.astype(np.float32))


def differences(name, path):
    """The largest difference of weights, and of sums, each relative to the largest number."""
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    theirs = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=training.OptimType[name],
        learning_rate=0.05,
        eps=1e-8,
        pooling_mode=common.PoolingMode.NONE,
    )
    (weight,), ((sums, *_),) = theirs.split_embedding_weights(), theirs.split_optimizer_states()
    weight.data.copy_(start)
    state = "rowwise_adagrad" if NAMES[name] else "adagrad"
    ours = dsa.DiskEmbedding(ROWS, DIM, init=start, state_dir=path, name="table", state=state)
    with dsa.DiskSparseAdagrad(ours.parameters(), lr=0.05, eps=1e-8, row_wise=NAMES[name]) as optimizer:
        for ids, grads in batches():
            theirs(ids, torch.arange(len(ids) + 1)).backward(grads)
            optimizer.zero_grad()
            ours(ids).backward(grads)
            optimizer.step()
        ids = torch.arange(ROWS)
        pairs = [(weight[ids], ours(ids).detach())]
    with dsa.open_state(path) as stored:
        pairs.append((sums, torch.from_numpy(stored["table"].read(ids.numpy())["h"].copy())))
    return [float((a - b.reshape(a.shape)).abs().max() / a.abs().max()) for a, b in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_irregular_steps(name, tmp_path):
    assert max(differences(name, tmp_path)) < 2e-6


if __name__ == "__main__":
    for each in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            print(each, *(f"{difference:.1e}" for difference in differences(each, folder)))
