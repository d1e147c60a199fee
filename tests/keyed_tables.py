"""A table whose rows belong to ids, opened, trained and read for tests."""

import numpy as np

from dsa.optimizers.stepping import Batch, Stepping
from dsa.rules.adam import ADAM
from dsa.rules.conventions import AdamOptions
from dsa.rules.init import Normal
from dsa.state.coalesce import coalesce
from dsa.state.keyed_rows import find_rows, first_weights
from dsa.state.opening import open_directory
from dsa.state.storage import Storage, table_spec

DIM = 3


def opened(path, *, resume=None, source=None, k=0.0, **storage):
    rule = Normal(None, DIM, std=0.1, seed=5) if source is None else source
    spec = table_spec("entity", rule, ADAM, k=k, init_max_norm_fraction=0.5)
    return open_directory(path, [spec], resume, Storage(**storage))


def train(state, rows, grads):
    """One step of given rows, in any order."""
    batch = Batch(state.tables["entity"], *coalesce(rows, grads), AdamOptions(lr=0.1))
    with state.use():
        Stepping().take(state, [batch])


def content(state):
    """What the table says of each id, as bytes, and that the index says the same."""
    table = state.tables["entity"]
    found = {}
    for first, records in table.backend.scan(0, len(table)):
        for position in np.flatnonzero(records["live"] == 1):
            record = records[position]
            assert int(record["id"]) not in found
            found[int(record["id"])] = tuple(record[name].tobytes() for name in ("w", "m", "v", "t"))
            assert find_rows(table, np.array([record["id"]])) == [first + position]
    assert len(table.keys) == len(found)
    indexed = np.concatenate([ids for ids, _ in table.keys.items()] + [np.empty(0, np.int64)])
    assert sorted(indexed.tolist()) == sorted(found)
    return found


def untrained(state, ids):
    weights = first_weights(state.tables["entity"], np.array(ids, np.int64))
    zeros = np.zeros(DIM, np.float32).tobytes()
    return {id: (w.tobytes(), zeros, zeros, b"\0\0\0\0") for id, w in zip(ids, weights, strict=True)}
