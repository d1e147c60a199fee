"""A device that refuses to sync: never tried again, said once and then by everything, and told on opening.

The first sync that fails is the only one that tells: the system may drop what it could not write, and call
the pages clean. So whatever comes after it, every later sync succeeds here.
"""

import errno
import os
import warnings

import numpy as np
import pytest
from current_files import description, table_file

from dsa import DiskSparseRiemannianAdam, init
from dsa.backends import Zarr
from dsa.errors import StateClosedError, StateFailedError, StateWarning
from dsa.state.metadata import read_metadata

ROWS = {"left": 40, "right": 25}
KINDS = {
    "plain": {},
    "queued": {"async_writes": True},
    "zarr": {"backend": Zarr()},
    "compressed": {"backend": Zarr(compression="zstd", overlay_bytes=1 << 16)},
}
DURABILITIES = ["process", "power", "none"]
every_durability = pytest.mark.parametrize("durability", DURABILITIES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(path, **options):
    tables = {name: init.Normal(rows, 3, 0.1, seed=1) for name, rows in ROWS.items()}
    return DiskSparseRiemannianAdam(tables, **{"lr": 0.1, "disk_dir": path, **options})


def batch(seed):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.integers(0, rows, 9), rng.standard_normal((9, 3)).astype(np.float32))
        for name, rows in ROWS.items()
    }


def told(optimizer):
    held = optimizer._state.tables.values()
    return [(table.k, table.backend.read(np.arange(len(table))).tobytes()) for table in held]


