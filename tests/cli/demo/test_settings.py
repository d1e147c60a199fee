import json

import pytest

from dsa.cli.demo.settings import Settings, default_settings
from dsa.errors import StateCorruptError


def test_what_is_given_stands():
    given = {
        "dim": 3,
        "epochs": 7,
        "lr": 0.25,
        "eps": 1e-8,
        "seed": 9,
        "burn_in": 0,
        "batch_size": 5,
        "pool": 11,
    }
    settings = default_settings(6542, {**given, "k": None})
    assert {name: getattr(settings, name) for name in given} == given
    assert settings.k == 1.0


@pytest.mark.parametrize("mode", ["row", "frame", "coordinate"])
def test_eps_follows_the_batch(mode):
    one, four = (default_settings(6542, {"second_moment": mode, "batch_size": size}) for size in (50, 200))
    assert one.eps == pytest.approx(4 * four.eps)
    assert one.lr == four.lr


def test_lr_follows_the_unit_of_length():
    assert default_settings(6542, {"k": 4.0}).lr == default_settings(6542).lr / 2


def test_large_graphs_take_larger_batches_and_fewer_epochs():
    sizes = [default_settings(edges) for edges in (1, 6542, 65_420, 1_000_000, 50_000_000)]
    assert [s.batch_size for s in sizes] == [64, 64, 512, 1024, 1024]
    assert [s.epochs for s in sizes] == [300, 300, 169, 85, 32]
    assert [s.burn_in for s in sizes] == [80, 80, 25, 6, 1]


def test_fewer_epochs_have_a_shorter_burn_in():
    assert default_settings(6542, {"epochs": 30}).burn_in == 8


def test_the_rate_is_a_tenth_and_then_falls_to_zero():
    settings = default_settings(6542, {"epochs": 4, "burn_in": 1, "lr": 1.0})
    rates = [settings.lr_at(step, steps_per_epoch=2) for step in range(8)]
    assert rates == pytest.approx([0.1, 0.1, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    only = default_settings(6542, {"epochs": 2, "burn_in": 2, "lr": 1.0})
    assert [only.lr_at(step, 2) for step in range(4)] == [0.1] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dim": 0}, "dim is 0: use 1 or more"),
        ({"epochs": 0}, "epochs is 0: use 1 or more"),
        ({"batch_size": 0}, "batch_size is 0: use 1 or more"),
        ({"k": 0.0}, r"k is 0\.0: use a positive number"),
        ({"k": float("inf")}, "k is inf: use a positive number"),
        ({"lr": -1.0}, r"lr is -1\.0: use a positive number"),
        ({"eps": float("nan")}, "eps is nan: use a positive number"),
        ({"epochs": 5, "burn_in": 6}, "burn_in is 6 of 5 epochs: use 0 to 5"),
        ({"seed": -1}, r"seed is -1: use 0 to 2\*\*64 - 1"),
        ({"second_moment": "full"}, "second_moment is 'full': use one of"),
        ({"burn_in_sampling": "hard"}, "burn_in_sampling is 'hard': use 'degree' or 'uniform'"),
    ],
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        default_settings(6542, given)


def test_settings_survive_json():
    settings = default_settings(6542, {"second_moment": "frame", "dim": 3})
    assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize("data", [None, [], {}, {**default_settings(9).to_json(), "dim": -1}])
def test_damaged_settings_are_refused(data):
    with pytest.raises(StateCorruptError, match="can't be read"):
        Settings.from_json(data)
