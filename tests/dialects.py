"""Adam as other systems compute it, restated in float64 one row at a time, and runs of theirs and ours.

Run by hand: ``python tests/dialects.py`` prints how far a hundred irregular steps of each dialect end from
its restatement. The formulas are read from the systems' sources, and from nothing of this package.
"""

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dsa import DiskSparseAdam, DiskSparseRiemannianAdam, conventions
from dsa.inspection import open_state

ROWS, DIM, STEPS = 48, 5, 100
NAMES = ("first", "second")
LATE = ROWS - 1
"""A row of the first and of the last step alone."""


class Numbers(NamedTuple):
    """Adam's numbers."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-4
    decay: float = 0.0


@dataclass
class Table:
    """What any of the systems keeps of a table."""

    w: np.ndarray
    v_shape: tuple = (ROWS, DIM)
    steps: int = 0
    products: list = field(default_factory=lambda: [1.0, 1.0])

    def __post_init__(self):
        self.m, self.v = np.zeros((ROWS, DIM)), np.zeros(self.v_shape)
        self.t = np.zeros(ROWS, int)
        self.row_products = np.ones((2, ROWS), np.float32)


def summed(rows, grads):
    for row in np.unique(rows):
        yield row, grads[rows == row].sum(axis=0, dtype=np.float64)


def averaged(rows, grads):
    for row in np.unique(rows):
        yield row, grads[rows == row].mean(axis=0, dtype=np.float64)


def torch_sparse_adam(table, rows, grads, n, iteration):
    table.steps += 1  # for an empty gradient too
    size = n.lr * math.sqrt(1 - n.beta2**table.steps) / (1 - n.beta1**table.steps)
    for row, g in summed(rows, grads):
        table.m[row] += (1 - n.beta1) * (g - table.m[row])
        table.v[row] += (1 - n.beta2) * (g**2 - table.v[row])
        table.w[row] -= size * table.m[row] / (np.sqrt(table.v[row]) + n.eps)


def torch_adam(table, rows, grads, n, iteration):
    table.steps += 1
    for row, g in summed(rows, grads):
        g = g + n.decay * table.w[row]
        _adam_of_the_paper(table, row, g, n, table.steps)


def torch_adamw(table, rows, grads, n, iteration):
    table.steps += 1
    for row, g in summed(rows, grads):
        table.w[row] *= 1 - n.lr * n.decay
        _adam_of_the_paper(table, row, g, n, table.steps)


def _adam_of_the_paper(table, row, g, n, t):
    table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
    table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * g**2
    m_hat, v_hat = table.m[row] / (1 - n.beta1**t), table.v[row] / (1 - n.beta2**t)
    table.w[row] -= n.lr * m_hat / (np.sqrt(v_hat) + n.eps)


def dsa_0_3_0(table, rows, grads, n, iteration):
    for row, g in summed(rows, grads):
        table.t[row] += 1
        _adam_of_the_paper(table, row, g + n.decay * table.w[row], n, table.t[row])


def dgl_sparse_adam(table, rows, grads, n, iteration):
    for row, g in averaged(rows, grads):
        table.t[row] += 1
        _adam_of_the_paper(table, row, g, n, table.t[row])


def _recis(table, rows, grads, n, number, factor):
    """Beta powers are products that are kept as `number`."""
    for i, beta in enumerate((n.beta1, n.beta2)):
        table.products[i] = number(number(table.products[i]) * number(beta))
    p1, p2 = map(float, table.products)
    alpha = n.lr * math.sqrt(1 - p2) / (1 - p1)
    for row, g in summed(rows, grads):
        table.w[row] *= factor
        table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
        table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * g**2
        table.w[row] -= alpha * table.m[row] / (np.sqrt(table.v[row]) + n.eps)


def recis_sparse_adam(table, rows, grads, n, iteration):
    _recis(table, rows, grads, n, np.float64, 1.0)  # whatever the decay


def recis_sparse_adamw(table, rows, grads, n, iteration):
    _recis(table, rows, grads, n, np.float32, 1 - n.lr * n.decay)


def recis_sparse_adamw_tf(table, rows, grads, n, iteration):
    _recis(table, rows, grads, n, np.float32, 1 - n.decay)


def tfa_lazy_adam(table, rows, grads, n, iteration):
    lr = n.lr * math.sqrt(1 - n.beta2**iteration) / (1 - n.beta1**iteration)
    for row, g in summed(rows, grads):
        table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
        table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * g**2
        table.w[row] += -lr * table.m[row] / (np.sqrt(table.v[row]) + n.eps)


def tfa_adamw(table, rows, grads, n, iteration):
    touched = np.unique(rows)
    table.w[touched] -= n.decay * table.w[touched]
    tfa_lazy_adam(table, rows, grads, n, iteration)


def fbgemm_adam(table, rows, grads, n, iteration):
    for row, g in summed(rows, grads):
        table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
        table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * g**2
        _fbgemm_bracket(table, row, n, iteration)


def fbgemm_partial_rowwise_adam(table, rows, grads, n, iteration):
    for row, g in summed(rows, grads):
        table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
        table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * np.mean(g**2)
        _fbgemm_bracket(table, row, n, iteration)


def _fbgemm_bracket(table, row, n, iteration):
    m_hat, v_hat = table.m[row] / (1 - n.beta1**iteration), table.v[row] / (1 - n.beta2**iteration)
    table.w[row] -= n.lr * (m_hat / (np.sqrt(v_hat) + n.eps) + n.decay * table.w[row])


def monolith_adam(table, rows, grads, n, iteration):
    betas = np.float32([n.beta1, n.beta2])
    for row, g in summed(rows, grads):
        g = g + n.decay * table.w[row]
        table.row_products[:, row] *= betas
        p1, p2 = map(float, table.row_products[:, row])
        table.m[row] = n.beta1 * table.m[row] + (1 - n.beta1) * g
        table.v[row] = n.beta2 * table.v[row] + (1 - n.beta2) * g**2
        table.w[row] -= n.lr * math.sqrt(1 - p2) / (1 - p1) * table.m[row] / (np.sqrt(table.v[row]) + n.eps)


class Dialect(NamedTuple):
    """A dialect as it is tested: its name among `dsa.conventions`, its restatement, its numbers."""

    name: str
    update: object
    numbers: Numbers

    @property
    def convention(self):
        return getattr(conventions, self.name)


DECAY = Numbers(decay=0.05)
DIALECTS = [
    Dialect("DSA_ADAM", dsa_0_3_0, DECAY),
    Dialect("TORCH_SPARSE_ADAM", torch_sparse_adam, Numbers()),
    Dialect("TORCH_ADAM", torch_adam, DECAY),
    Dialect("TORCH_ADAMW", torch_adamw, DECAY),
    Dialect("RECIS_SPARSE_ADAM", recis_sparse_adam, Numbers()),
    Dialect("RECIS_SPARSE_ADAMW", recis_sparse_adamw, DECAY),
    Dialect("RECIS_SPARSE_ADAMW_TF", recis_sparse_adamw_tf, DECAY),
    Dialect("TFA_LAZY_ADAM", tfa_lazy_adam, Numbers()),
    Dialect("TFA_ADAMW", tfa_adamw, DECAY),
    Dialect("FBGEMM_ADAM", fbgemm_adam, DECAY),
    Dialect("FBGEMM_PARTIAL_ROWWISE_ADAM", fbgemm_partial_rowwise_adam, DECAY),
    Dialect("DGL_SPARSE_ADAM", dgl_sparse_adam, Numbers()),
    Dialect("MONOLITH_ADAM", monolith_adam, Numbers(beta2=0.99, eps=0.01, decay=0.05)),
]


def first_weights(name):
    draws = np.random.default_rng(NAMES.index(name))
    return (0.1 * draws.standard_normal((ROWS, DIM))).astype(np.float32)


def batches_of(step):
    """Return ``{table: (rows, gradients)}``: of sizes far apart, with duplicates; empty ones too."""
    draws = np.random.default_rng(1000 + step)
    given = {}
    for number, name in enumerate(NAMES):
        if (step + 3 * number) % 7 == 6:
            continue
        count = 0 if (step + number) % 5 == 3 else int(draws.integers(1, 30))
        rows = draws.integers(0, LATE, count) // draws.choice([1, 4])
        if step in (0, STEPS - 1):
            rows = np.append(rows, [LATE, LATE])
        sizes = 10.0 ** draws.uniform(-5, 0, (len(rows), 1))
        given[name] = rows, (sizes * draws.standard_normal((len(rows), DIM))).astype(np.float32)
    return given


class End(NamedTuple):
    """Where a table ends, of any dtype."""

    w: np.ndarray
    m: np.ndarray
    v: np.ndarray


def restated(dialect):
    """Return where the restatement ends."""
    shape = (ROWS, 1) if dialect.convention.second_moment == "row" else (ROWS, DIM)
    tables = {name: Table(first_weights(name).astype(np.float64), shape) for name in NAMES}
    for step in range(STEPS):
        for name, (rows, grads) in batches_of(step).items():
            dialect.update(tables[name], rows, grads, dialect.numbers, step + 1)
    return {name: End(table.w, table.m, table.v) for name, table in tables.items()}


def explicit(dialect, directory):
    """Return where `DiskSparseRiemannianAdam` ends in flat space."""
    n = dialect.numbers
    with DiskSparseRiemannianAdam(
        {name: first_weights(name) for name in NAMES},
        n.lr, n.beta1, n.beta2, n.eps, n.decay, k=0.0, disk_dir=directory, convention=dialect.convention,
    ) as optimizer:  # fmt: skip
        for step in range(STEPS):
            optimizer.step(batches_of(step))
    return ends(directory)


def in_memory(optimizer, parameters):
    """Train weights in memory by an optimizer of torch's kind for sparse gradients."""
    for step in range(STEPS):
        given = batches_of(step)
        for name, parameter in parameters.items():
            rows, grads = given.get(name, (None, None))
            parameter.grad = None if rows is None else torch.sparse_coo_tensor(
                rows[None], torch.from_numpy(grads), parameter.shape, check_invariants=True
            )  # fmt: skip
        optimizer.step()


