"""Maps of ids on disk: a dict as the model, the bytes of the format, damage, kills, readers, full disks."""

import errno
import hashlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsa.backends import id_map_file, system
from dsa.backends.id_map import IdMap
from dsa.errors import (
    DiskSpaceError,
    RowTypeError,
    StateClosedError,
    StateCorruptError,
    StateFailedError,
    StateLockedError,
)
from dsa.kernels.id_map import DIRECTORY, NOTED, SEQUENCE

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
from id_hashes import hash_of, id_of

WIDTH, SEED = 16, 0xC0FFEE
LARGEST = 2**63 - 1
EXTREMES = np.array([-(2**63), -1, 0, 1, LARGEST])


def some_ids(count, seed=0):
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63, count, dtype=np.int64)
    return np.concatenate([EXTREMES, drawn])[:count]


def filled(path, count, **options):
    """A map of so many ids, rows in the order of the ids."""
    ids = some_ids(count)
    made = IdMap.create(path, **({"width": WIDTH, "seed": SEED} | options))
    made.put(ids, np.arange(count))
    return made, ids


IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where syncing takes no time: most of these tests don't ask what a device does."""


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as directory:
        yield Path(directory) / "users.ids"


@pytest.fixture
def path_on_disk(tmp_path):
    return tmp_path / "users.ids"


# --- a dict as the model --------------------------------------------------------------------------

POOLS = {
    "extremes": EXTREMES,
    "small": np.arange(-300, 300),
    "anything": some_ids(2_000, 5),
    "one prefix": np.array([id_of((0xABC << 52) + each * 0x9E3779B1, SEED) for each in range(300)]),
}
ALL = np.concatenate(list(POOLS.values()))


class Machine(RuleBasedStateMachine):
    """Batches with repetitions, closing, dying and rebuilding, in segments that split all the time."""

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=IN_MEMORY))
        self.path = self.directory / "ids"
        self.map = IdMap.create(self.path, width=WIDTH, seed=SEED)
        self.model = {}
        self.moment = 0

    def teardown(self):
        self.map.close()
        shutil.rmtree(self.directory)

    def batch(self, data):
        pool = POOLS[data.draw(st.sampled_from(list(POOLS)))]
        seed, count = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0, 1, 7, 200]))
        return np.random.default_rng(seed).choice(pool, count)

    @rule(data=st.data(), first=st.sampled_from([0, 10**6, 2**63 - 2 - 200]))
    def put(self, data, first):
        ids = self.batch(data)
        before = self.map.put(ids, first + np.arange(len(ids)))
        for position, key in enumerate(ids.tolist()):
            assert before[position] == self.model.get(key, -1)
            self.model[key] = first + position

    @rule(data=st.data())
    def remove(self, data):
        ids = self.batch(data)
        assert self.map.remove(ids).tolist() == [self.model.pop(key, -1) for key in ids.tolist()]

    @rule()
    def close_and_open(self):
        self.moment += 1
        self.map.close(f"{self.moment}")
        self.map = IdMap.open(self.path, f"{self.moment}")
        assert not self.map.interrupted

    @rule()
    def die_and_open(self):
        self.map.close()
        self.map = IdMap.open(self.path)

    @rule()
    def rebuild(self):
        blocks = [(ids, rows) for ids, rows in self.map.items()]
        self.map.close()
        self.map = IdMap.rebuild(self.path, blocks, width=WIDTH, seed=SEED)

    @invariant()
    def same_as_the_model(self):
        assert len(self.map) == len(self.model)
        assert self.map.find(ALL).tolist() == [self.model.get(key, -1) for key in ALL.tolist()]
        self.map.verify()
        held = {
            key: row
            for ids, rows in self.map.items()
            for key, row in zip(ids.tolist(), rows.tolist(), strict=True)
        }
        assert held == self.model


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=12, stateful_step_count=15)


def test_many_ids_on_a_disk(path_on_disk):
    """With directories in the header page and beyond it, and a file that is mapped anew."""
    path = path_on_disk
    made, ids = filled(path, 100_000, width=64)
    assert len(made._file.table.directory) > 1024
    assert made._file.table.placed >= 256
    order = np.random.default_rng(1).permutation(100_000)
    assert np.array_equal(made.find(ids[order]), order)
    assert (made.find(some_ids(1_000, 9)[5:]) == -1).all()
    assert made.nbytes <= path.stat().st_size < 2.5 * made.nbytes
    made.verify()
    made.close("a")
    made = IdMap.open(path, "a")
    assert np.array_equal(made.find(ids), np.arange(100_000))
    made.close()


