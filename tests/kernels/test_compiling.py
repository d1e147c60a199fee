"""The first step of a machine says that kernels are being compiled; a later process loads them."""

import os
import subprocess
import sys

STEP = """
import sys, numpy as np
from dsa import DiskSparseRiemannianAdam, init
with DiskSparseRiemannianAdam({"a": init.Zeros(10, 2)}, k=0.0, disk_dir=sys.argv[1]) as optimizer:
    optimizer.step({"a": ([1], np.ones((1, 2), np.float32))})
"""


def run(tmp_path, name):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", STEP, str(tmp_path / name)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stderr


def test_it_says_so_once(tmp_path):
    assert run(tmp_path, "first").count("compiling its kernels, once on this machine") == 1
    assert run(tmp_path, "second") == ""
