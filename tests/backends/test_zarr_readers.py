"""Who else looks at a live Zarr table: zarr and xarray here and elsewhere, forked workers, other threads."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
import zarr
from nursery import start
from zarr_tables import HOOKS, Compressed, Mapped, decode

from dsa.backends.writer import WriteBehind
from dsa.schema import adam_schema
from dsa.testing import CASES, assert_records_equal, random_records

xarray = pytest.importorskip("xarray")

SCHEMA = adam_schema(3)
ROWS = 2_000
by_kind = pytest.mark.parametrize("kind", HOOKS)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.zarr"


@by_kind
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_group_is_what_its_schema_says(kind, path, case):
    backend = HOOKS[kind].create(path, case.rows, case.schema)
    group = zarr.open_group(path, mode="r")
    own = ["c"] if "s" in case.schema.names else []
    assert sorted(group.array_keys()) == sorted([*case.schema.names, *own])
    for name in own:
        assert (group[name].shape, group[name].dtype) == ((case.rows,), np.int32)
        assert "checksum" in group[name].attrs["description"]
    assert list(group.group_keys()) == []
    for field in case.schema.fields:
        array = group[field.name]
        per_row = field.per == "row"
        assert array.shape == ((case.rows,) if per_row else (case.rows, case.schema.dim))
        assert array.dtype == np.dtype("uint16" if field.dtype == "bfloat16" else field.dtype)
        assert array.metadata.dimension_names == (("row",) if per_row else ("row", "dim"))
        assert not array[:].any()
    assert len(list(group.members())) == len(case.schema.fields) + len(own)
    backend.close()


@by_kind
def test_zarr_and_xarray_see_what_was_written(kind, path):
    """At once, through objects that were opened before."""
    backend = HOOKS[kind].create(path, ROWS, SCHEMA)
    group = zarr.open_group(path, mode="r")
    dataset = xarray.open_zarr(path)
    tree = xarray.open_datatree(path, engine="zarr")
    assert dict(dataset.sizes) == {"row": ROWS, "dim": 3}
    assert set(tree.data_vars) - {"c"} == set(SCHEMA.names)
    model = np.zeros(ROWS, SCHEMA.dtype)
    rng = np.random.default_rng(1)
    for _ in range(4):
        rows = np.flatnonzero(rng.random(ROWS) < 0.1)
        model["w"][rows] = rng.standard_normal((len(rows), 3))
        model["t"][rows] += 1
        backend.write(rows, model[rows])
        assert group["w"][:].tobytes() == model["w"].tobytes()
        assert group["t"][rows[3] : rows[5]].tolist() == model["t"][rows[3] : rows[5]].tolist()
        again = xarray.open_zarr(path)
        assert float(again.w.where(again.t > 0).count()) == 3 * np.count_nonzero(model["t"])
        assert again.w[int(rows[0])].values.tolist() == model["w"][rows[0]].tolist()
    assert dataset.w[:].values.tobytes() == model["w"].tobytes()
    assert_records_equal(decode(path, backend.describe()), model)
    backend.close()


READER = """
import sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
print("ready", flush=True)
for line in sys.stdin:
    row = int(line)
    print(group["w"][row].tolist(), group["t"][row].item(), flush=True)