def test_a_small_map_is_a_small_file(path):
    IdMap.create(path).close("")
    assert path.stat().st_size == 4096 + 65_536


def test_unsigned_ids_are_those_of_the_same_bits(path):
    made = IdMap.create(path)
    made.put(np.array([2**64 - 1, 2**63], np.uint64), np.array([3, 4]))
    assert made.find(np.array([-1, -(2**63)])).tolist() == [3, 4]
    made.close()


def test_ids_that_share_their_bits_get_another_seed(path):
    """However many there are, and although no split parts them."""
    ids = np.array([id_of(0x123456789A << 24 | each, SEED) for each in range(500)])
    made = IdMap.create(path, width=WIDTH, seed=SEED)
    made.put(EXTREMES, np.arange(5))
    assert (made.put(ids, np.arange(500)) == -1).all()
    assert made._file.table.seed != SEED
    assert made.find(ids).tolist() == list(range(500))
    assert made.find(EXTREMES).tolist() == list(range(5))
    assert made.nbytes < 60_000
    assert os.listdir(path.parent) == [path.name]
    made.verify()
    made.close("x")
    assert len(IdMap.open(path, "x", writable=False)) == 505


# --- the bytes of the format ----------------------------------------------------------------------


def digest(text):
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def file_of(entries, token, width=WIDTH, seed=SEED):
    """A map of one segment, as the format has it; `entries` are in the order in which they were put."""
    slots = [(0, 0)] * width
    for key, row in entries:
        place = (hash_of(key, seed) & 0xFFFFFFFF) * (width - 1) >> 32
        while slots[place][1]:
            place = (place + 1) % (width - 1)
        slots[place] = key, row + 1
    slots[-1] = len(entries), 0
    page = bytearray(4096)
    struct.pack_into("<16sQqqq", page, 0, b"dsa-id-map-1\n", seed, width, 1, zlib.crc32(bytes(4)))
    struct.pack_into("<6q", page, 64, 0, 0, len(entries), 1, 0, 0)
    struct.pack_into("<q16s", page, 128, 1, digest(token))
    struct.pack_into("<q", page, 184, 1)
    struct.pack_into("<q", page, 48, zlib.crc32(page))
    return bytes(page) + b"".join(struct.pack("<qq", *each) for each in slots)


ENTRIES = [(-(2**63), 0), (-1, 7), (0, 2**62), (5, 1), (LARGEST, 3)]


def test_the_bytes_are_those_of_the_format(path):
    made = IdMap.create(path, width=WIDTH, seed=SEED)
    for key, row in ENTRIES:
        made.put(np.array([key]), np.array([row]))
    made.close("life 1, 5 ids")
    assert path.read_bytes() == file_of(ENTRIES, "life 1, 5 ids")


def test_what_another_program_wrote_is_read(path):
    path.write_bytes(file_of(ENTRIES, "t"))
    made = IdMap.open(path, "t")
    assert made.find(np.array([key for key, _ in ENTRIES])).tolist() == [row for _, row in ENTRIES]
    made.close()
    assert path.read_bytes() == file_of(ENTRIES, "t")  # nothing was changed, nothing was written


# --- when it is trusted ---------------------------------------------------------------------------


def test_a_map_of_another_moment_is_not_trusted(path):
    made, _ = filled(path, 100)
    made.close("7")
    with pytest.raises(StateCorruptError, match="of another moment than '8': rebuild it"):
        IdMap.open(path, "8")
    IdMap.open(path, "7").close("8")
    IdMap.open(path, "8").close()
    with pytest.raises(StateCorruptError):
        IdMap.open(path, "7")


def test_the_first_change_marks_it_on_the_device_before_anything_else(path, monkeypatch):
    made, ids = filled(path, 100)
    made.close("7")
    whole, synced = path.read_bytes(), []
    made = IdMap.open(path, "7")

    def sync(descriptor):
        synced.append(path.read_bytes())

    monkeypatch.setattr(system, "sync_file", sync)
    made.find(ids)
    assert path.read_bytes() == whole
    made.put(ids, np.arange(100)[::-1].copy())
    made.remove(ids[:5])
    assert len(synced) == 1
    assert synced[0][4096:] == whole[4096:]
    assert synced[0][512:4096] == whole[512:4096]  # one sector is changed, which is written or not
    path.with_name("copy").write_bytes(synced[0])
    with pytest.raises(StateCorruptError, match="is not whole: it was being changed"):
        IdMap.open(path.with_name("copy"), "7")
    made.close()