def parameters_of():
    return {name: torch.nn.Parameter(torch.from_numpy(first_weights(name))) for name in NAMES}


def drop_in(dialect, directory):
    """Return where `DiskSparseAdam` ends, with weights in memory."""
    n, parameters = dialect.numbers, parameters_of()
    with DiskSparseAdam(
        parameters.items(), n.lr, (n.beta1, n.beta2), n.eps, n.decay,
        state_dir=directory, convention=dialect.convention,
    ) as optimizer:  # fmt: skip
        in_memory(optimizer, parameters)
    found = ends(directory, weights=False)
    return {name: found[name]._replace(w=parameters[name].detach().numpy()) for name in NAMES}


def ends(directory, weights=True):
    found = {}
    with open_state(directory) as state:
        for name in NAMES:
            records = state[name].read(range(ROWS))
            w = records["w"].copy() if weights else None
            found[name] = End(w, records["m"].copy(), records["v"].reshape(ROWS, -1).copy())
    return found


def errors(found, expected):
    """Return the largest difference of w, m and v, each relative to the largest number of its table."""
    return tuple(
        max(_off(getattr(found[name], part), getattr(expected[name], part)) for name in NAMES)
        for part in End._fields
    )


def _off(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


def main():
    print(f"| {'convention':27} | w | m | v | w, weights in memory |\n| --- | --- | --- | --- | --- |")
    for dialect in DIALECTS:
        with tempfile.TemporaryDirectory() as folder:
            expected = restated(dialect)
            one = errors(explicit(dialect, Path(folder) / "explicit"), expected)
            other = errors(drop_in(dialect, Path(folder) / "drop_in"), expected)
        print(f"| `{dialect.name}` | {one[0]:.1e} | {one[1]:.1e} | {one[2]:.1e} | {other[0]:.1e} |")


if __name__ == "__main__":
    main()
