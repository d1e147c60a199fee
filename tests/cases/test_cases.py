"""Cases from the field, with the values that were reported there."""

import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
from current_files import table_file

import dsa
from dsa import DiskSparseRiemannianAdam, init
from dsa.errors import GradientError, RowIndexError, RowTypeError, StateMismatchError, StateWarning
from dsa.schema import adam_schema
from dsa.state.metadata import table_file_name

LOCK = "dsa.lock"
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory and limits are read by means of Linux")


def build(path, tables, **options):
    return DiskSparseRiemannianAdam(tables, lr=options.pop("lr", 0.1), disk_dir=path, **options)


def content(path):
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name != LOCK}


def counters(path, name, rows, dim):
    words = np.fromfile(table_file(path, name), np.int32, offset=4096).reshape(rows, -1)
    return words[:, 3 * dim].tolist()


BAD_INDICES = [
    ([-1], 1, RowIndexError, IndexError),
    ([10], 1, RowIndexError, IndexError),
    ([2.0], 1, RowTypeError, TypeError),
    ([True] * 10, 10, RowTypeError, TypeError),
    ([1, 2], 3, GradientError, ValueError),
]


@pytest.mark.parametrize(("indices", "count", "error", "builtin"), BAD_INDICES)
@pytest.mark.parametrize("k", [0.0, 1.0])
def test_c09_bad_explicit_indices(tmp_path, indices, count, error, builtin, k):
    with build(tmp_path, {"entity": init.Zeros(10, 2)}, k=k) as optimizer:
        optimizer.step({"entity": (range(10), np.ones((10, 2), np.float32))})
        optimizer.flush()
        before = content(tmp_path)
        for make in (np.array, torch.tensor, list):
            for kind in (error, builtin):
                with pytest.raises(kind, match="'entity'"):
                    optimizer.step({"entity": (make(indices), np.ones((count, 2), np.float32))})
        assert optimizer.global_step == 1
        optimizer.flush()
        assert content(tmp_path) == before


def test_c09_int32_is_accepted(tmp_path):
    with build(tmp_path, {"entity": init.Zeros(10, 2)}, k=0.0) as optimizer:
        for indices in (np.array([3], np.int32), torch.tensor([3], dtype=torch.int32)):
            optimizer.step({"entity": (indices, np.ones((1, 2), np.float32))})
        assert optimizer.read_rows([3])[0].tolist() == pytest.approx([-0.2, -0.2])


