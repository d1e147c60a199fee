"""States to export, ways to compare what comes back, and the loop that verifies without dsa."""

import functools
import hashlib
from pathlib import Path

import numpy as np
import zarr

from dsa.checkpoint import write_checkpoint
from dsa.rules.adam import ADAM, FRAME_ADAM, ROW_WISE_ADAM
from dsa.rules.init import Normal
from dsa.schema import adam_schema
from dsa.state.content import StateContent, TableContent
from dsa.state.facts import TableFacts

export = functools.partial(write_checkpoint, durable=False)
"""Most tests don't wait for the disk."""

SMALL_LAYOUT = {"SHARD_BYTES": 4096, "_CHUNK_BYTES": 1024, "_FEWEST_CHUNK_ROWS": 8}


def sample_records(rows, dim, seed=0, touched=1.0, per="element", weights=True):
    """Records as training leaves them: rows that were never touched have their first weight and zeros."""
    rng = np.random.default_rng(seed)
    schema = adam_schema(dim, second_moment_per=per, weights=weights)
    records = np.zeros(rows, schema.dtype)
    known = rng.random(rows) < touched
    if weights:
        records["w"] = rng.standard_normal((rows, dim), np.float32)
    records["m"][known] = rng.standard_normal((known.sum(), dim), np.float32)
    records["v"][known] = rng.random((known.sum(), dim), np.float32) if per == "element" else rng.random()
    records["t"][known] = rng.integers(1, 50, known.sum())
    records["s"][known] = rng.integers(1, 100, known.sum())
    return schema, records


def sample_table(name="entity", rows=300, dim=8, block=77, records=None, schema=None, **options):
    """A table that yields its records in blocks of `block` rows."""
    made = {key: options.pop(key) for key in ("seed", "touched", "per", "weights") if key in options}
    if records is None:
        schema, records = sample_records(rows, dim, **made)

    def blocks():
        for start in range(0, len(records), block):
            yield start, records[start : start + block]

    stored = options.pop("stored", None)
    rule = options.pop("rule", ROW_WISE_ADAM if made.get("per") == "row" else ADAM)
    return TableContent(TableFacts(name, len(records), schema, rule, **options), blocks, stored)


def sample_content(step=12):
    """Two tables with everything that a checkpoint keeps about them."""
    entity = sample_table(
        "entity", rows=301, dim=8, k=1.5, steps=11, rule=FRAME_ADAM, init_max_norm_fraction=0.25,
        initializer=Normal(301, 8, std=0.1, seed=7), touched=0.4,
    )  # fmt: skip
    words = sample_table(
        "enc.emb/ä",
        rows=1100,
        dim=3,
        seed=1,
        per="row",
        stored=adam_schema(3, weights=False),
    )
    return StateContent((entity, words), step, identity="d41d8cd9")


def read_all(table):
    """All records of a table, and a check that its blocks cover it in order."""
    parts, row = [], 0
    for first, records in table.blocks():
        assert first == row
        assert records.dtype == table.schema.dtype
        parts.append(records)
        row += len(records)
    assert row == table.rows
    return np.concatenate(parts) if parts else np.zeros(0, table.schema.dtype)


def described(content):
    """Everything but the records."""
    tables = [
        (
            t.facts,
            t.stored,
        )
        for t in content.tables
    ]
    return tables, content.global_step, content.identity


def assert_same(found, expected):
    """Two contents have the same description and, field by field, the same bytes."""
    assert described(found) == described(expected)
    for one, other in zip(found.tables, expected.tables, strict=True):
        left, right = read_all(one), read_all(other)
        for name in one.schema.names:
            assert left[name].tobytes() == right[name].tobytes(), (one.name, name)


def verify_with_zarr(path):
    """The loop of the README: nothing but zarr and hashlib; returns the content root."""
    roots = []
    for name, array in zarr.open_group(path, mode="r").members(max_depth=None):
        if isinstance(array, zarr.Array):
            check = array.attrs["dsa_checksum"]
            step = check["block_rows"]
            blocks = [
                hashlib.sha256(array[start : start + step].tobytes())
                for start in range(0, array.shape[0], step)
            ]
            assert [block.hexdigest() for block in blocks] == check["blocks"], name
            shape = "x".join(map(str, array.shape))
            header = f"{check['algorithm']} {check['dtype']} {shape} {step}\n".encode()
            root = hashlib.sha256(header + b"".join(block.digest() for block in blocks)).hexdigest()
            assert root == check["root"], name
            roots.append(f"{name} {root}\n")
    return hashlib.sha256("".join(sorted(roots)).encode()).hexdigest()


def files_of(path):
    """Bytes of every file below a directory."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file()
    }


def killed_contents():
    """Two contents with other tables each; the position in the list is the step."""
    return [
        StateContent((sample_table("entity", rows=500, seed=1), sample_table("word", seed=2)), 0),
        StateContent((sample_table("entity", rows=500, seed=3),), 1),
    ]
