"""`DiskSparseOptimizer`: any rule for flat space, chosen by name."""

import pytest
import torch
from layers import MEMORY_AND_DISK, backward, row, weights

from dsa import DiskSparseAdagrad, DiskSparseOptimizer
from dsa.errors import StateMismatchError


def optimizer_of(make, layer, rule, where="state", **options):
    optimizer = DiskSparseOptimizer(layer.parameters(), rule, state_dir=make.directory(where), **options)
    make.callback(optimizer.close)
    return optimizer


def layer_of(make, kind, rule, rows, dim, value=0.0, where="state"):
    return make.disk(rows, dim, value, where, state=rule) if kind == "disk" else make.plain(rows, dim, value)


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
def test_a_rule_by_its_name_is_that_rule(make, kind):
    layers = [layer_of(make, kind, "adagrad", 5, 3, 1.0, where) for where in ("ours", "named")]
    options = {"lr": 0.5, "lr_decay": 0.1, "initial_accumulator_value": 0.2}
    named = optimizer_of(make, layers[1], "adagrad", "named", **options)
    ours = DiskSparseAdagrad(layers[0].parameters(), state_dir=make.directory("ours"), **options)
    make.callback(ours.close)
    for layer, optimizer in zip(layers, (ours, named), strict=True):
        for ids in ([1, 1, 2], [2, 4]):
            optimizer.zero_grad()
            backward(layer, ids)
            optimizer.step()
    assert torch.equal(weights(layers[0]), weights(layers[1]))
    assert repr(named).startswith("DiskSparseOptimizer (")


def test_options_are_those_of_the_rule(make):
    layer = make.plain(3, 2)
    with pytest.raises(TypeError, match=r"'adagrad' has no option 'momentum': use \['eps', .*'lr'"):
        optimizer_of(make, layer, "adagrad", lr=0.1, momentum=0.9)
    with pytest.raises(TypeError, match="'adagrad' needs 'lr': pass it by name"):
        optimizer_of(make, layer, "adagrad")
    with pytest.raises(ValueError, match=r"eps=-1\.0 is out of range"):
        optimizer_of(make, layer, "adagrad", lr=0.1, eps=-1.0)
    for rule in ("adam", "no", None):
        with pytest.raises(ValueError, match=rf"rule={rule!r} is not known: use one of \['adagrad', "):
            optimizer_of(make, layer, rule, lr=0.1)
    assert not make.directory().exists()


def test_a_table_with_room_for_another_rule_is_refused(make):
    layer = make.disk(3, 2, state="adagrad")
    with pytest.raises(
        StateMismatchError, match=r"'adagrad' .* but the optimizer computes 'row_wise_adagrad'"
    ):
        optimizer_of(make, layer, "row_wise_adagrad", lr=0.1)
    with pytest.raises(ValueError, match=r"state='adagrat' is not known: use one of \['adagrad', 'adam'"):
        make.disk(3, 2, where="other", state="adagrat")
    optimizer = optimizer_of(make, layer, "adagrad", lr=0.1)
    backward(layer, [1])
    optimizer.step()
    assert row(layer, 0) == [0.0, 0.0] != row(layer, 1)


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
@pytest.mark.parametrize("maximize", [False, True])
def test_sgd_agrees_with_torch(make, kind, maximize):
    layer, theirs = layer_of(make, kind, "sgd", 9, 3, 0.25), make.plain(9, 3, 0.25)
    optimizer = optimizer_of(make, layer, "sgd", lr=0.1, maximize=maximize)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, maximize=maximize)
    for ids in ([1, 2, 2], [], [2, 8], [1]):
        for each, mover in ((layer, optimizer), (theirs, reference)):
            mover.zero_grad()
            (each(torch.tensor(ids, dtype=torch.int64)) ** 2).sum().backward()
            mover.step()
    torch.testing.assert_close(weights(layer), weights(theirs), rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights(layer)[1], weights(layer)[0])


@pytest.mark.parametrize("kind", MEMORY_AND_DISK)
def test_lion_leaves_rows_out_of_a_batch_as_they_are(make, kind):
    """By hand: the momentum of row 1 waits through a step in which the row has no gradient."""
    layer = layer_of(make, kind, "lion", 3, 2, 1.0)
    optimizer = optimizer_of(make, layer, "lion", lr=0.25, weight_decay=0.5, beta1=0.5, beta2=0.5)
    for ids, scale in (([1], 4.0), ([2], 1.0), ([1], -1.0)):
        optimizer.zero_grad()
        backward(layer, ids, scale)
        optimizer.step()
    # Row 1: m is 2 after the first step and 0.5 after the third, whose direction is (2 - 1) / 2 > 0.
    first = 0.875 * 1.0 - 0.25
    assert row(layer, 1) == [0.875 * first - 0.25] * 2
    assert row(layer, 2) == [first] * 2
    assert row(layer, 0) == [1.0, 1.0]
