"""The second moment of tables whose user has chosen none: by frames on the ball, and always as stored."""

import pytest
import torch

import dsa
from dsa import init
from dsa.errors import StateMismatchError

ROWS = torch.tensor([0, 1, 2])
GRADIENTS = torch.tensor([[1.0, -0.5], [0.3, 2.0], [-1.0, 0.1]])
STARTS = torch.tensor([[0.0, 0.0], [0.6, 0.1], [-0.2, 0.7]])
FLAT_AND_BALL = {"flat": 0.0, "ball": 1.0}


def explicit(path, **options):
    tables = {"flat": STARTS.clone(), "ball": STARTS.clone()}
    options = {"k": FLAT_AND_BALL, "lr": 0.1, **options}
    return dsa.DiskSparseRiemannianAdam(tables, disk_dir=path, **options)


def train(optimizer, steps=3):
    for _ in range(steps):
        optimizer.step({name: (ROWS, GRADIENTS) for name in ("flat", "ball")})
    return [optimizer.read_rows(ROWS, name) for name in ("flat", "ball")]


def rules(path):
    with dsa.open_state(path) as state:
        return {name: table.rule.name for name, table in state.tables.items()}


def test_new_tables(tmp_path):
    with explicit(tmp_path / "left-out") as optimizer:
        assert optimizer.convention.second_moment == "frame"
        found = train(optimizer)
    assert rules(tmp_path / "left-out") == {"flat": "adam", "ball": "frame_adam"}
    for moment, same in (("frame", (True, True)), ("coordinate", (True, False))):
        with explicit(tmp_path / moment, second_moment=moment) as optimizer:
            expected = train(optimizer)
        assert tuple(torch.equal(*pair) for pair in zip(found, expected, strict=True)) == same


def test_a_convention_that_is_passed_is_kept(tmp_path):
    with explicit(tmp_path, convention=dsa.conventions.DSA_ADAM) as optimizer:
        assert optimizer.convention == dsa.conventions.DSA_ADAM
    assert rules(tmp_path) == {"flat": "adam", "ball": "adam"}


@pytest.mark.parametrize("moment", ["coordinate", "frame"])
def test_what_is_stored_goes_on_without_a_word(tmp_path, moment):
    with explicit(tmp_path / "whole", second_moment=moment) as optimizer:
        whole = train(optimizer, 5)
    explicit(tmp_path / "parts", second_moment=moment).close()  # before any step, too
    with explicit(tmp_path / "parts", resume=True) as optimizer:
        train(optimizer, 2)
        assert optimizer.convention.second_moment == moment
    with explicit(tmp_path / "parts", resume=True) as optimizer:
        parts = train(optimizer, 3)
    assert all(map(torch.equal, whole, parts))
    other = {"coordinate": "frame", "frame": "coordinate"}[moment]
    with pytest.raises(StateMismatchError, match=f"second_moment='{other}'"):
        explicit(tmp_path / "parts", resume=True, second_moment=other)


def layers(path, resume=None, **options):
    made = [
        dsa.DiskEmbedding(3, 2, init=STARTS.clone(), k=k, name=name, state_dir=path, resume=resume, **options)
        for name, k in FLAT_AND_BALL.items()
    ]
    return torch.nn.ModuleList(made)


def learn(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        sum((layer(ROWS) * GRADIENTS).sum() for layer in model).backward()
        optimizer.step()
    return [layer(ROWS).detach() for layer in model]


@pytest.mark.parametrize("moment", ["coordinate", "frame"])
def test_tables_of_modules(tmp_path, moment):
    model = layers(tmp_path / "whole")
    with dsa.DiskSparseAdam(model.parameters(), lr=0.1, second_moment=moment) as optimizer:
        whole = learn(model, optimizer, 5)

    model = layers(tmp_path / "parts")
    options = {} if moment == "frame" else {"second_moment": moment}  # left out it is by frames
    with dsa.DiskSparseAdam(model.parameters(), lr=0.1, **options) as optimizer:
        learn(model, optimizer, 2)
        assert optimizer.param_groups[0]["second_moment"] == moment
    model = layers(tmp_path / "parts", resume=True)
    with dsa.DiskSparseAdam(model.parameters(), lr=0.1) as optimizer:
        assert optimizer.convention.second_moment == moment
        parts = learn(model, optimizer, 3)
    assert all(map(torch.equal, whole, parts))


def test_an_optimizer_that_is_built_again_from_its_group(tmp_path):
    """As PyKEEN does: what the group says is then chosen, and means the same for flat tables."""
    model = layers(tmp_path)
    optimizer = dsa.DiskSparseAdam(model.parameters(), lr=0.1)
    learn(model, optimizer)
    (group,) = optimizer.param_groups
    again = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    second = dsa.DiskSparseAdam(model.parameters(), **again)
    learn(model, second)
    assert second.global_step == 6
    second.close()


def test_flat_tables_keep_their_name(tmp_path):
    table = dsa.DiskEmbedding(3, 2, init=init.Zeros(3, 2), state_dir=tmp_path)
    with dsa.DiskSparseAdam(table.parameters(), lr=0.1) as optimizer:
        assert optimizer.convention.second_moment == "coordinate"
    assert rules(tmp_path) == {"embedding": "adam"}
