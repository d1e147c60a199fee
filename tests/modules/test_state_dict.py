"""State dicts: small references to one directory at one step; options that are checked before they hold."""

import copy
import io
import json
import shutil

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, contents, fit, row, step, weights
from safetensors.torch import load_file, save_file

from dsa.errors import StateClosedError, StateMismatchError

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@both
def test_options_come_back(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    options = {
        "lr": 0.5,
        "betas": (0.5, 0.6),
        "eps": 1e-3,
        "weight_decay": 0.1,
        "weight_decay_mode": "decoupled",
        "maximize": True,
    }
    optimizer.param_groups[0].update(options, lr=torch.tensor(0.5))
    saved = saved_and_loaded(optimizer.state_dict())
    optimizer.param_groups[0].update(lr=1.0, betas=(0.9, 0.9), eps=1.0, weight_decay=0.0, maximize=False)
    optimizer.load_state_dict(saved)
    assert {key: optimizer.param_groups[0][key] for key in options} == options
    step(layer, optimizer, [1])
    assert row(layer, 1)[0] > 0.0


def test_the_reference(make):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    reference = optimizer.state_dict()["dsa"]
    assert reference["directory"] == str(make.directory())
    assert reference["global_step"] == 1
    assert reference["tables"] == ["embedding"]
    of_module = layer.state_dict()
    assert list(of_module) == ["_extra_state"]
    decoded = json.loads(bytes(of_module["_extra_state"].tolist()))
    assert decoded["identity"] == reference["identity"]


def test_a_model_goes_through_safetensors(make, tmp_path):
    layer, optimizer = make.pair("disk", 4, 2)
    model = torch.nn.ModuleDict({"table": layer, "head": torch.nn.Linear(2, 1)})
    step(layer, optimizer, [1])
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(saved)
    step(layer, optimizer, [1])
    with pytest.raises(RuntimeError, match="saved at step 1"):
        model.load_state_dict(saved)
    saved["table._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="can't be read"):
        model.load_state_dict(saved)


@both
def test_a_dict_of_another_directory_is_refused(make, kind):
    _, optimizer = make.pair(kind, 4, 2)
    layer = make.plain(4, 2) if kind == "memory" else make.disk(4, 2, where="other")
    other = make.adam(layer, where="other")
    with pytest.raises(
        StateMismatchError,
        match=r"belongs to another state .*other.*open the directory that it was saved with",
    ):
        optimizer.load_state_dict(other.state_dict())


def test_a_module_of_another_directory_or_step_is_refused(make):
    layer, optimizer = make.pair("disk", 4, 2)
    model = torch.nn.Sequential(layer)
    before = saved_and_loaded(model.state_dict())
    model.load_state_dict(before)
    step(layer, optimizer, [1])
    with pytest.raises(RuntimeError, match=r"saved at step 0 but the state in .* is at\s+step 1"):
        model.load_state_dict(before)
    with pytest.raises(RuntimeError, match="belongs to another state"):
        model.load_state_dict(torch.nn.Sequential(make.disk(4, 2, where="other")).state_dict(), strict=False)


def test_a_directory_may_be_moved(make):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    saved = saved_and_loaded({"model": layer.state_dict(), "optimizer": optimizer.state_dict()})
    optimizer.close()
    shutil.move(make.directory(), make.directory("moved"))
    layer = make.disk(4, 2, where="moved", resume=True)
    optimizer = make.adam(layer, where="moved")
    layer.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.global_step == 1


def test_a_dict_of_parameters_in_another_order_is_refused(make):
    first, second = make.plain(4, 2), make.plain(4, 2)
    named = [("first", first.weight), ("second", second.weight)]
    optimizer = make.adam(named)
    saved = optimizer.state_dict()
    optimizer.close()
    optimizer = make.adam(named[::-1], resume=True)
    with pytest.raises(
        StateMismatchError,
        match=r"the tables \['first', 'second'\] but .* \['second', 'first'\]: pass the",
    ):
        optimizer.load_state_dict(saved)


MALFORMED = {
    "no dict": lambda saved: 5,
    "no groups": lambda saved: {key: value for key, value in saved.items() if key != "param_groups"},
    "too many groups": lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
    "a group is no dict": lambda saved: {**saved, "param_groups": [5]},
    "another number of parameters": lambda saved: {
        **saved,
        "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}],
    },
    "the reference is no dict": lambda saved: {**saved, "dsa": 5},
    "the reference is empty": lambda saved: {**saved, "dsa": {}},
    "other tables": lambda saved: {**saved, "dsa": {**saved["dsa"], "tables": ["x"]}},
    "lr is no number": lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "lr": "q"}]},
    "lr is negative": lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "lr": -1.0}]},
    "betas is one number": lambda saved: {
        **saved,
        "param_groups": [{**saved["param_groups"][0], "betas": (0.1,)}],
    },
    "eps is negative": lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "eps": -1.0}]},
}


