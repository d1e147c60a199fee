"""The estimate before a table is made: the numbers of the case in the field, and what is then really made."""

import numpy as np
import pytest
from current_files import journal_file, table_file

from dsa import DiskEmbedding, DiskSparseRiemannianAdam, estimate, init
from dsa.backends import Memmap, Zarr


def test_c30_ten_million_rows_of_128():
    guess = estimate(10_000_000, 128)
    assert guess.fields == {
        "w": 5_120_000_000,
        "m": 5_120_000_000,
        "v": 5_120_000_000,
        "t": 40_000_000,
        "s": 40_000_000,
    }
    assert guess.fields["m"] + guess.fields["v"] == 10_240_000_000
    assert guess.logical == 15_400_000_000
    assert guess.file >= guess.logical
    assert guess.while_exporting == guess.file + guess.logical


def test_c38_the_state_and_its_export_exceed_a_notebooks_twenty_gigabytes():
    """Each fits alone; together they do not, which is to be known before."""
    guess = estimate(10_000_000, 128)
    assert guess.logical == pytest.approx(15.4e9)
    assert guess.file < 20e9 < guess.while_exporting
    assert guess.while_exporting == pytest.approx(2 * 15.4e9, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "dim", "total"),
    [
        (1_000_000, 128, 1.54e9),
        (4_820_000, 128, 7.42e9),
        (45_000_000, 250, 135.2e9),
        (76_900_000, 400, 369.4e9),
    ],
)
def test_the_sizes_that_people_meet(rows, dim, total):
    assert estimate(rows, dim).logical == pytest.approx(total, rel=1e-3)


def test_one_number_of_v_per_row():
    guess = estimate(10_000_000, 128, second_moment="row")
    assert guess.fields["v"] == 40_000_000
    assert guess.logical == 5_120_000_000 * 2 + 40_000_000 * 2


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
@pytest.mark.parametrize("stride", [None, "packed", "page", 256])
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (7, 3), (1_000, 13)])
def test_what_is_made_has_the_size_estimated(tmp_path, rows, dim, stride, second_moment):
    backend = Memmap(stride=stride)
    guess = estimate(rows, dim, second_moment=second_moment, backend=backend)
    tables = {"entity": init.Zeros(rows, dim)}
    DiskSparseRiemannianAdam(tables, disk_dir=tmp_path, second_moment=second_moment, backend=backend).close()
    file = table_file(tmp_path, "entity")
    assert file.stat().st_size == guess.file
    everything = sum(
        entry.stat().st_size for entry in tmp_path.iterdir() if entry.name.endswith((".dsa", ".json"))
    )
    assert guess.file <= everything < guess.file + 4_096


def test_the_default_layout_is_the_default():
    assert estimate(1_000, 128) == estimate(1_000, 128, backend=Memmap())


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 3), {}, ValueError, "rows=0 is out of range"),
        ((-5, 3), {}, ValueError, "rows=-5"),
        ((5, 0), {}, ValueError, "dim=0 is out of range"),
        ((5, 3), {"second_moment": "rows"}, ValueError, "second_moment='rows'"),
        ((5, 3), {"second_moment": None}, ValueError, "second_moment=None"),
        ((5, 3), {"rule": "adagrat"}, ValueError, r"rule='adagrat' is not known: use one of \['adagrad'"),
        ((5, 3), {"rule": "sgd", "second_moment": "row"}, ValueError, "are both given: pass one of them"),
        ((5, 3), {"batch": 0}, ValueError, "batch=0 is out of range"),
        ((1e7, 3), {}, TypeError, None),
        ((5, 3.0), {}, TypeError, None),
        ((5, 3), {"backend": Memmap(stride=4)}, ValueError, "stride=4 can't hold records of 48 bytes"),
    ],
)
def test_what_is_refused(arguments, options, error, match):
    with pytest.raises(error, match=match):
        estimate(*arguments, **options)


@pytest.mark.parametrize(("dim", "batch"), [(8, 64), (32, 300), (64, 2_000), (16, 6_000)])
def test_the_journal_grows_to_the_size_estimated(tmp_path, dim, batch):
    rows = 10_000
    random = np.random.default_rng(0)
    tables = {"entity": init.Zeros(rows, dim)}
    with DiskSparseRiemannianAdam(tables, disk_dir=tmp_path, k=0.0, allocate="sparse") as optimizer:
        for _ in range(4):
            chosen = random.permutation(rows)[:batch]
            optimizer.step({"entity": (chosen, np.ones((batch, dim), np.float32))})
        size = journal_file(tmp_path).stat().st_size
    assert estimate(rows, dim, batch=batch).journal == pytest.approx(size, abs=1_000)
    assert estimate(100, dim, batch=10**9) == estimate(100, dim, batch=100)


def test_the_journal_of_compressed_shards_grows_to_their_overlay(tmp_path):
    backend = Zarr(compression="zstd", overlay_bytes=1_200 << 10)
    tables, most = {"entity": init.Zeros(1_000, 4)}, estimate(1_000, 4, backend=backend).journal
    everything = {"entity": (np.arange(1_000), np.ones((1_000, 4), np.float32))}
    with DiskSparseRiemannianAdam(tables, disk_dir=tmp_path, k=0.0, backend=backend) as optimizer:
        for _ in range(50):
            optimizer.step(everything)
            assert journal_file(tmp_path).stat().st_size <= most
        assert journal_file(tmp_path).stat().st_size == most


@pytest.mark.parametrize("stride", [None, "packed", "page"])
def test_a_record_with_its_padding(stride):
    guess = estimate(1_000, 100, backend=Memmap(stride=stride))
    assert guess.file - 4_096 == 1_000 * guess.record
    assert estimate(1_000, 100, backend=Zarr()).record == 4 * (3 * 100 + 3)


def test_counts_of_numpy_are_counts():
    assert estimate(np.int64(10), np.int32(3)) == estimate(10, 3)


@pytest.mark.parametrize(
    ("rule", "bytes_of_a_row"), [("adagrad", 8 * 7), ("row_wise_adagrad", 4 * 7 + 4), ("sgd", 4 * 7)]
)
def test_a_table_of_another_rule_has_the_size_estimated(tmp_path, rule, bytes_of_a_row):
    guess = estimate(1_000, 7, rule=rule)
    assert guess.logical == 1_000 * bytes_of_a_row
    DiskEmbedding(1_000, 7, state=rule, state_dir=tmp_path).close()
    (file,) = tmp_path.glob("embedding-*.dsa")
    assert file.stat().st_size == guess.file