"""


@by_kind
def test_another_process_sees_what_was_written(kind, path):
    backend = HOOKS[kind].create(path, ROWS, SCHEMA)
    with start(READER, path) as reader:
        assert reader.stdout.readline() == "ready\n"
        for number in range(5):
            records = np.zeros(1, SCHEMA.dtype)
            records["w"], records["t"] = number + 0.5, number
            backend.write(np.array([number * 399]), records)
            reader.stdin.write(f"{number * 399}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{[number + 0.5] * 3} {number}\n"
        reader.stdin.close()
        assert reader.wait(60) == 0
    backend.close()


def test_a_reader_never_meets_a_torn_compressed_shard(path):
    """Whole shards of one write or the next, whatever the moment."""
    backend = Compressed(shard_bytes=1 << 12).create(path, ROWS, SCHEMA)
    shard = len(backend) // 8
    group = zarr.open_group(path, mode="r")
    stop, seen, errors = threading.Event(), set(), []

    def look():
        while not stop.is_set():
            try:
                values = np.unique(group["m"][: min(shard, 200)])
            except Exception as error:
                errors.append(error)
                return
            seen.add(len(values))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 25):
        records = np.zeros(ROWS, SCHEMA.dtype)
        records["m"] = number
        backend.write(np.arange(ROWS), records)
    stop.set()
    thread.join()
    backend.close()
    assert not errors
    assert seen == {1}


@by_kind
def test_a_forked_child_reads(kind, path):
    """While a thread of the parent reads and writes, and may hold any lock at the moment of the fork."""
    backend = HOOKS[kind].create(path, ROWS, SCHEMA)
    records = random_records(SCHEMA, ROWS, 0)
    backend.write(np.arange(ROWS), records.copy())
    odd, even = np.arange(1, ROWS, 2), np.arange(0, ROWS, 2)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            backend.write(even, records[even])
            backend.read(even)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(8):
            assert in_child(lambda: backend.read(odd).tobytes() == records[odd].tobytes()) == 0
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert_records_equal(backend.read(np.arange(ROWS)), records)
    backend.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def in_child(check):
    """Return the status of a fork that runs a check; a hang is killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(60)
            code = 0 if check() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Rows(torch.utils.data.Dataset):
    """The weights of a live table, read by whoever asks."""

    def __init__(self, backend):
        self.backend = backend

    def __len__(self):
        return len(self.backend)

    def __getitem__(self, row):
        return self.backend.read(np.array([row]))["w"][0]


@by_kind
def test_forked_loader_workers_read(kind, path):
    backend = HOOKS[kind].create(path, 200, SCHEMA)
    records = random_records(SCHEMA, 200, 0)
    records["w"] = np.arange(600).reshape(200, 3)
    backend.write(np.arange(200), records.copy())
    loader = torch.utils.data.DataLoader(
        Rows(backend), batch_size=50, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    assert torch.cat(list(loader)).tolist() == records["w"].tolist()
    backend.close()


QUEUES = {
    "plain": lambda backend: backend,
    "collecting": lambda backend: WriteBehind(backend, collect_bytes=30_000, threaded=False),
    "behind": lambda backend: WriteBehind(backend, collect_bytes=30_000),
}


@pytest.mark.parametrize("queue", QUEUES)
@by_kind
def test_c41_writers_of_different_rows_of_one_chunk(kind, queue, path):
    """Eight threads take turns: no update of a neighbour is lost, whoever wrote it when."""
    backend = QUEUES[queue](HOOKS[kind].create(path, 800, SCHEMA))
    one_at_a_time = threading.Lock()
    model = np.zeros(800, SCHEMA.dtype)

    def work(thread):
        rows = np.arange(thread, 100, 8)
        for number in range(50):
            records = random_records(SCHEMA, len(rows), 100 * thread + number)
            model[rows] = records
            with one_at_a_time:
                backend.write(rows, records)
            assert_records_equal(backend.read(rows), model[rows])

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_records_equal(backend.read(np.arange(800)), model)
    description = backend.describe()
    backend.close()
    assert_records_equal(decode(path, description), model)


def test_the_mapped_table_is_a_copy_away_from_a_file(tmp_path):
    """What lies in the files is the table: a copy of the directory opens, and holds the same."""
    import shutil

    backend = Mapped(shard_bytes=1 << 12).create(tmp_path / "one", ROWS, SCHEMA)
    records = random_records(SCHEMA, ROWS, 0)
    backend.write(np.arange(ROWS), records.copy())
    backend.flush()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    backend.close()
    again = Mapped().reopen(tmp_path / "other", backend.describe())
    assert_records_equal(again.read(np.arange(ROWS)), records)
    again.close()
