"""Loss of power in a model of the device: the state is a committed step, and none that returned is lost."""

import random
import sys
from dataclasses import replace

import pytest
from campaign import prepared
from harness import complain
from losses import lose_power
from power import SECTOR, Device, Image, after_outage, die_in_place
from references import counts_of, locate, records_of
from scenarios import CHANGING, STEPPING, steps

from dsa.errors import StateIncompleteError, StateNotFoundError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the model reads files through /proc")

POWER = [one for one in (*STEPPING, *CHANGING) if one.durability == "power"]
by_name = pytest.mark.parametrize("scenario", POWER, ids=[one.name for one in POWER])


@by_name
def test_losses_of_power(space, scenario):
    with prepared(space / "power", scenario) as (reference, directory):
        figures = lose_power(reference, directory, random.Random(1), losses=8, draws=4)
    complain(figures)
    assert figures.total == figures.reopened == 32
    assert figures.finished == 1


@by_name
def test_losses_of_power_after_syncs_that_failed(space, scenario):
    """After a sync that failed the system forgets which pages it did not write."""
    with prepared(space / "power", scenario) as (reference, directory):
        figures = lose_power(reference, directory, random.Random(2), losses=8, draws=4, failing=0.1)
    complain(figures)
    assert figures.total == figures.reopened > 0
    assert figures.finished == 1


def images_of(scenario, directory, run, draws, rng):
    """Run something while following the device, and yield what may be left after each sync."""
    device = Device(directory)
    images = []
    with device.following():
        run(lambda *told: images.append((device.image(), told)))
    device.close()
    for number, (image, told) in enumerate(images):
        for draw in range(draws):
            path = directory.with_name(f"{directory.name}-{number}-{draw}")
            image.draw(rng, path)
            yield path, told


def test_losses_while_a_state_is_made(space):
    """It is whole, or not there, or says that it is incomplete."""
    from faults import watch

    scenario = STEPPING[5]
    rng = random.Random(4)
    with prepared(space / "making", scenario) as (_, directory):
        path = directory / "made"
        path.mkdir()

        def run(take):
            watch.every = lambda place: take(place) if "sync" in place or "rename" in place else None
            scenario.build(path, resume=None).close()
            watch.reset()

        seen = set()
        for image, _ in images_of(scenario, path, run, 4, rng):
            try:
                with after_outage(), scenario.build(image, resume=True) as optimizer:
                    assert optimizer.global_step == 0
                    seen.add("whole")
            except StateNotFoundError:
                seen.add("nothing")
                scenario.build(image, resume=None).close()
            except StateIncompleteError:
                seen.add("incomplete")
                scenario.build(image, resume=None).close()
            assert records_of(image) == records_of(path)
        assert seen == {"whole", "nothing", "incomplete"}


@pytest.mark.parametrize("durability", ["process", "none"])
def test_flush_is_durable_whatever_the_durability(space, durability):
    scenario = replace(STEPPING[1], durability=durability, ops=steps(0, 6))
    rng = random.Random(5)
    with prepared(space / "flush", scenario) as (reference, directory):
        path = reference.copy(directory / "run")

        def run(take):
            with scenario.build(path, resume=True) as optimizer:
                for number in range(6):
                    optimizer.step(scenario.batch(number))
                    if number % 2:
                        optimizer.flush()
                        take(number + 1)

        for image, (done,) in images_of(scenario, path, run, 6, rng):
            with after_outage(), scenario.build(image, resume=True) as optimizer:
                assert locate(reference, optimizer, image, done, done) == done


@pytest.mark.parametrize("before", ["process", "none"])
def test_a_killed_state_that_is_opened_again_with_power(space, before):
    """What the first process had only in the page cache is durable once the second one has it open."""
    first = replace(STEPPING[1], durability=before, ops=steps(0, 8))
    second = replace(first, durability="power")
    rng = random.Random(6)
    with prepared(space / "change", first) as (reference, directory):
        path = reference.copy(directory / "killed")
        device = Device(path)
        images = []
        with device.following():
            optimizer = first.build(path, resume=True)
            for number in range(4):
                optimizer.step(first.batch(number))
            if before == "none":
                optimizer._state.save()
            die_in_place(optimizer._state)
        with device.following(), second.build(path, resume=True) as optimizer:
            assert locate(reference, optimizer, path, 4, 4) == 4
            images.append((device.image(), 4))
            optimizer.step(second.batch(4))
            images.append((device.image(), 5))
        device.close()
        for number, (image, done) in enumerate(images):
            for draw in range(8):
                drawn = directory / f"image-{number}-{draw}"
                image.draw(rng, drawn)
                with after_outage(), second.build(drawn, resume=True) as optimizer:
                    assert locate(reference, optimizer, drawn, done, done) == done


def test_without_syncs_the_model_finds_lost_steps(space, monkeypatch):
    """What the figures above are worth: a journal that does not wait for the device must be noticed."""
    import dsa.backends.system

    with prepared(space / "unsynced", POWER[1]) as (reference, directory):
        monkeypatch.setattr(dsa.backends.system, "sync_mapping", lambda mapping, descriptor: None)
        figures = lose_power(reference, directory, random.Random(1), losses=10, draws=4)
    assert sum(figures.failures.values()) > 0


def test_what_may_be_left_of_a_file(tmp_path):
    old, new = bytes(4 * SECTOR), b"\1" * (5 * SECTOR)
    rng = random.Random(7)
    found = set()
    for number in range(300):
        image = Image(0, {0: {"a": 1}}, {0: {"a": 2, "b": 1}}, {1: old}, {1: new, 2: new})
        image.draw(rng, tmp_path / str(number))
        for path in (tmp_path / str(number)).iterdir():
            data = path.read_bytes()
            found.add((path.name, len(data) // SECTOR, sum(data) // SECTOR))
    assert {("a", 4, 0), ("a", 0, 0), ("a", 5, 5), ("b", 5, 5), ("b", 4, 2)} <= found
    assert all(name != "b" or size in (4, 5) for name, size, _ in found)


def test_a_sync_makes_what_is_written_durable(tmp_path):
    import os

    device = Device(tmp_path)
    with device.following():
        file = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
        os.write(file, b"one")
        os.fsync(file)
        assert device.image().old_names == {os.stat(tmp_path).st_ino: {}}
        directory = os.open(tmp_path, os.O_RDONLY)
        os.fsync(directory)
        os.write(file, b"two")
    image = device.image()
    device.close()
    (key,) = image.old_names[image.root].values()
    assert (image.synced[key], image.current[key]) == (b"one", b"onetwo")
    for descriptor in (file, directory):
        os.close(descriptor)


def test_counts_are_part_of_a_state(space):
    scenario = replace(STEPPING[0], ops=steps(0, 2))
    with (
        prepared(space / "counts", scenario) as (reference, directory),
        scenario.build(reference.copy(directory / "run"), resume=True) as optimizer,
    ):
        assert counts_of(optimizer) == reference.states[0].counts
        optimizer.step({})
        with pytest.raises(AssertionError, match=r"^(torn|lost)"):
            locate(reference, optimizer, directory / "run", 0, 0)