def test_after_a_restart_of_the_system_it_is_not_trusted(path, monkeypatch):
    made, _ = filled(path, 100)
    made.close()
    IdMap.open(path).close()
    monkeypatch.setattr(system, "boot_identity", lambda: "another")
    with pytest.raises(StateCorruptError, match="when the system went down"):
        IdMap.open(path)
    monkeypatch.setattr(system, "boot_identity", lambda: "")
    with pytest.raises(StateCorruptError):
        IdMap.open(path)


def test_a_refused_sync_is_final(path, monkeypatch):
    made, ids = filled(path, 100)
    made.close("7")
    made = IdMap.open(path, "7")

    def refuse(descriptor):
        raise OSError(errno.EIO, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(system, "sync_file", refuse)
        with pytest.raises(OSError, match="refused"):
            made.put(ids, np.zeros(100, np.int64))
    with pytest.raises(StateFailedError, match="open the state again"):
        made.put(ids, np.zeros(100, np.int64))
    with pytest.raises(StateFailedError):
        made.remove(ids)
    assert np.array_equal(made.find(ids), np.arange(100))
    made.close("7")
    made = IdMap.open(path, "7")
    assert made.interrupted
    with monkeypatch.context() as patch:
        patch.setattr(system, "sync_file", refuse)
        with pytest.raises(OSError, match="refused"):
            made.close("8")
    made = IdMap.open(path, "8")
    assert made.interrupted
    made.close()


def test_use_after_close(path):
    made, ids = filled(path, 20)
    made.close("x")
    made.close("y")
    for use in (
        lambda: made.find(ids),
        lambda: made.put(ids, np.arange(20)),
        lambda: made.remove(ids),
        made.flush,
    ):
        with pytest.raises(StateClosedError, match="was closed: open"):
            use()
    assert path.read_bytes()
    IdMap.open(path, "x").close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_changes_nothing(path):
    made, ids = filled(path, 20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            made.put(ids, np.zeros(20, np.int64))
        except StateClosedError:
            made.close("x")
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(made.find(ids), np.arange(20))
    made.close("y")
    IdMap.open(path, "y").close()


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        (np.array([1.0]), np.array([1]), "ids=.* can't be looked up: pass"),
        (np.array([1, 2], np.int32), np.array([1, 2]), "pass a 1-D array of int64"),
        ([1], np.array([1]), "pass a 1-D array of int64"),
        (np.array([[1]]), np.array([1]), "pass a 1-D array of int64"),
        (np.array([1]), np.array([-1]), "rows of -1 to -1 can't be those of ids"),
        (np.array([1]), np.array([LARGEST]), "pass rows of 0 to"),
        (np.array([1]), np.array([1.0]), "rows=.* can't be those of ids"),
        (np.array([1]), np.array([1, 2]), "1 ids can't have 2 rows: pass a row for each id"),
    ],
)
def test_what_can_not_be_put_is_refused(path, ids, rows, message):
    made, _ = filled(path, 5)
    with pytest.raises(RowTypeError, match=message):
        made.put(ids, rows)
    assert len(made) == 5
    made.close()


@pytest.mark.parametrize("width", [0, 15, 2**20 + 1])
def test_widths_out_of_range(path, width):
    with pytest.raises(ValueError, match="pass 16 to 1048576 slots"):
        IdMap.create(path, width=width)
    assert not path.exists()


def test_creation_leaves_what_is_there(path):
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        IdMap.create(path)
    assert path.read_bytes() == b"precious"


# --- damage ---------------------------------------------------------------------------------------


def test_any_damage_of_the_header_is_known(path):
    made, _ = filled(path, 60)
    made.close("7")
    sound = path.read_bytes()
    for place in [*range(0, 200), *range(2048, 2100), 4095]:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        for writable in (True, False):
            with pytest.raises(StateCorruptError, match="rebuild it from the ids"):
                IdMap.open(path, "7", writable=writable)