def reopened(path, **options):
    """Open, and return the optimizer with what was said of the state."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build(path, resume=True, **options)
    return optimizer, [str(each.message) for each in caught if each.category is StateWarning]


class Device:
    """Refuses the n-th sync from now on, once."""

    def __init__(self, monkeypatch):
        self.left = -1
        self.calls = self.refused = 0
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                monkeypatch.setattr(os, name, self._refusing(getattr(os, name)))

    def refuse(self, number):
        self.left = number

    def places(self, operation, most=16):
        """Return numbers to refuse, of the syncs that an operation makes, and one more than there are."""
        before = self.calls
        operation()
        count = self.calls - before
        return sorted(
            {round(place * count / most) for place in range(most + 1)} if count > most else range(count + 1)
        )

    def _refusing(self, real):
        def sync(descriptor):
            self.calls += 1
            if self.left == 0:
                self.left = -1
                self.refused += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.left -= self.left > 0
            real(descriptor)

        return sync


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


@every_durability
@pytest.mark.parametrize("kind", ["plain", "queued", "zarr"])
def test_said_by_everything_and_let_go_by_close(tmp_path, device, durability, kind):
    options = KINDS[kind] | {"durability": durability}
    path = tmp_path / "state"
    optimizer = build(path, **options)
    optimizer.step(batch(0))
    optimizer.flush()
    optimizer.step(batch(1))
    expected = told(optimizer)
    device.refuse(0)
    with pytest.raises(OSError, match="Input/output") as caught:
        optimizer.flush()
    assert not isinstance(caught.value, StateFailedError)
    for use in (
        lambda: optimizer.step(batch(2)),
        lambda: optimizer.step({}),
        lambda: optimizer.read_rows([1], "left"),
        lambda: optimizer.set_curvature(4.0),
        lambda: optimizer.reproject_all(),
        lambda: optimizer.export_checkpoint(tmp_path / "checkpoint"),
        lambda: optimizer.flush(),
        lambda: optimizer.close(),
    ):
        with pytest.raises(StateFailedError, match=r"has refused to keep .* Input/output") as caught:
            use()
        assert caught.value.errno == errno.EIO
    optimizer.close()
    with pytest.raises(StateClosedError):
        optimizer.step(batch(2))
    before = {name: table_file(path, name).name for name in ROWS}
    assert description(path)["failed"]
    again, warned = reopened(path, **options)
    with again:
        assert again.global_step == 2
        assert told(again) == expected
        refused = [text for text in warned if "the device refused to keep the state" in text]
        assert len(refused) == (durability != "power")
        for text in refused:
            assert "rows that were written after step 1 may have gone back to what they were then" in text
            assert "its files are made anew" in text
            assert "import a checkpoint if that will not do" in text
            counted = "it is whole up to step 1; of the steps up to 2 " in text
            assert counted == (durability == "process")
        after = {name: table_file(path, name).name for name in ROWS}
        assert not set(after.values()) & set(before.values()), "blocks that were refused are used again"
        assert sorted(each.name for each in path.iterdir() if each.suffix in (".dsa", ".zarr")) == sorted(
            after.values()
        )
        again.step(batch(2))
    assert not read_metadata(path).failed
    quiet, warned = reopened(path, **options)
    quiet.close()
    assert not warned


@every_durability
def test_a_shard_that_was_not_synced_is_written_anew(tmp_path, device, durability):
    """Compressed shards are whole files: nothing relies on one whose sync was refused."""
    options = KINDS["compressed"] | {"durability": durability}
    with build(tmp_path / "plain", **options) as plain:
        plain.step(batch(0))
        expected = told(plain)
    with build(tmp_path / "state", **options) as optimizer:
        optimizer.step(batch(0))
        device.refuse(0)
        with pytest.raises(OSError, match="Input/output"):
            optimizer.flush()
        with pytest.raises(OSError, match=r"a queued write has failed .* its records are kept"):
            optimizer.step(batch(1))
        optimizer.flush()
        assert told(optimizer) == expected
    again, warned = reopened(tmp_path / "state", **options)
    with again:
        assert (again.global_step, told(again), warned) == (1, expected, [])


OPERATIONS = {
    "step": lambda optimizer: optimizer.step(batch(3)),
    "flush": lambda optimizer: optimizer.flush(),
    "close": lambda optimizer: optimizer.close(),
    "curvature": lambda optimizer: optimizer.set_curvature(4.0),
    "reproject": lambda optimizer: optimizer.reproject_all(),
}


def refused_by(operation, argument):
    """Tell whether an operation fails as the device does."""
    try:
        operation(argument)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return True
    return False


def trained(path, options):
    """An optimizer that has taken three steps."""
    optimizer = build(path, **options)
    for step in range(3):
        optimizer.step(batch(step))
    if options.get("durability") == "none":
        optimizer.flush()  # its steps count from here on only
    return optimizer


def let_go(optimizer):
    with pytest.raises(StateFailedError):
        optimizer.close()
    optimizer.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("kind", "durability"),
    [
        *(("plain", durability) for durability in DURABILITIES),
        *((kind, "power") for kind in KINDS if kind != "plain"),
    ],
)
def test_whichever_sync_is_refused(tmp_path, device, monkeypatch, operation, kind, durability):
    """The state goes on as if nothing had been, or refuses everything; an opening finds whole steps."""
    monkeypatch.setattr("dsa.state.creation._RETAINING_BYTES", 4096)  # the ring goes round within a few steps
    options, operate = KINDS[kind] | {"durability": durability}, OPERATIONS[operation]
    with build(tmp_path / "plain", **KINDS[kind]) as plain:
        states = [told(plain)]
        for step in range(6):
            plain.step(batch(step))
            states.append(told(plain))
    with trained(tmp_path / "measured", options) as measured:
        places = device.places(lambda: operate(measured))
        after = told(measured) if operation != "close" else None
    for number in places:
        path = tmp_path / f"state-{number}"
        optimizer = trained(path, options)
        at, refused = optimizer.global_step, device.refused
        device.refuse(number)
        failed = refused_by(operate, optimizer)
        happened = device.refused > refused
        device.refuse(-1)
        returned = at + (operation == "step" and not failed)
        if failed:
            try:
                if kind == "compressed":
                    optimizer.flush()  # a shard that was not synced is written anew, into another file
                optimizer.step(batch(optimizer.global_step))
                returned = optimizer.global_step
                optimizer.close()
            except StateFailedError:
                let_go(optimizer)
            except StateClosedError:
                assert operation in ("curvature", "close")
        else:
            # Closing files of tables that were replaced already is nobody's loss.
            assert operation == "curvature" or not happened, f"sync {number} was refused, nobody said so"
            assert operation == "close" or told(optimizer) == after
            optimizer.close()
        again, _ = reopened(path, **options)
        with again:
            found, step = told(again), again.global_step
        assert step in (returned, returned + 1), f"sync {number}"
        if operation == "curvature" and found[0][0] == 4.0:
            assert step > 3 or found == after
        else:
            assert found == states[step], f"sync {number}"
    assert not happened, "there are more syncs than were tried"


@every_kind
def test_an_opening_whose_sync_is_refused_can_be_tried_again(tmp_path, device, kind):
    """The state of a process that died is brought onto the device by the opening; that, too, may fail."""
    options = KINDS[kind] | {"durability": "power"}

    def open_and_close(path):
        reopened(path, **options)[0].close()

    trained(tmp_path / "measured", options)._state.abandon()
    for number in device.places(lambda: open_and_close(tmp_path / "measured")):
        path = tmp_path / f"state-{number}"
        optimizer = trained(path, options)
        expected = told(optimizer)
        optimizer._state.abandon()
        refused = device.refused
        device.refuse(number)
        failed = refused_by(open_and_close, path)
        happened = device.refused > refused
        device.refuse(-1)
        assert failed or not happened or read_metadata(path).status == "closed"
        again, _ = reopened(path, **options)
        with again:
            assert again.global_step == 3
            assert told(again) == expected
    assert not happened


@every_durability
def test_a_refusal_that_the_description_can_not_take_either_is_told(
    tmp_path, device, monkeypatch, durability
):
    """Everything after the refusal is refused as well: the next opening knows all the same."""
    path = tmp_path / "state"
    optimizer = build(path, durability=durability)
    optimizer.flush()
    for seed in range(3):
        optimizer.step(batch(seed))
    contents = told(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(
            "dsa.state.state_directory.write_metadata",
            lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, "no")),
        )
        device.refuse(0)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            optimizer.flush()
    with pytest.raises(StateFailedError):
        optimizer.close()
    assert read_metadata(path).failed
    again, said = reopened(path, durability=durability)
    with again:
        assert told(again) == contents
        assert durability == "power" or any("refused to keep the state" in each for each in said)
    assert not list(path.glob("dsa.failed"))
    again, said = reopened(path, durability=durability)
    again.close()
    assert not said
