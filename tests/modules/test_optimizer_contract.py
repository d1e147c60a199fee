"""`DiskSparseAdam` as a `torch.optim.Optimizer`: what it takes, what it refuses, what trainers do with it."""

import contextlib

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, contents, row, step, weights

from dsa import DiskSparseAdam, conventions
from dsa.errors import (
    StateClosedError,
    StateExistsError,
    StateMismatchError,
    StateNotFoundError,
    StateWarning,
)

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)


def parameter(rows=4, dim=2):
    return torch.nn.Parameter(torch.zeros(rows, dim))


FORMS = {
    "a list": (lambda a, b: [a, b], [2], ["param_0", "param_1"]),
    "a generator": (lambda a, b: (each for each in (a, b)), [2], ["param_0", "param_1"]),
    "named": (lambda a, b: [("users", a), ("items.weight", b)], [2], ["users", "items.weight"]),
    "a list of iterables": (lambda a, b: [iter([a]), [b]], [2], ["param_0", "param_1"]),
    "named ones of two modules": (lambda a, b: [iter([("x", a)]), iter([("y", b)])], [2], ["x", "y"]),
    "groups": (lambda a, b: [{"params": [a]}, {"params": b, "lr": 0.2}], [1, 1], ["param_0", "param_1"]),
    "groups of iterables": (lambda a, b: [{"params": iter([a, b])}], [2], ["param_0", "param_1"]),
    "named groups": (lambda a, b: [{"params": [("x", a)]}, {"params": [("y", b)]}], [1, 1], ["x", "y"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_parameters(make, form):
    arrange, sizes, names = FORMS[form]
    optimizer = make.adam(arrange(parameter(), parameter(3, 5)))
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert optimizer.param_names == names
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_groups_have_options_of_their_own(make):
    layers = [make.plain(3, 1) for _ in range(3)]
    groups = [
        {"params": layers[0].parameters()},
        {"params": layers[1].parameters(), "lr": 0.5, "maximize": True},
        {
            "params": layers[2].parameters(),
            "betas": (0.0, 0.0),
            "weight_decay": 0.5,
            "weight_decay_mode": "decoupled",
        },
    ]
    torch.nn.init.ones_(layers[2].weight)
    optimizer = make.adam(groups)
    for _ in range(2):
        optimizer.zero_grad()
        sum(layer(torch.tensor([1])).sum() for layer in layers).backward()
        optimizer.step()
    np.testing.assert_allclose(
        [row(layer, 1)[0] for layer in layers], [-0.2, 1.0, ((1 * 0.95 - 0.1) * 0.95 - 0.1)], rtol=1e-5
    )
    assert optimizer.global_step == 2


BAD_PARAMETERS = [
    ([], ValueError, "params holds no parameter: pass at least one"),
    ([[]], ValueError, "no parameter"),
    ([{"params": []}], ValueError, "no parameter"),
    (parameter(), TypeError, "params is a tensor: pass an iterable"),
    (["a"], TypeError, "'a' is not a parameter"),
    ([None], TypeError, "None is not a parameter"),
    ([parameter(), {"params": [parameter()]}], TypeError, "mixes groups and parameters"),
    ([("a", parameter()), parameter()], ValueError, "with/without names"),
    ([("a", parameter()), ("a", parameter())], ValueError, "'a'"),
    ([("", parameter())], ValueError, "name"),
    ([{"lr": 0.1}], (ValueError, KeyError), "params"),
    ([torch.nn.Parameter(torch.zeros(()))], ValueError, r"shape \(\)"),
    ([torch.nn.Parameter(torch.zeros(2, 0))], ValueError, "0"),
    ([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))], ValueError, "complex64"),
    ([torch.nn.Parameter(torch.zeros(2, 2, device="meta"))], ValueError, "meta"),
    ([torch.nn.Parameter(torch.zeros(0, 2))], ValueError, "rows is 0"),
    ([parameter() + 0], ValueError, "non-leaf"),
]


@pytest.mark.parametrize("number", range(len(BAD_PARAMETERS)))
def test_what_cannot_be_parameters(make, number):
    params, error, message = BAD_PARAMETERS[number]
    with pytest.raises(error, match=message):
        DiskSparseAdam(params, state_dir=make.directory())
    assert not make.directory().exists() or not contents(make.directory())


BAD_OPTIONS = [
    ({"lr": 0.0}, ValueError, "lr=0.0 is out of range: pass a number > 0"),
    ({"lr": -1.0}, ValueError, "lr=-1.0"),
    ({"lr": float("nan")}, ValueError, "lr=nan"),
    ({"lr": float("inf")}, ValueError, "lr=inf"),
    ({"lr": torch.tensor([0.1, 0.2])}, TypeError, "lr="),
    ({"betas": (1.0, 0.9)}, ValueError, "beta1=1.0 is out of range"),
    ({"betas": (0.9, -0.1)}, ValueError, "beta2=-0.1"),
    ({"betas": (0.9,)}, ValueError, "."),
    ({"eps": 0.0}, ValueError, "eps=0.0"),
    ({"weight_decay": -1.0}, ValueError, "weight_decay=-1.0"),
    ({"weight_decay_mode": "adamw"}, ValueError, "weight_decay_mode='adamw' is not known"),
    ({"bias_correction": "table"}, ValueError, "bias_correction='table' is not known"),
    ({"second_moment": "matrix"}, ValueError, "second_moment='matrix' is not known"),
    ({"v_transport": "none"}, ValueError, "v_transport='none' is not known"),
    ({"max_step": -1.0}, ValueError, "max_step=-1.0"),
    ({"max_step": 0.5}, ValueError, "max_step=0.5 is a length on .* ball"),
    ({"backend": "parquet"}, ValueError, "backend='parquet' is not known"),
    ({"allocate": "lazily"}, ValueError, "allocate='lazily' is not known"),
    ({"durability": "always"}, ValueError, "durability='always' is not known"),
    ({"resume": "auto"}, TypeError, "resume='auto' is not a choice"),
    ({"convention": "torch"}, TypeError, "convention='torch' is not one"),
    ({"amsgrad": True}, TypeError, "amsgrad"),
]


@pytest.mark.parametrize("number", range(len(BAD_OPTIONS)))
def test_what_cannot_be_options(make, number):
    options, error, message = BAD_OPTIONS[number]
    with pytest.raises(error, match=message):
        DiskSparseAdam([parameter()], **{"lr": 0.1, "state_dir": make.directory(), **options})
    assert not make.directory().exists() or not contents(make.directory())
    make.adam([parameter()])


@pytest.mark.parametrize(
    "fault", [{"lr": -1.0}, {"betas": (2.0, 0.9)}, {"params": [torch.zeros(())]}], ids=str
)
def test_a_fault_of_a_later_group_leaves_nothing_behind(make, fault):
    with pytest.raises(ValueError, match=r"is out of range|can't be a table"):
        make.adam([{"params": [parameter()]}, {"params": [parameter()], **fault}])
    assert not make.directory().exists() or not contents(make.directory())
    make.adam([parameter(), parameter()])


def test_a_table_that_does_not_fit_leaves_the_directory_closed(make):
    kept = parameter(), parameter()
    make.adam(kept).close()
    before = contents(make.directory())
    with pytest.raises(StateMismatchError, match="'param_1' is stored as 4 x 2 but 5 x 2"):
        make.adam([kept[0], parameter(5, 2)], resume=True)
    assert {name: data for name, (_, data) in contents(make.directory()).items()} == {
        name: data for name, (_, data) in before.items()
    }
    assert make.adam(kept, resume=True).global_step == 0


@pytest.mark.parametrize(
    "fault", [{"lr": -1.0}, {"betas": (2.0, 0.9)}, {"params": [torch.zeros(())]}], ids=str
)
def test_a_fault_of_an_added_group_changes_nothing(make, fault):
    layer, optimizer = make.pair("memory", 4, 2)
    files = set(contents(make.directory()))
    with pytest.raises(ValueError, match=r"is out of range|can't be a table"):
        optimizer.add_param_group({"params": [parameter(5, 2)], **fault})
    assert len(optimizer.param_groups) == 1
    assert optimizer.param_names == ["param_0"]
    assert set(contents(make.directory())) == files
    step(layer, optimizer, [1])
    optimizer.add_param_group({"params": [parameter(5, 2)]})
    assert optimizer.param_names == ["param_0", "param_1"]


def test_a_parameter_twice_in_one_group(make):
    """torch warns of it and will refuse it."""
    given = parameter()
    with pytest.raises((ValueError, UserWarning), match=r"duplicate|twice|more than once"):
        make.adam([given, given])


@both
def test_maximize(make, kind):
    layer, optimizer = make.pair(kind, 4, 2, maximize=True)
    step(layer, optimizer, [1])
    np.testing.assert_allclose(row(layer, 1), 0.1, rtol=1e-6)


@both
def test_a_rate_that_is_a_tensor(make, kind):
    layer, optimizer = make.pair(kind, 4, 2, lr=torch.tensor(0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        step(layer, optimizer, [1])
        scheduler.step()
    np.testing.assert_allclose(row(layer, 1), -0.15, rtol=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@both
def test_a_step_without_gradients_does_nothing(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    optimizer.step()
    layer.requires_grad_(False)
    layer(torch.tensor([1]))
    optimizer.step()
    assert optimizer.global_step == 0
    assert not make.records(layer, 4, 2)["t"].any()


@both
def test_a_step_in_inference_mode(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    backward(layer, [1])
    with torch.inference_mode():
        optimizer.step()
    np.testing.assert_allclose(row(layer, 1), -0.1, rtol=1e-6)


def test_weights_in_memory_change_in_place(make):
    """Autograd notices, views see it, and a matrix that is not contiguous works."""
    base = torch.zeros(2, 6)
    given = torch.nn.Parameter(base.T)
    optimizer = make.adam([given])
    version = given._version
    torch.nn.functional.embedding(torch.tensor([1, 4]), given, sparse=True).sum().backward()
    optimizer.step()
    assert given._version > version
    np.testing.assert_allclose(base, [[0, -0.1, 0, 0, -0.1, 0]] * 2, rtol=1e-6)


def test_a_lookup_that_is_still_needed_is_noticed(make):
    """Backward through weights that a step has changed is an error in torch, and here."""
    layer, optimizer = make.pair("memory", 4, 2)
    early = (layer.weight[1] * layer.weight[2]).sum()
    step(layer, optimizer, [1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@both
def test_names_and_not_places_identify_tables(make, kind):
    def layers(resume=None):
        options = {"resume": resume} if kind == "disk" else {}
        return [
            make.layer(kind, 4, 2, **({"name": name, **options} if kind == "disk" else {}))
            for name in ("users", "items")
        ]

    users, items = layers()
    optimizer = make.adam([("users", users.weight), ("items", items.weight)])
    for layer, index in ((users, 1), (items, 2)):
        step(layer, optimizer, [index])
    optimizer.close()
    if kind == "disk":
        users, items = layers(resume=True)
    optimizer = make.adam([("items", items.weight), ("users", users.weight)], resume=True)
    assert optimizer.param_names == ["items", "users"]
    step(users, optimizer, [1])
    held = {"weights": False} if kind == "memory" else {}
    assert make.records("users", 4, 2, **held)["t"].tolist() == [0, 2, 0, 0]
    assert make.records("items", 4, 2, **held)["t"].tolist() == [0, 0, 1, 0]


def test_a_name_that_is_not_stored_is_told_of(make):
    make.adam([("users", parameter())]).close()
    with pytest.warns(StateWarning, match=r"holds no table 'user' but \['users'\]: .*check the name"):
        make.adam([("user", parameter())], resume=True)


def test_an_order_that_does_not_fit_is_refused(make):
    first, second = parameter(4, 2), parameter(6, 2)
    make.adam([first, second]).close()
    with pytest.raises(StateMismatchError, match="'param_0' is stored as 4 x 2 but 6 x 2 is asked for"):
        make.adam([second, first], resume=True)


def test_what_to_do_with_state_that_is_there(make):
    layer, optimizer = make.pair("memory", 4, 2)
    step(layer, optimizer, [1])
    optimizer.close()
    with pytest.raises(
        StateExistsError, match="pass resume=True to continue it or resume=False to start over"
    ):
        make.adam(layer)
    with pytest.warns(StateWarning, match="what it held is lost") as seen:
        optimizer = make.adam(layer, resume=False)
    assert seen[0].filename.endswith("layers.py"), "the warning points at the caller"
    assert optimizer.global_step == 0
    assert not make.records(layer, 4, 2)["t"].any()
    with pytest.raises(StateNotFoundError, match="pass resume=None to start there"):
        make.adam(layer, where="elsewhere", resume=True)


@both
def test_closing(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    with optimizer as entered:
        assert entered is optimizer
        backward(layer, [1])
    for action in (optimizer.step, optimizer.flush, lambda: optimizer.prefetch([1])):
        with pytest.raises(
            StateClosedError,
            match="was closed: build the module or optimizer again with resume=True to",
        ):
            action()
    optimizer.close()
    optimizer.shutdown()


def test_prefetch_and_counts(make):
    users, items = make.disk(40, 2, name="users"), make.plain(40, 2)
    optimizer = make.adam([users.weight, items.weight])
    optimizer.prefetch(torch.tensor([[1, 2], [2, 3]]), "users")
    with pytest.raises(KeyError, match=r"a table has to be named: name one of \['param_1', 'users'\]"):
        optimizer.prefetch([1])
    (users(torch.tensor([1, 2])).sum() + items(torch.tensor([5])).sum()).backward()
    optimizer.step()
    counts = optimizer.stats()
    assert (counts["steps"], counts["rows_written"], counts["prefetch_hits"]) == (1, 3, 2)
    assert counts["logical_bytes_written"] == 2 * (3 * 2 * 4 + 4) + (2 * 2 * 4 + 4)


def test_options_are_seen(make):
    _, optimizer = make.pair("disk", 4, 2)
    shown = repr(optimizer)
    assert shown.startswith("DiskSparseAdam (")
    assert "weight_decay_mode: l2" in shown


@pytest.mark.parametrize("second_moment", ["coordinate", "frame", "row"])
def test_second_moments_in_flat_space(make, second_moment):
    layer = make.disk(2, 2, state="rowwise_adam" if second_moment == "row" else "adam")
    optimizer = make.adam(layer, second_moment=second_moment)
    (layer(torch.tensor([1])) * torch.tensor([3.0, 4.0])).sum().backward()
    optimizer.step()
    expected = [-0.0848528, -0.1131371] if second_moment == "row" else [-0.1, -0.1]
    np.testing.assert_allclose(row(layer, 1), expected, rtol=1e-6)


def test_a_second_moment_that_the_table_has_no_room_for(make):
    with pytest.raises(
        StateMismatchError, match=r"use second_moment='row', or make the table with state='adam'"
    ):
        make.adam(make.disk(2, 2, state="rowwise_adam"))
    with pytest.raises(
        StateMismatchError,
        match=r"holds the state of the update rule 'adam' .* but the optimizer computes 'row_wise_adam'",
    ):
        make.adam(make.disk(2, 2, where="other"), where="other", second_moment="row")


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1.0, [[-0.0996679946, 0.0], [-0.00066751, 0.10103419]]), (4.0, [[-0.0986876601, 0.0], None])],
)
def test_a_table_on_a_ball(make, k, expected):
    """The first step of C54: the exponential map with a diagonal second moment."""
    layer = make.disk(2, 2, init=torch.tensor([[0.0, 0.0], [0.1, 0.1]]), k=k)
    optimizer = make.adam(layer, convention=conventions.DSA_ADAM)
    layer(torch.tensor([0, 1]))[:, 0].sum().backward()
    optimizer.step()
    assert layer.k == k
    for index, value in enumerate(expected):
        if value is not None:
            np.testing.assert_allclose(row(layer, index), value, rtol=1e-5, atol=1e-8)


def test_flat_and_curved_tables_in_one_optimizer(make):
    flat, ball = make.disk(3, 2, 5.0, name="flat"), make.disk(3, 2, 0.3, name="ball", k=1.0)
    optimizer = make.adam([flat.weight, ball.weight], lr=2.0, max_step=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        (flat(torch.tensor([1])).sum() + ball(torch.tensor([1])).sum()).backward()
        optimizer.step()
    np.testing.assert_allclose(row(flat, 1), 5.0 - 10.0, rtol=1e-5)
    assert weights(ball).norm(dim=1).max() < 1.0


class Wrapped:
    """How Lightning wraps an optimizer: a class that mixes in the optimizer's own, sharing its attributes."""

    def __init__(self, optimizer):
        self.__dict__ = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
        self.__class__ = type("Lightning" + type(optimizer).__name__, (self.__class__, type(optimizer)), {})
        self.inner = optimizer

    def step(self, closure=None):
        return self.inner.step(closure)

    @contextlib.contextmanager
    def toggled(self):
        yield


def test_wrapped_by_mixing_in_its_class(make):
    layer, optimizer = make.pair("disk", 4, 2)
    wrapped = Wrapped(optimizer)
    assert isinstance(wrapped, DiskSparseAdam)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, 1)

    def closure():
        wrapped.zero_grad()
        loss = layer(torch.tensor([1])).sum()
        loss.backward()
        return loss

    assert wrapped.step(closure).item() == 0.0
    scheduler.step()
    assert wrapped.global_step == optimizer.global_step == 1
    wrapped.load_state_dict(wrapped.state_dict())
    np.testing.assert_allclose(optimizer.param_groups[0]["lr"], 0.01)


def test_a_step_that_is_patched(make):
    """How accelerate tells whether a scaler called it."""
    layer, optimizer = make.pair("disk", 4, 2)
    called, original = [], optimizer.step
    optimizer.step = lambda *given, **named: (called.append(True), original(*given, **named))[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(layer(torch.tensor([1])).sum()).backward()
    scaler.step(optimizer)
    assert called == [True]
    np.testing.assert_allclose(row(layer, 1), -0.1, rtol=1e-6)


def test_a_float64_parameter_is_refused_instead_of_rounded(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(4, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"param_0.*float64.*convert"):
        DiskSparseAdam([parameter], state_dir=tmp_path / "state")
    assert not (tmp_path / "state").exists()