@pytest.mark.parametrize("large", [False, True])
def test_truncated_and_extended_files_are_known(path, large):
    made, _ = filled(path, 20_000 if large else 60)
    made.close("7")
    sound = path.read_bytes()
    for size in (0, 1, 15, 4095, 4096, 4097, len(sound) - 256, len(sound) - 1):
        path.write_bytes(sound[:size])
        with pytest.raises(StateCorruptError, match="rebuild it from the ids"):
            IdMap.open(path, "7")
    for more in (b"\0", bytes(256), sound):
        path.write_bytes(sound + more)
        with pytest.raises(StateCorruptError, match="truncated or extended"):
            IdMap.open(path, "7")
    path.unlink()
    with pytest.raises(StateCorruptError, match="is missing: rebuild it"):
        IdMap.open(path, "7")
    path.mkdir()
    with pytest.raises(StateCorruptError, match="is missing: rebuild it"):
        IdMap.open(path, "7")


def test_damage_of_a_large_directory_is_known(path):
    made, _ = filled(path, 20_000)
    start = 4096 + made._file.table.placed // 256 * WIDTH * 16
    made.close("7")
    damaged = bytearray(path.read_bytes())
    damaged[start + 40] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(StateCorruptError, match="damaged in its directory"):
        IdMap.open(path, "7")


def test_no_header_of_an_interrupted_map_leads_out_of_the_file(path):
    """Its words have no checksum: any numbers may be there. Nothing crashes, nothing loops."""
    made, ids = filled(path, 2_000)
    made.close()
    sound = path.read_bytes()
    numbers = [-(2**63), -1, 0, 1, 2, 255, 256, 513, 70_000, 2**31, 2**62, LARGEST]
    opened = 0
    for word in (2, 3, *range(8, 16)):
        for number in numbers:
            with open(path, "r+b") as file:  # the same file: its number is what makes it trusted
                file.write(sound)
                file.seek(8 * word)
                file.write(struct.pack("<q", number))
            try:
                made = IdMap.open(path)
            except (StateCorruptError, DiskSpaceError):
                continue
            opened += 1
            made.find(ids)
            made.put(ids[:300] ^ 12345, np.arange(300))
            made.remove(ids[:300])
            len(made)
            made.close()
            with open(path, "r+b") as file:
                file.truncate(len(sound))
    assert opened > 10


def test_damaged_segments_are_found_by_verifying(path):
    made, _ = filled(path, 200)
    made.verify()
    slots = made._file.table.slots
    slot = np.flatnonzero(slots[: WIDTH * made._file.segments, 1])[3]
    slots[slot, 0] ^= 1 << 40
    with pytest.raises(StateCorruptError, match="damaged in its segments: rebuild it"):
        made.verify()
    made.close()


# --- kills ----------------------------------------------------------------------------------------

needs_kill = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


