"""The device against a model, through the loop device that a file system would sit on."""

import errno
import fcntl
import mmap
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from device import BlockDevice, attached, mounts_in, remove_abandoned
from filesystems import SIZE, extents, mounted, new, offered, unavailable
from volatile_cache import GRAINS, Outcome, VolatileCache

pytestmark = pytest.mark.usefixtures("block_devices")

SECTOR = 512
SECTORS = 400


class Direct:
    """A block device without the kernel's page cache in between."""

    def __init__(self, node):
        self.file = os.open(node, os.O_RDWR | os.O_DIRECT)
        self.buffer = mmap.mmap(-1, SECTORS * SECTOR)

    def write(self, start, data):
        self.buffer[: len(data)] = data
        os.pwritev(self.file, [memoryview(self.buffer)[: len(data)]], start)

    def read(self, start, size):
        os.preadv(self.file, [memoryview(self.buffer)[:size]], start)
        return self.buffer[:size]

    def sync(self):
        os.fsync(self.file)


@pytest.fixture
def device():
    with BlockDevice(SECTORS * SECTOR) as device:
        yield device


@pytest.fixture
def direct(device):
    with attached(device.file) as node:
        direct = Direct(node)
        yield direct
        os.close(direct.file)


def draw_write(rng):
    first, count = rng.randrange(SECTORS - 40), rng.randint(1, 40)
    return first * SECTOR, rng.randbytes(count * SECTOR)