def data_pages(path):
    """The pages of a sparse file that hold data."""
    size, position, pages = path.stat().st_size, 0, set()
    with path.open("rb") as file:
        while position < size:
            try:
                start = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:  # what the system answers when there is no more data
                    raise
                break
            position = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            pages.update(range(start // 4096, -(-position // 4096)))
    return pages


@pytest.mark.disk
@linux
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_c26_rows_beyond_2_to_31_elements(tmp_path, dtype):
    rows, dim, last, wrapped = 40_000_000, 64, 39_999_999, 6_445_567
    assert last * dim * 4 == 10_239_999_744
    assert last * dim * 4 % 2**32 == 1_650_065_152 == wrapped * dim * 4
    file = tmp_path / table_file_name("entity")
    with build(tmp_path, {"entity": init.Zeros(rows, dim)}, k=0.0, allocate="sparse") as optimizer:
        optimizer.flush()
        before = data_pages(file)
        optimizer.step({"entity": (torch.tensor([last], dtype=dtype), torch.ones(1, dim))})
        assert optimizer.read_rows(torch.tensor([last], dtype=dtype))[0].tolist() == pytest.approx(
            [-0.1] * dim
        )
        targets = sorted(
            {wrapped, (last * dim % 2**32) // dim, (last * dim % 2**31) // dim, last - 1} - {last}
        )
        assert not optimizer.read_rows(targets).any()
    stride = (file.stat().st_size - 4096) // rows
    start = 4096 + last * stride
    assert data_pages(file) - before <= {start // 4096, (start + stride - 1) // 4096}
    with build(tmp_path, {"entity": init.Zeros(rows, dim)}, k=0.0, resume=True) as optimizer:
        assert optimizer.read_rows([last])[0].tolist() == pytest.approx([-0.1] * dim)
    assert file.stat().st_blocks * 512 < 2**20


PRELUDE = """
import json, os, resource, sys, warnings
import numpy as np, torch
from dsa import DiskSparseRiemannianAdam, init

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

def warm(path):
    # Kernels, thread pools and the like are paid for once, by a table of the same kind.
    with DiskSparseRiemannianAdam({"a": init.Normal(5000, DIM)}, lr=0.1, disk_dir=path) as optimizer:
        for _ in range(3):
            optimizer.step({"a": (np.arange(1500), np.ones((1500, DIM), np.float32))})
            optimizer.read_rows(np.arange(1500))

def attempt(make):
    # Make a state; report the error, and what the attempt left.
    try:
        make()
    except (OSError, MemoryError) as error:
        left = sorted(name for name in os.listdir(sys.argv[1]) if name != "dsa.lock")
        needed = [getattr(error, name, None) for name in ("needed", "available")]
        print(json.dumps({"kind": type(error).__name__, "errno": getattr(error, "errno", None), "left": left,
                          "message": str(error), "needed": needed}))
    else:
        print(json.dumps({"kind": "none"}))
"""


def child(code, *arguments, prefix=()):
    """Run code in a new interpreter; it must end by itself. Returns the JSON of each line."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(dsa.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return reported(done)


def reported(done):
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


CONSTRUCTION = """
DIM = 64
warm(sys.argv[1] + "-warm")
anonymous, peak = status("RssAnon"), status("VmHWM")
with DiskSparseRiemannianAdam({"a": eval(sys.argv[2])}, lr=0.1, disk_dir=sys.argv[1]) as optimizer:
    made = status("RssAnon")
    rows = np.arange(0, int(sys.argv[3]), int(sys.argv[3]) // 1000)
    optimizer.step({"a": (rows, np.ones((len(rows), DIM), np.float32))})
used = {"made": made - anonymous, "anonymous": status("RssAnon") - anonymous, "peak": status("VmHWM") - peak}
print(json.dumps(used))
"""


@pytest.mark.disk
@linux
def test_c27_construction_needs_no_memory_for_the_table(tmp_path):
    """2,000,000 x 64, 1.6 GB of state, described by a rule: made as an extent of the file system."""
    needed = dsa.estimate(2_000_000, 64).file
    if shutil.disk_usage(tmp_path).free < 2 * needed:
        pytest.skip("there is too little room on this disk")
    (used,) = child(CONSTRUCTION, tmp_path / "state", "init.Normal(2_000_000, 64, seed=1)", 2_000_000)
    assert table_file(tmp_path / "state", "a").stat().st_blocks * 512 >= needed
    assert used["made"] < 30e6, used
    assert used["anonymous"] < 30e6, used
    assert used["peak"] < 150e6, used


@pytest.mark.disk
@linux
def test_c27_weights_on_disk_are_copied_block_by_block(tmp_path):
    """100,000 x 64 from a file of float32: the table's pages may be in memory, copies may not."""
    weights = np.memmap(tmp_path / "weights.f32", np.float32, "w+", shape=(100_000, 64))
    weights[:] = np.random.default_rng(0).uniform(-0.01, 0.01, (1, 64))
    weights.flush()
    source = f"np.memmap({str(tmp_path / 'weights.f32')!r}, np.float32, 'r', shape=(100_000, 64))"
    (used,) = child(CONSTRUCTION, tmp_path / "state", source, 100_000)
    assert used["made"] < 60e6, used
    assert used["anonymous"] < 60e6, used


SPARSE = """
DIM = 128
warm(sys.argv[1] + "-warm")
before, peak = status("RssAnon"), status("VmHWM")
tables = {"a": init.Normal(100_000_000, DIM, 0.01)}
optimizer = DiskSparseRiemannianAdam(tables, lr=0.1, disk_dir=sys.argv[1], allocate="sparse")
file = next(entry.path for entry in os.scandir(sys.argv[1]) if entry.name.endswith(".dsa"))
made = {"anonymous": status("RssAnon") - before, "peak": status("VmHWM") - peak,
        "blocks": os.stat(file).st_blocks * 512}
rows = np.random.default_rng(0).choice(100_000_000, 1000, replace=False)
grad = np.random.default_rng(1).standard_normal((1000, DIM)).astype(np.float32)
optimizer.step({"a": (rows, grad)})
optimizer.flush()
blocks = os.stat(file).st_blocks * 512
samples = []
for step in range(300):
    optimizer.step({"a": (rows, grad)})
    if step % 50 == 49:
        samples.append(status("RssAnon"))
optimizer.close()
print(json.dumps({"made": made, "blocks": blocks, "samples": samples, "size": os.stat(file).st_size}))
"""


@pytest.mark.disk
@linux
def test_a_hundred_million_rows_cost_what_is_touched(tmp_path):
    """154 GB of state described by a rule: a sparse file of which a step occupies the pages of its rows."""
    (seen,) = child(SPARSE, tmp_path / "state")
    assert seen["size"] > 100_000_000 * 1_540
    assert seen["made"]["anonymous"] < 50e6, seen
    assert seen["made"]["peak"] < 50e6, seen
    assert seen["made"]["blocks"] < 2**20, seen
    assert 1_000 * 1_544 <= seen["blocks"] < 1_000 * 3 * 4_096, seen
    assert max(seen["samples"]) - seen["samples"][0] < 4e6, seen


def small_disk(directory):
    """Return the command that runs another where `directory` is a file system of one mebibyte, or None."""
    directory.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs "{directory}" && exec "$@"'
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    prefix = [*unshare, "sh", "-c", mount, "sh"]
    usable = (
        shutil.which("unshare")
        and not subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    )
    return prefix if usable else None


FULL = """
for source in (init.Normal(20_000, 16), torch.zeros(20_000, 16)):
    for allocate in sys.argv[2:]:
        attempt(lambda: DiskSparseRiemannianAdam(
            {"small": init.Zeros(10, 2), "a": source}, disk_dir=sys.argv[1], allocate=allocate))
"""
LIMITED = "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))\n"


@linux
def test_c30_and_c32_a_disk_of_one_mebibyte(tmp_path):
    """4 MB of state: an OSError when it is made, with both numbers; no signal, and nothing left behind."""
    needed = sum(dsa.estimate(*shape).file for shape in ((10, 2), (20_000, 16)))
    assert needed > 4e6
    prefix = small_disk(tmp_path / "disk")
    if prefix is None:
        pytest.skip("no tmpfs may be mounted here; the limit on the size of files is tested instead")
    seen = child(FULL, tmp_path / "disk", "reserve", prefix=prefix)
    assert len(seen) == 2
    for report in seen:
        assert (report["kind"], report["errno"], report["left"]) == ("DiskSpaceError", errno.ENOSPC, [])
        assert report["needed"][0] >= needed
        assert 0 < report["needed"][1] <= 2**20
        for number in report["needed"]:
            assert f"{number:,}" in report["message"]
        assert str(tmp_path / "disk") in report["message"]


@linux
def test_c32_a_limit_on_the_size_of_files(tmp_path):
    done = nursery.run(PRELUDE + LIMITED + FULL, tmp_path, "reserve", "sparse")
    seen = reported(done)
    assert len(seen) == 4
    for report in seen:
        assert report["errno"] in (errno.EFBIG, errno.ENOSPC)
        assert report["left"] == []


ADDRESS_SPACE = """
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 2**31, resource.RLIM_INFINITY))
attempt(lambda: DiskSparseRiemannianAdam({"small": init.Zeros(10, 2), "a": init.Zeros(13_000_000, 64)},
                                         disk_dir=sys.argv[1], allocate="sparse"))
"""


@linux
def test_c31_a_mapping_that_fails_leaves_no_file(tmp_path):
    (seen,) = reported(nursery.run(PRELUDE + ADDRESS_SPACE, tmp_path))
    assert seen["kind"] in ("OSError", "MemoryError")
    assert seen["errno"] in (errno.ENOMEM, None)
    assert "13_000_000" not in seen["message"]
    assert f"{dsa.estimate(13_000_000, 64).file:,}" in seen["message"]
    assert seen["left"] == []
    with pytest.raises(FileNotFoundError):
        build(tmp_path, {"small": init.Zeros(10, 2), "a": init.Zeros(13_000_000, 64)}, resume=True)


def test_c34_the_same_number_of_bytes_is_not_the_same_table(tmp_path):
    build(tmp_path, {"entity": torch.zeros(100, 8)}, k=0.0).close()
    before = content(tmp_path)
    for other, shape in (
        (torch.zeros(50, 16), "50 x 16"),
        (torch.zeros(100, 4, dtype=torch.float64), "100 x 4"),
        (torch.zeros(8, 100), "8 x 100"),
        (torch.zeros(400, 2), "400 x 2"),
    ):
        with pytest.raises(StateMismatchError, match=f"stored as 100 x 8 but {shape} is asked for"):
            build(tmp_path, {"entity": other}, k=0.0, resume=True)
        with pytest.raises(ValueError, match="100 x 8"):
            build(tmp_path, {"entity": other}, k=0.0, resume=True)
        assert content(tmp_path) == before


def test_c36_names_that_collide_or_escape(tmp_path):
    names = ["enc.emb", "enc_emb", "ENC.emb", "../evil", "a/b", "n" * 300, "Wörter", "слово"]
    state = tmp_path / "state"
    tables = {name: init.Zeros(4, 2) for name in names}
    with build(state, tables, k=0.0) as optimizer:
        for number, name in enumerate(names):
            optimizer.step({name: ([number % 4], np.full((1, 2), -1.0, np.float32))})
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    files = [file.name.lower() for file in state.iterdir() if file.suffix == ".dsa"]
    assert len(set(files)) == len(names)
    with build(state, tables, k=0.0, resume=True) as optimizer:
        for number, name in enumerate(names):
            touched = optimizer.read_rows(range(4), name).any(dim=1)
            assert touched.tolist() == [row == number % 4 for row in range(4)]
    (state / "enc.emb").write_bytes(b"not ours")
    with pytest.warns(StateWarning, match="resume=False"):
        build(state, {"enc_emb": init.Zeros(4, 2)}, resume=False).close()
    assert sorted(file.name for file in state.iterdir() if file.name.endswith((".dsa", ".emb"))) == sorted(
        ["enc.emb", table_file(state, "enc_emb").name]
    )


FIRST_STEPS = [
    (1.0, (0.0, 0.0), (-0.0996679946, 0.0)),
    (1.0, (0.1, 0.1), (-0.00066751, 0.10103419)),
    (4.0, (0.0, 0.0), (-0.0986876601, 0.0)),
]


@pytest.mark.parametrize(("k", "start", "end"), FIRST_STEPS)
def test_c54_the_first_step(tmp_path, k, start, end):
    tables = {"entity": torch.tensor([start])}
    with build(tmp_path, tables, k=k, second_moment="coordinate") as optimizer:
        optimizer.step({"entity": ([0], np.array([[1.0, 0.0]]))})
        assert optimizer.read_rows([0])[0].tolist() == pytest.approx(end, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
def test_c54_no_gradient_no_move(tmp_path, second_moment):
    with build(tmp_path, {"entity": torch.zeros(1, 2)}, k=1.0, second_moment=second_moment) as optimizer:
        optimizer.step({"entity": ([0], np.zeros((1, 2)))})
        assert optimizer.read_rows([0])[0].tolist() == [0.0, 0.0]


def test_c55_duplicates_on_the_ball(tmp_path):
    weights = torch.zeros(4, 2)
    weights[3] = 0.1
    with build(tmp_path / "twice", {"entity": weights}, k=1.0) as optimizer:
        optimizer.step({"entity": ([3, 3], np.array([[0.5, 0.0], [0.5, 0.0]]))})
    with build(tmp_path / "once", {"entity": weights}, k=1.0) as optimizer:
        optimizer.step({"entity": ([3], np.array([[1.0, 0.0]]))})
    name = table_file_name("entity")
    assert (tmp_path / "twice" / name).read_bytes()[4096:] == (tmp_path / "once" / name).read_bytes()[4096:]
    assert counters(tmp_path / "twice", "entity", 4, 2) == [0, 0, 0, 1]


@pytest.mark.parametrize("asked", [4.0, 0.0])
def test_c56_another_curvature_on_resume(tmp_path, asked):
    tables = {"entity": torch.tensor([[0.8, 0.0]])}
    build(tmp_path, tables, k=1.0, init_max_norm_fraction=1.0).close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build(tmp_path, tables, k=asked, resume=True)
    (warning,) = [str(entry.message) for entry in caught if entry.category is StateWarning]
    for words in ("'entity'", "k=1.0", f"k={asked}", "set_curvature"):
        assert words in warning
    with optimizer:
        assert optimizer.read_rows([0])[0].tolist() == pytest.approx([0.8, 0.0])
        optimizer.set_curvature(4.0)
        assert torch.linalg.vector_norm(optimizer.read_rows([0]).double()) < 0.5


def test_c57_flat_and_hyperbolic_tables_in_one_optimizer(tmp_path):
    tables = {"entity": torch.full((10, 2), 0.1), "bias": torch.full((10, 2), 5.0)}
    with build(tmp_path, tables, k={"entity": 1.0, "bias": 0.0}) as optimizer:
        reference = torch.nn.Parameter(tables["bias"].clone())
        sparse_adam = torch.optim.SparseAdam([reference], lr=0.1)
        for _ in range(20):
            batch = (torch.arange(10), torch.ones(10, 2))
            optimizer.step({"entity": batch, "bias": batch})
            reference.grad = torch.sparse_coo_tensor(
                torch.arange(10)[None], torch.ones(10, 2), check_invariants=True
            )
            sparse_adam.step()
            torch.testing.assert_close(
                optimizer.read_rows(range(10), "bias"), reference.data, rtol=1e-5, atol=1e-6
            )
            assert (
                torch.linalg.vector_norm(optimizer.read_rows(range(10), "entity").double(), dim=1).max() < 1.0
            )
        assert optimizer.read_rows([0], "bias")[0, 0].item() == pytest.approx(3.0, abs=1e-4)


def test_the_record_has_the_size_that_the_cases_assume():
    assert adam_schema(128).dtype.itemsize == 1_544