def in_a_child(function):
    """Run a function in a forked process, which is ended where it ends; return the process."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(1)
    return child


@needs_kill
def test_killed_in_the_middle_of_a_batch(path_on_disk):
    """Whatever instruction it was: ids have their rows or none, and repeating the batch makes it whole."""
    path, count = path_on_disk, 4_000
    ids, rows, random = some_ids(count), np.arange(count), np.random.default_rng(7)
    IdMap.create(path, width=64).close()
    renewed = 0
    for attempt in range(12):
        ready, told = os.pipe()

        def change(told=told, seed=attempt):
            rng = np.random.default_rng(seed)
            made = IdMap.open(path)
            os.write(told, b".")
            while True:
                some = rng.integers(0, count, 300)
                made.put(ids[some], some)
                made.remove(ids[rng.integers(0, count, 250)])

        child = in_a_child(change)
        os.close(told)
        assert os.read(ready, 1) == b"."
        os.close(ready)
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        made = IdMap.open(path)
        assert made.interrupted
        renewed += made._file.table.header[NOTED] == 0
        made.verify()
        found = made.find(ids)
        assert ((found == -1) | (found == rows)).all()
        assert len(made) == np.count_nonzero(found >= 0)
        made.close()
    assert renewed
    made = IdMap.open(path)
    made.put(ids, rows)
    assert np.array_equal(made.find(ids), rows)
    assert len(made) == count
    made.close("x")
    IdMap.open(path, "x").close()


KILLED = 9


@needs_kill
def test_a_kill_at_every_gate_of_growing(path, monkeypatch):
    """What python does between passes: blocks, length, directory, another seed."""
    shared = [id_of(0x77 << 56 | each * 31, SEED) for each in range(60)]
    ids = np.concatenate([shared, some_ids(400, 3)[5:]])
    rows = np.arange(len(ids))
    gates = [(os, "ftruncate"), (system, "allocate_range"), (os, "replace"), (system, "sync_directory")]

    def grow(place):
        made = IdMap.create(path, width=WIDTH, seed=SEED)
        made.put(EXTREMES, np.arange(5))
        left = [place]

        def gated(function):
            def call(*arguments):
                if left[0] == 0:
                    os._exit(KILLED)
                left[0] -= 1
                return function(*arguments)

            return call

        for module, name in gates:
            monkeypatch.setattr(module, name, gated(getattr(module, name)))
        made.put(ids, rows)
        os._exit(0)

    code, place = KILLED, 0
    while code == KILLED:
        code = os.waitstatus_to_exitcode(os.waitpid(in_a_child(lambda place=place: grow(place)), 0)[1])
        assert code in (0, KILLED)
        place += 1
        try:
            made = IdMap.open(path)
        except StateCorruptError:  # between the two steps of giving another file its name
            made = IdMap.rebuild(path, [(EXTREMES, np.arange(5))], width=WIDTH)
        made.verify()
        assert made.find(EXTREMES).tolist() == list(range(5))
        found = made.find(ids)
        assert ((found == -1) | (found == rows)).all()
        made.put(ids, rows)
        assert np.array_equal(made.find(ids), rows)
        assert len(made) == 5 + len(ids)
        made.close()
        path.unlink()
        path.with_name("users.ids.tmp").unlink(missing_ok=True)
    assert place > 20


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reseed", [False, True])
def test_a_full_disk_changes_nothing(path, monkeypatch, reseed):
    made, ids = filled(path, 500)
    before = dict(zip(ids.tolist(), range(500), strict=True))
    allocate, room = system.allocate_range, [3]

    def full(descriptor, start, length):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "full")
        return allocate(descriptor, start, length)

    more = some_ids(5_000, 8)
    if reseed:
        more = np.array([id_of(0x77 << 56 | each, SEED) for each in range(500)])
    batch = np.concatenate([ids[:10], more, ids[:10]])
    with monkeypatch.context() as patch:
        patch.setattr(system, "allocate_range", full)
        for _ in range(2):
            with pytest.raises(DiskSpaceError, match="remove ids and rebuild the map"):
                made.put(batch, 10_000 + np.arange(len(batch)))
            assert len(made) == 500
            assert np.array_equal(made.find(ids), np.arange(500))
            assert (made.find(np.setdiff1d(more, ids)) == -1).all()
            made.verify()
    assert os.listdir(path.parent) == [path.name]
    made.put(batch, 10_000 + np.arange(len(batch)))
    before.update(zip(batch.tolist(), range(10_000, 10_000 + len(batch)), strict=True))
    assert made.find(batch).tolist() == [before[key] for key in batch.tolist()]
    made.close()


def test_creation_on_a_full_disk_leaves_nothing(path, monkeypatch):
    def full(descriptor, start, length):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(system, "allocate_range", full)
    with pytest.raises(DiskSpaceError):
        IdMap.create(path)
    assert os.listdir(path.parent) == []


def test_a_file_system_that_can_not_allocate(path, monkeypatch):
    monkeypatch.setattr(system, "allocate_range", lambda *_: False)
    made, ids = filled(path, 3_000)
    made.close("x")
    made = IdMap.open(path, "x")
    assert np.array_equal(made.find(ids), np.arange(3_000))
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="blocks are counted by means of Linux")
def test_every_segment_has_blocks_before_it_is_stored_to(path_on_disk):
    """Also in a copy that has holes."""
    path = path_on_disk
    made, ids = filled(path, 60_000, width=4096)
    assert system.is_allocated(made._file._file, made.nbytes)
    made.remove(ids)
    made.close("x")
    copy = path.with_name("copy")
    with open(copy, "wb") as file:
        for start, page in enumerate(
            path.read_bytes()[first : first + 4096] for first in range(0, made_size(path), 4096)
        ):
            if page.strip(b"\0"):
                file.seek(4096 * start)
                file.write(page)
        file.truncate(made_size(path))
    made = IdMap.open(copy, "x")
    assert system.is_allocated(made._file._file, made.nbytes)
    made.close()


def made_size(path):
    return path.stat().st_size


# --- readers --------------------------------------------------------------------------------------

READER = """
import sys
import numpy as np
from pathlib import Path
from dsa.backends.id_map import IdMap