@pytest.mark.parametrize("seed", range(3))
def test_random_writes_flushes_and_losses_of_power(device, direct, seed):
    """Each sector of an image is what was flushed, or any that was written there since."""
    rng = random.Random(seed)
    now, possible = bytearray(SECTORS * SECTOR), [{bytes(SECTOR)} for _ in range(SECTORS)]
    image = device.directory / "image"
    for _ in range(150):
        lot = rng.random()
        if lot < 0.6:
            start, data = draw_write(rng)
            direct.write(start, data)
            now[start : start + len(data)] = data
            for at in range(0, len(data), SECTOR):
                possible[(start + at) // SECTOR].add(data[at : at + SECTOR])
        elif lot < 0.7:
            direct.sync()
            possible = [{bytes(now[at : at + SECTOR])} for at in range(0, len(now), SECTOR)]
        elif lot < 0.85:
            start = rng.randrange(SECTORS) * SECTOR
            assert direct.read(start, SECTOR) == now[start : start + SECTOR]
        else:
            device.image(rng, image)
            left = image.read_bytes()
            assert all(left[at : at + SECTOR] in possible[at // SECTOR] for at in range(0, len(left), SECTOR))


@pytest.mark.parametrize("grain", GRAINS)
def test_outcomes_between_nothing_and_everything(device, direct, grain):
    old, new_content = bytes([1]) * SECTORS * SECTOR, bytes([2]) * SECTORS * SECTOR
    direct.write(0, old)
    direct.sync()
    for at in range(0, len(old), 16 * SECTOR):
        direct.write(at, new_content[at : at + 16 * SECTOR])
    image = device.directory / "image"
    found = {}
    for share in (0.0, 0.5, 1.0):
        device.image(random.Random(1), image, Outcome(grain, share, 1))
        found[share] = image.read_bytes()
    assert found[0.0] == old
    assert found[1.0] == new_content
    assert 0.2 < sum(value == 2 for value in found[0.5]) / len(old) < 0.8
    size = grain or 16 * SECTOR
    pieces = {found[0.5][at : at + size] for at in range(0, len(old), size)}
    assert {len(set(piece)) for piece in pieces} == {1}


def test_writes_fail_where_and_as_often_as_asked(device, direct):
    device.fail([(8 * SECTOR, 9 * SECTOR)], times=2)
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            direct.write(4 * SECTOR, b"x" * 8 * SECTOR)
    direct.write(9 * SECTOR, b"y" * SECTOR)
    assert direct.read(4 * SECTOR, 6 * SECTOR) == bytes(5 * SECTOR) + b"y" * SECTOR
    direct.write(4 * SECTOR, b"x" * 8 * SECTOR)
    assert device.figures()["failed_writes"] == 2


def test_a_flush_that_fails_makes_nothing_durable(device, direct):
    direct.write(0, b"x" * SECTOR)
    device.fail_flushes(1)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        direct.sync()
    image, lost = device.directory / "image", Outcome(SECTOR, 0.0, 1)
    device.image(random.Random(1), image, lost)
    assert not any(image.read_bytes())
    direct.sync()
    device.image(random.Random(1), image, lost)
    assert image.read_bytes()[:SECTOR] == b"x" * SECTOR


def test_an_image_becomes_a_disk(device, direct):
    direct.write(SECTOR, b"x" * SECTOR)
    image, arrived = device.directory / "image", Outcome(0, 1.0, 1)
    device.image(random.Random(1), image, arrived)
    cache = VolatileCache(SECTORS * SECTOR)
    cache.load(str(image))
    assert cache.read(SECTOR, SECTOR) == b"x" * SECTOR
    cache.hold().draw(Outcome(0, 0.0, 1), str(image))
    assert image.read_bytes()[SECTOR : 2 * SECTOR] == b"x" * SECTOR


@pytest.mark.parametrize("filesystem", offered())
def test_synced_files_survive_on_a_file_system(filesystem):
    """Every image can be mounted and has all that was synced, wherever else it was torn."""
    if reason := unavailable(filesystem):
        pytest.skip(reason)
    rng = random.Random(5)
    with BlockDevice(SIZE) as device, new(device, filesystem, device.directory / "mounted") as point:
        for number in range(6):
            data = rng.randbytes(50_000)
            with open(point / f"{number}", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            folder = os.open(point, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            (point / "unsynced").write_bytes(rng.randbytes(50_000))
            image = device.directory / "image"
            device.image(rng, image)
            with mounted(image, filesystem, device.directory / "checked") as checked:
                assert (checked / f"{number}").read_bytes() == data


@pytest.mark.parametrize("filesystem", [each for each in offered() if each != "btrfs"])
def test_extents_are_where_the_bytes_lie(filesystem):
    if reason := unavailable(filesystem):
        pytest.skip(reason)
    data = random.Random(1).randbytes(300_000)
    with BlockDevice(SIZE) as device, new(device, filesystem, device.directory / "mounted") as point:
        (point / "file").write_bytes(data)
        places = extents(point / "file")
        with open(device.file, "rb", buffering=0) as disk:
            found = b"".join(os.pread(disk.fileno(), stop - start, start) for start, stop in places)
        assert found[: len(data)] == data


def test_several_at_once_and_none_is_left():
    devices = [BlockDevice(1 << 20) for _ in range(3)]
    assert len({device.directory for device in devices}) == 3
    for device in devices:
        assert mounts_in(device.directory)
        device.close()
        assert not device.directory.exists()
        assert not mounts_in(device.directory)


_ABANDON = """
import os, signal, sys
sys.path[:0] = [{here!r}]
from device import BlockDevice, attached
from filesystems import SIZE, new
device = BlockDevice(SIZE)
with new(device, "ext4", device.directory / "mounted"):
    print(device.directory, device._server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("both", [False, True], ids=["its user", "its user and itself"])
def test_what_a_killed_run_leaves_is_removed(both):
    here = str(Path(__file__).parent)
    code = _ABANDON.format(here=here)
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    name, server = child.stdout.readline().split()
    directory = Path(name.decode())
    assert len(mounts_in(directory)) == 2
    with open(directory / "lock", "rb") as lock:
        if both:
            os.kill(int(server), signal.SIGKILL)
        child.kill()
        child.communicate()
        fcntl.flock(lock, fcntl.LOCK_EX)  # once that process is gone
    if both:
        remove_abandoned(directory.parent)
    assert not mounts_in(directory)
    assert not directory.exists()