@pytest.mark.parametrize("malformed", MALFORMED)
def test_a_malformed_dict_is_refused_and_changes_nothing(make, malformed):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    saved, files = optimizer.state_dict(), contents(make.directory())
    groups = copy.copy(optimizer.param_groups[0])
    with pytest.raises((ValueError, TypeError)):
        optimizer.load_state_dict(MALFORMED[malformed](saved))
    assert all(optimizer.param_groups[0][key] == groups[key] for key in ("lr", "betas", "eps"))
    assert contents(make.directory()) == files
    step(layer, optimizer, [1])


def test_a_dict_without_some_options_keeps_the_others(make):
    """As a dict of an older release would be."""
    _, optimizer = make.pair("disk", 4, 2, betas=(0.5, 0.6))
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "param_groups": [{"lr": 0.3, "params": [0]}]})
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (0.3, (0.5, 0.6))


def test_weights_of_a_torch_model_are_loaded(make):
    """`model.load_state_dict` of a model that held `torch.nn.Embedding`."""
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1))
    layer = make.disk(10, 4)
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 1))
    model.load_state_dict(reference.state_dict())
    assert torch.equal(weights(layer), weights(reference[0]))
    assert torch.equal(model[1].weight, reference[1].weight)
    with pytest.raises(RuntimeError, match=r"the saved weight is \(9, 4\) but the table is \(10, 4\)"):
        layer.load_state_dict({"weight": torch.zeros(9, 4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
        layer.load_state_dict({})
    with pytest.raises(RuntimeError, match="weight"):
        reference.load_state_dict(model.state_dict())


def test_weights_that_are_not_finite_are_refused_and_change_nothing(make):
    layer = make.disk(300_000, 4, 0.5)
    bad = torch.zeros(300_000, 4)
    bad[-1, 0] = torch.nan
    with pytest.raises((ValueError, RuntimeError), match="nan"):
        layer.load_state_dict({"weight": bad})
    assert not make.records(layer, 300_000, 4)["s"].any()


def test_weights_loaded_onto_a_ball_lie_in_it(make):
    layer = make.disk(4, 2, k=4.0)
    layer.load_state_dict({"weight": torch.tensor([[3.0, 4.0]]).repeat(4, 1)})
    assert np.linalg.norm(make.records(layer, 4, 2)["w"], axis=1).max() < 0.5
    assert torch.equal(weights(layer), torch.from_numpy(make.records(layer, 4, 2)["w"]))


def test_weights_cannot_be_loaded_into_a_closed_layer(make):
    layer = make.disk(4, 2)
    layer.close()
    with pytest.raises(StateClosedError):
        layer.load_state_dict({"weight": torch.ones(4, 2)})


def test_loading_weights_keeps_moments(make):
    layer, optimizer = make.pair("disk", 4, 2)
    step(layer, optimizer, [1])
    before = make.records(layer, 4, 2)
    layer.load_state_dict({"weight": torch.ones(4, 2)})
    after = make.records(layer, 4, 2)
    for field in "mvt":
        assert np.array_equal(before[field], after[field])
    assert (after["w"] == 1.0).all()


def test_hooks_of_state_dicts(make):
    """What some trainers and `torch.distributed` hang on an optimizer."""
    layer, optimizer = make.pair("disk", 4, 2)
    seen = []
    optimizer.register_step_pre_hook(lambda *given: seen.append("before the step"))
    optimizer.register_step_post_hook(lambda *given: seen.append("after the step"))
    optimizer.register_state_dict_post_hook(lambda given, state: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda given: seen.append("loaded"))
    backward(layer, [1])
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["before the step", "after the step", "saved", "loaded"]
    assert dict(optimizer.state) == {}


@both
def test_a_run_in_two_sessions_is_the_run_in_one(make, kind):
    torch.manual_seed(0)
    target = torch.randn(6, 3)

    def session(where, steps, saved=None):
        layer = (
            make.plain(6, 3)
            if kind == "memory"
            else make.disk(6, 3, where=where, resume=None if saved is None else True)
        )
        optimizer = make.adam(layer, where=where, resume=None if saved is None else True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=21)
        if saved is not None:
            for each, state in zip((layer, optimizer, scheduler), saved, strict=True):
                each.load_state_dict(state)
        losses = fit(layer, optimizer, target, steps, scheduler)
        state = saved_and_loaded([each.state_dict() for each in (layer, optimizer, scheduler)])
        optimizer.close()
        return losses, state, make.records(layer, 6, 3, where=where).tobytes()

    whole, _, records = session("whole", 20)
    first, saved, _ = session("parts", 10)
    second, _, resumed = session("parts", 10, saved)
    assert first + second == whole
    assert resumed == records
