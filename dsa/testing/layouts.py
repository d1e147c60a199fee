"""The tests that every `Layout` passes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsa.backends.base import Layout, StateBackend
from dsa.backends.mapping import Allocate
from dsa.errors import StateCorruptError
from dsa.schema import Records, Schema
from dsa.testing.hooks import through_json
from dsa.testing.records import CASES, Case, assert_records_equal, random_records

__all__ = ["LayoutConformance"]

_SLACK = 16 << 10
"""Bytes of a file that headers, documents and logs may take beside what `Layout.sizes` tells of."""


class LayoutConformance(ABC):
    """Subclass this in a test file, with a name that starts with ``Test``, and say what the layout is.

    It needs pytest and numpy, and torch for the test that trains. Tables are of the sizes of `CASES`;
    override the fixture `case` to choose others. That the backends keep their own contract is for
    `BackendConformance` to see.

    Example:
        >>> from dsa.backends import Memmap
        >>> class TestMemmap(LayoutConformance):
        ...     def layout(self):
        ...         return Memmap()
        ...     def differing(self):
        ...         return Memmap(stride="page")
        >>> TestMemmap().test_is_a_layout()
    """

    @abstractmethod
    def layout(self) -> Layout:
        """Return the layout under test, each time a new one."""

    def differing(self) -> Layout | None:
        """Return one of the same kind that stores tables in another way, and so refuses these.

        Returns:
            None if there are no such options: the test of what is refused is skipped.
        """
        return None

    @pytest.fixture(params=list(CASES.values()), ids=list(CASES))
    def case(self, request: pytest.FixtureRequest) -> Case:
        """The size of the tables."""
        case: Case = request.param
        return case

    def test_is_a_layout(self) -> None:
        """It has the protocol's members, a kind that a file's name can end with, and is a value."""
        layout = self.layout()
        assert isinstance(layout, Layout)
        assert re.fullmatch("[a-z][a-z0-9_]{0,31}", layout.kind)
        assert layout.collect_bytes >= 0
        assert layout == self.layout(), "two with the same options do the same, and are to be equal"

    def test_a_new_table_is_described(self, tmp_path: Path, case: Case) -> None:
        """What is made has the size and the schema asked for, and its description says so."""
        with closing(self._made(tmp_path / "a", case)) as backend:
            assert (len(backend), backend.schema) == (case.rows, case.schema)
            description = backend.describe()
            assert through_json(description) == description
            assert description["kind"] == self.layout().kind
            assert description["rows"] == case.rows
            assert Schema.from_json(description["schema"]) == case.schema

    def test_everything_is_at_one_path(self, tmp_path: Path, case: Case) -> None:
        """Nothing is made beside the path, open or closed: the state removes and counts what is there."""
        with closing(self._made(tmp_path / "a", case)) as backend:
            _fill(backend)
            backend.flush()
            assert os.listdir(tmp_path) == ["a"]
        assert os.listdir(tmp_path) == ["a"]

    def test_what_is_closed_opens_again(self, tmp_path: Path, case: Case) -> None:
        """Records, size and description are what they were, for whoever goes on and for who looks."""
        description, records = self._stored(tmp_path / "a", case)
        with closing(self.layout().open(tmp_path / "a", description)) as again:
            assert_records_equal(_everything(again), records)
            assert again.schema == case.schema
            assert again.describe() == description
        with closing(self.layout().look(tmp_path / "a", description).backend) as looked:
            assert_records_equal(_everything(looked), records)
            assert looked.describe() == description

    def test_a_copy_opens_elsewhere(self, tmp_path: Path, case: Case) -> None:
        """A closed table is its files: copied with its directory, it is the same table."""
        (tmp_path / "here").mkdir()
        description, records = self._stored(tmp_path / "here" / "a", case)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        shutil.rmtree(tmp_path / "here")
        with closing(self.layout().open(tmp_path / "there" / "a", description)) as again:
            assert_records_equal(_everything(again), records)

    def test_another_tables_files_are_refused(self, tmp_path: Path, case: Case) -> None:
        """A description fits one table and no other, however much alike the two are."""
        first, _ = self._stored(tmp_path / "a", case)
        second, _ = self._stored(tmp_path / "b", case)
        assert first != second
        for opens in self._opening():
            for name, description in (("a", second), ("b", first)):
                with pytest.raises(StateCorruptError):
                    opens(tmp_path / name, description)

    def test_a_missing_table_is_not_made(self, tmp_path: Path, case: Case) -> None:
        """Where nothing is, or a file without a table's content, nothing opens and nothing is made."""
        description, _ = self._stored(tmp_path / "a", case)
        (tmp_path / "file").write_bytes(b"not a table")
        for opens in self._opening():
            for name in ("absent", "file"):
                with pytest.raises(StateCorruptError):
                    opens(tmp_path / name, description)
        assert sorted(os.listdir(tmp_path)) == ["a", "file"]
        assert (tmp_path / "file").read_bytes() == b"not a table"

    def test_what_is_removed_can_be_made_anew(self, tmp_path: Path, case: Case) -> None:
        """After the path is removed, another table is made there, which knows nothing of the first."""
        path = tmp_path / "a"
        description, _ = self._stored(path, case)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        with closing(self._made(path, case)) as backend:
            assert_records_equal(_everything(backend), np.zeros(case.rows, case.schema.dtype))
            assert backend.describe() != description

    @pytest.mark.parametrize("allocate", ["reserve", "sparse"])
    def test_sizes_are_kept(self, tmp_path: Path, case: Case, allocate: Allocate) -> None:
        """What is made, and what comes to be when all rows are written, is no more than was told."""
        sizes = self.layout().sizes(case.rows, case.schema)
        assert 0 <= sizes.made <= _roomy(sizes.filled, 1)
        assert sizes.record >= sum(size for size, _ in sizes.pieces) >= case.schema.dim
        with closing(self.layout().create(tmp_path / "a", case.rows, case.schema, allocate)) as backend:
            backend.flush()
            made = sizes.made if allocate == "reserve" else 0
            assert _disk_bytes(tmp_path) <= _roomy(made, len(_files(tmp_path)))
            _fill(backend)
        assert _disk_bytes(tmp_path) <= _roomy(sizes.filled, len(_files(tmp_path)))
        assert max(file.stat().st_size for file in _files(tmp_path)) <= _roomy(sizes.largest, 1)

    def test_looking_beside_a_writer(self, tmp_path: Path, case: Case) -> None:
        """What a `write` has written before it returned is there for who looks, and the writer goes on."""
        with closing(self._made(tmp_path / "a", case)) as backend:
            source = self.layout().look(tmp_path / "a", through_json(backend.describe()))
            looked = source.backend
            for seed in range(3):
                records = _fill(backend, seed)
                if source.renew is not None:
                    looked.close()
                    looked = source.renew()
                assert_records_equal(_everything(looked), records)
            looked.close()
            _fill(backend, 3)

    def test_looking_changes_nothing(self, tmp_path: Path, case: Case) -> None:
        """Reading and scanning a closed table leave every file as it was, and make none."""
        description, records = self._stored(tmp_path / "a", case)
        before = {file: file.read_bytes() for file in _files(tmp_path)}
        with closing(self.layout().look(tmp_path / "a", description).backend) as looked:
            assert sum(len(block) for _, block in looked.scan(0, case.rows)) == case.rows
            assert_records_equal(_everything(looked), records)
        assert {file: file.read_bytes() for file in _files(tmp_path)} == before

    def test_fields_are_arrays(self, tmp_path: Path, case: Case) -> None:
        """A field of all rows has a shape, a dtype, and slices that are numpy arrays of what is stored."""
        description, records = self._stored(tmp_path / "a", case)
        source = self.layout().look(tmp_path / "a", description)
        with closing(source.backend):
            for name in case.schema.names:
                field, wanted = source.field(name), records[name]
                assert tuple(field.shape) == wanted.shape
                assert field.dtype == wanted.dtype
                for key in (slice(None), slice(case.rows // 3, case.rows // 2), slice(-1, None)):
                    assert field[key].tobytes() == wanted[key].tobytes()
                del field

    def test_what_is_like_a_table_makes_such_tables(self, tmp_path: Path, case: Case) -> None:
        """The options of a stored table are found in its description, and agree with what asked for them."""
        layout = self.layout()
        first, second = (self._stored(tmp_path / name, case)[0] for name in "ab")
        alike = layout.like(first)
        assert alike.kind == layout.kind
        assert layout.refusal(first) == alike.refusal(first) == ""
        with closing(alike.create(tmp_path / "c", case.rows, case.schema, "reserve")) as backend:
            third = backend.describe()
        shared = [key for key in first if first[key] == second[key]]
        assert {key: third[key] for key in shared} == {key: first[key] for key in shared}

    def test_another_way_is_refused(self, tmp_path: Path, case: Case) -> None:
        """A table that is stored in another way than asked for is told apart, with what to do."""
        other = self.differing()
        if other is None:
            pytest.skip("the layout has no options that a stored table could contradict")
        description, _ = self._stored(tmp_path / "a", case)
        assert re.fullmatch(r"is .+: .+", other.refusal(description))
        assert other.like(description).refusal(description) == ""

    def test_a_write_survives_a_kill(self, tmp_path: Path, case: Case) -> None:
        """Rows whose `write` had returned when the process was killed are there when the table is opened."""
        if not hasattr(os, "fork"):
            pytest.skip("the system has no fork")
        description = self._written_and_killed(tmp_path / "a", case)
        expected = random_records(case.schema, case.rows, seed=1)
        with closing(self.layout().look(tmp_path / "a", description).backend) as looked:
            assert_records_equal(_everything(looked), expected)
        with closing(self.layout().open(tmp_path / "a", description)) as again:
            assert_records_equal(_everything(again), expected)

    def test_a_state_lives_on_it(self, tmp_path: Path) -> None:
        """Training gives the bytes that it gives on the package's own layout, whatever befalls the state."""
        import dsa

        layout, ours, theirs = self.layout(), tmp_path / "ours", tmp_path / "theirs"
        _live(ours, "memmap")
        _live(theirs, layout)
        assert dsa.diff(ours, theirs, backend=layout).same
        assert dsa.diff(f"{ours}.checkpoint", f"{theirs}.checkpoint").same
        assert dsa.verify(theirs, backend=layout).ok
        assert dsa.repair(theirs, backend=layout).whole
        dsa.export_checkpoint(theirs, tmp_path / "later", backend=layout)
        assert dsa.diff(ours, tmp_path / "later").same

    def _made(self, path: Path, case: Case) -> StateBackend:
        return self.layout().create(path, case.rows, case.schema, "reserve")

    def _stored(self, path: Path, case: Case) -> tuple[dict[str, Any], Records]:
        """Make a table, fill and close it; return its description and its records."""
        with closing(self._made(path, case)) as backend:
            records = _fill(backend)
            return through_json(backend.describe()), records

    def _opening(self) -> tuple[Callable[[Path, dict[str, Any]], object], ...]:
        return self.layout().open, self.layout().look

    def _written_and_killed(self, path: Path, case: Case) -> dict[str, Any]:
        """Fill a table in a forked process that is killed then; return the table's description."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                backend = self._made(path, case)
                os.write(writing, json.dumps(backend.describe()).encode())
                _fill(backend, seed=1)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        os.close(writing)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with os.fdopen(reading) as pipe:
            description: dict[str, Any] = json.loads(pipe.read() or "{}")
        assert ended == -signal.SIGKILL, "the process could not write, or did not end by the kill"
        return description


def _fill(backend: StateBackend, seed: int = 0) -> Records:
    records = random_records(backend.schema, len(backend), seed)
    rows = np.arange(len(backend))
    backend.reserve(rows)
    backend.write(rows, records.copy())
    return records


def _everything(backend: StateBackend) -> Records:
    return backend.read(np.arange(len(backend)))


def _live(path: Path, backend: str | Layout) -> None:
    """Train, export, train on, open the state again, change its curvature and train on."""
    import dsa

    tables: dict[str, Any] = {"a": dsa.init.Uniform(300, 5, -0.01, 0.01, seed=1), "b": dsa.init.Zeros(70, 3)}
    with dsa.DiskSparseRiemannianAdam(tables, k=1.0, disk_dir=path, backend=backend) as optimizer:
        _train(optimizer, 4)
        optimizer.export_checkpoint(f"{path}.checkpoint")
        _train(optimizer, 2)
    again = dsa.DiskSparseRiemannianAdam(tables, k=1.0, disk_dir=path, backend=backend, resume=True)
    with again as optimizer:
        assert optimizer.global_step == 6
        optimizer.set_curvature(0.5)
        _train(optimizer, 2)


def _train(optimizer: Any, steps: int) -> None:  # noqa: ANN401 - importing its class would need torch here
    for _ in range(steps):
        draws = np.random.default_rng(optimizer.global_step)
        batches = {}
        for name, (rows, dim) in {"a": (300, 5), "b": (70, 3)}.items():
            chosen = np.unique(draws.integers(0, rows, 40))
            batches[name] = chosen, draws.standard_normal((len(chosen), dim), np.float32)
        optimizer.step(batches)


def _roomy(size: int, files: int) -> int:
    return size + size // 4 + files * _SLACK


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _disk_bytes(path: Path) -> int:
    status = [file.stat() for file in _files(path)]
    return sum(int(getattr(each, "st_blocks", -(-each.st_size // 512))) * 512 for each in status)
