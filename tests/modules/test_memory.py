"""What tables on disk cost in memory, measured in processes of their own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from layers import weights

import dsa
from dsa import init

pytestmark = pytest.mark.disk

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read by means of Linux")

PREAMBLE = """
import json, sys
import torch
from dsa import DiskEmbedding, DiskSparseAdam, init

def memory(kind):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(kind)]
    return int(line.split()[1]) * 1024

directory = sys.argv[1]
torch.manual_seed(0)
"""


def measured(path, script):
    """Run a script in a new interpreter and return what it prints as JSON."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + textwrap.dedent(script), str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@linux
def test_twenty_million_rows_take_the_memory_of_their_batches(tmp_path):
    """5 GB of weights, 15.4 GB with the moments; a dense gradient alone would be 5 GB."""
    report = measured(
        tmp_path / "state",
        """
        rows, dim, batch = 20_000_000, 64, 2048
        rule = init.Normal(rows, dim, std=0.01, seed=1)
        before = memory("RssAnon")
        layer = DiskEmbedding(rows, dim, init=rule, state_dir=directory, allocate="sparse")
        optimizer = DiskSparseAdam(layer.parameters(), lr=0.01)
        highest, losses = 0, []
        for step in range(40):
            ids = torch.randint(0, rows, (batch,))
            optimizer.zero_grad()
            loss = (layer(ids) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            highest = max(highest, memory("RssAnon"))
        after = (layer(ids).detach() - 1.0).square().mean().item()
        optimizer.close()
        written = optimizer.stats()["rows_written"]
        print(json.dumps({"grown": highest - before, "losses": losses, "after": after, "written": written}))
        """,
    )
    assert report["grown"] <= 150e6
    assert report["written"] > 40 * 2000
    assert report["after"] < report["losses"][-1]


@linux
def test_c29_a_walk_over_all_rows_keeps_anonymous_memory_flat(tmp_path):
    report = measured(
        tmp_path / "state",
        """
        rows, dim, batch = 100_000, 64, 1000
        layer = DiskEmbedding(rows, dim, init=init.Zeros(rows, dim), state_dir=directory)
        optimizer = DiskSparseAdam(layer.parameters(), lr=0.1)
        taken = []
        for start in range(0, rows, batch):
            optimizer.zero_grad()
            layer(torch.arange(start, start + batch)).sum().backward()
            optimizer.step()
            taken.append(memory("RssAnon"))
        mapped = memory("RssFile")
        optimizer.close()
        released = mapped - memory("RssFile")
        print(json.dumps({"grown": max(taken) - taken[9], "released": released}))
        """,
    )
    size = 100_000 * (3 * 64 * 4 + 8)
    assert report["grown"] < 8e6
    assert report["released"] > 0.5 * size, "closing gives the mapped pages back"


def test_c60_weights_out_of_core_train_as_in_memory(make):
    """2 M x 64 on disk; in memory only the rows that the batches touch."""
    rows, dim, count = 2_000_000, 64, 1024
    rule = init.Normal(rows, dim, std=0.1, seed=3)
    layer = make.disk(rows, dim, init=rule, allocate="sparse")
    optimizer = make.adam(layer, lr=0.01)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:count]
    start = np.empty((count, dim), np.float32)
    rule.fill(ids.numpy(), start)
    twin = torch.nn.Embedding.from_pretrained(torch.from_numpy(start), freeze=False, sparse=True)
    reference = torch.optim.SparseAdam(twin.parameters(), lr=0.01)
    target = torch.randn(count, dim)
    for _ in range(10):
        for each, batch, method in ((layer, ids, optimizer), (twin, torch.arange(count), reference)):
            method.zero_grad()
            (each(batch) - target).square().sum().backward()
            method.step()
    with torch.no_grad():
        np.testing.assert_allclose(layer(ids), weights(twin), rtol=1e-6, atol=1e-7)
        again = layer(ids[[5, 5, 7, 5]])
        assert torch.equal(again[0], again[1])
        assert torch.equal(again[0], layer(ids[5]))
        untouched = torch.tensor([row for row in range(100) if row not in set(ids.tolist())])
        expected = np.empty((len(untouched), dim), np.float32)
        rule.fill(untouched.numpy(), expected)
        assert np.array_equal(layer(untouched), expected)