path, count = Path(sys.argv[1]), int(sys.argv[2])
ids = np.random.default_rng(0).integers(-2**63, 2**63, count, dtype=np.int64)
rows = np.arange(count)
made = IdMap.open(path, writable=False)
resident, looks = ids[:1000], 0
made.find(resident)
print("ready", flush=True)
while True:
    assert np.array_equal(made.find(resident), rows[:1000])
    found = made.find(ids)
    assert ((found == -1) | (found == rows)).all()
    looks += 1
    if looks % 20 == 0:
        print(looks, flush=True)
"""


def test_a_reader_beside_a_writer(path):
    """Ids that stay are found in every look, while others are put and removed and the file is replaced."""
    count = 20_000
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, count, dtype=np.int64)
    rows = np.arange(count)
    made = IdMap.create(path, width=64)
    made.put(ids[:1000], rows[:1000])
    rng = np.random.default_rng(3)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(path), str(count)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        try:
            assert reader.stdout.readline() == b"ready\n", reader.stderr.read().decode()
            for turn in range(3):
                os.set_blocking(reader.stdout.fileno(), False)
                told = None
                for _ in range(20_000):
                    some = rng.integers(1000, count, 500)
                    made.put(ids[some], rows[some])
                    made.remove(ids[rng.integers(1000, count, 400)])
                    told = reader.stdout.readline()
                    if told or reader.poll() is not None:
                        break
                assert told, reader.stderr.read().decode()
                if turn == 1:  # another file takes its place
                    made._reseed()
        finally:
            reader.kill()
    made.verify()
    made.close()


def test_a_thread_that_reads_beside_the_one_that_writes(path):
    """While the file is mapped anew, the directory moves and segments are used again."""
    made, ids = filled(path, 1_000, width=64)
    others = some_ids(60_000, 6)[5:]
    looks, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            looks.append(np.array_equal(made.find(ids), np.arange(1_000)))

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(0, len(others), 2_000):
        made.put(others[start : start + 2_000], np.arange(len(others[start : start + 2_000])))
        made.remove(others[start : start + 1_500])
        seen = len(looks)
        while len(looks) == seen and reader.is_alive():
            time.sleep(0)
    stop.set()
    reader.join()
    assert looks
    assert all(looks)
    made.verify()
    made.close()


def test_a_reader_of_a_map_that_never_comes_to_rest(path, monkeypatch):
    """A writer that died in the middle of a removal: an error after a moment, and opening it mends it."""
    made, ids = filled(path, 100)
    made._file.table.header[SEQUENCE] += 1
    reader = IdMap.open(path, writable=False)
    with pytest.raises(StateLockedError, match="does not come to rest: try again, or open the map"):
        reader.find(ids)
    made.close()
    made = IdMap.open(path)
    assert np.array_equal(reader.find(ids), np.arange(100))
    with pytest.raises(StateClosedError, match="was opened for reading: open it writable"):
        reader.put(ids, np.arange(100))
    reader.close("x")
    made.close()


def test_a_reader_follows_a_growing_file(path):
    made, ids = filled(path, 10)
    reader = IdMap.open(path, writable=False)
    more = some_ids(30_000, 4)[5:]
    made.put(more, np.arange(len(more)))
    assert made._file.table.header[DIRECTORY] >= 256
    assert np.array_equal(reader.find(more), np.arange(len(more)))
    assert len(reader) == len(made) == 10 + len(more)
    made.close("x")
    assert np.array_equal(reader.find(ids), np.arange(10))
    made = IdMap.rebuild(path, [(more, np.arange(len(more))[::-1].copy())])
    assert np.array_equal(reader.find(more), np.arange(len(more))[::-1])
    made.close()
    reader.close()


def test_rebuilding_fails_without_a_trace(path):
    made, ids = filled(path, 100)
    made.close("x")

    def blocks():
        yield ids, np.arange(100)
        raise KeyError

    with pytest.raises(KeyError):
        IdMap.rebuild(path, blocks())
    assert os.listdir(path.parent) == [path.name]
    made = IdMap.open(path, "x")
    assert np.array_equal(made.find(ids), np.arange(100))
    made.close()


def test_what_is_no_map_is_left_alone_by_retiring(path):
    path.write_bytes(b"something else")
    id_map_file.retire(path)
    assert path.read_bytes() == b"something else"
    path.unlink()
    id_map_file.retire(path)
    assert not path.exists()
