"""`CombinedOptimizer`: both halves take each step and go back to one step, or it is told that they can't."""

import copy
import gc
import io
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from deaths import deaths, in_child
from layers import contents, weights

import dsa
from dsa import CombinedOptimizer, DiskSparseAdam, clip_grad_norm_, split_parameters
from dsa.errors import (
    CheckpointNotFoundError,
    GradientError,
    StateClosedError,
    StateError,
    StateMismatchError,
    StateWarning,
    TrainingWarning,
)

ROWS = 50


class Model(torch.nn.Module):
    """Two tables, one on disk and one in memory, and a dense layer."""

    def __init__(self, make, where="state", resume=None, plain=False):
        super().__init__()
        torch.manual_seed(5)
        start = torch.randn(ROWS, 4)
        self.table = (
            torch.nn.Embedding.from_pretrained(start, freeze=False, sparse=True)
            if plain
            else make.disk(ROWS, 4, where=where, init=start, resume=resume)
        )
        self.side = torch.nn.Embedding(ROWS, 4, sparse=True)
        self.head = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, ids):
        return self.head(self.table(ids) + self.side(ids)).squeeze(1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def build(make, where="state", resume=None, **options):
    model = Model(make, where, resume)

    def sparse(parameters):
        return DiskSparseAdam(
            parameters,
            lr=0.05,
            bias_correction="parameter",
            state_dir=make.directory(where),
            resume=resume,
        )

    optimizer = CombinedOptimizer(model, adamw, sparse, **options)
    make.callback(optimizer.close)
    return model, optimizer


def loss_of(model, number):
    ids = torch.randint(0, ROWS, (16,), generator=torch.Generator().manual_seed(number))
    return torch.nn.functional.mse_loss(model(ids), (ids % 2).float())


def train(model, optimizer, steps):
    losses = []
    for number in steps:
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def everything(model):
    """All weights of a model, wherever they are."""
    return [weights(model.table), *(each.detach().clone() for each in model.side.parameters())] + [
        each.detach().clone() for each in model.head.parameters()
    ]


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def saved(model, optimizer):
    """What a trainer keeps, through a file that only holds plain values."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file


def restore(file, model, optimizer):
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])


def test_the_same_numbers_as_two_optimizers_of_torch(make):
    model, optimizer = build(make, max_grad_norm=0.5)
    found = train(model, optimizer, range(30))
    plain = Model(make, plain=True)
    tables, dense = split_parameters(plain)
    halves = torch.optim.SparseAdam(tables, lr=0.05), adamw(dense)
    for number in range(30):
        for half in halves:
            half.zero_grad()
        loss = loss_of(plain, number)
        loss.backward()
        clip_grad_norm_(plain.parameters(), 0.5)
        for half in halves:
            half.step()
        assert found[number] == pytest.approx(loss.item(), rel=1e-4)
    assert loss.item() < 0.5 * found[0]


def test_schedulers_see_both(make):
    model, optimizer = build(make)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
    assert optimizer.param_groups[0] is optimizer.sparse.param_groups[0]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, [0])
    scheduler.step()
    assert optimizer.sparse.param_groups[0]["lr"] == 0.025
    assert optimizer.dense.param_groups[0]["lr"] == 0.005
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=10)
    train(model, optimizer, [1])
    cycle.step()
    assert optimizer.sparse.param_groups[0]["betas"][0] == optimizer.dense.param_groups[0]["betas"][0] != 0.9


def test_a_closure_is_called_once(make):
    model, optimizer = build(make)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() > 0.0
    assert (calls, optimizer.global_step) == ([True], 1)


@pytest.mark.parametrize("bad", ["inf", "nan"])
def test_a_scaler_skips_both(make, bad):
    model, optimizer = build(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    train(model, optimizer, [0])
    before, files = everything(model), contents(make.directory())
    scaler.scale(loss_of(model, 1) * float(bad)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(everything(model), before)
    assert contents(make.directory()) == files
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.global_step == 2


@pytest.mark.parametrize("half", ["table", "head"])
def test_what_the_tables_refuse_leaves_the_dense_half_alone(make, half):
    model, optimizer = build(make, max_grad_norm=1.0)
    train(model, optimizer, [0])
    before = everything(model)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    weight = model.table.weight if half == "table" else model.head[0].weight
    weight.grad = weight.grad * float("nan")
    with pytest.raises(GradientError, match="nothing was changed"):
        optimizer.step()
    assert_equal(everything(model), before)
    assert optimizer.dense.state[model.head[0].weight]["step"] == 1
    assert train(model, optimizer, [1])


def test_a_dense_step_that_fails_is_told_of(make, tmp_path):
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, [0, 1])
    file, expected = saved(model, optimizer), everything(model)

    def fail(*given):
        raise MemoryError("no room")

    handle = optimizer.dense.register_step_pre_hook(fail)
    with pytest.raises(MemoryError) as failed:
        train(model, optimizer, [2])
    handle.remove()
    assert "the tables are at step 3 already" in failed.value.__notes__[0]
    with pytest.warns(TrainingWarning, match="of no one step"):
        optimizer.state_dict()
    restore(file, model, optimizer)
    assert optimizer.global_step == 2
    assert_equal(everything(model), expected)
    optimizer.state_dict()


def test_accumulated_gradients(make):
    model, optimizer = build(make)
    other, once = build(make, where="other")
    for number in range(3):
        loss_of(model, number).backward()
    optimizer.step()
    sum(loss_of(other, number) for number in range(3)).backward()
    once.step()
    for a, b in zip(everything(model), everything(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("flag", ["foreach", "fused"])
def test_dense_optimizers_with_passes_of_their_own(make, flag):
    model = Model(make)
    optimizer = CombinedOptimizer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, **{flag: True}),
        lambda parameters: DiskSparseAdam(parameters, lr=0.05, state_dir=make.directory()),
    )
    make.callback(optimizer.close)
    train(model, optimizer, range(3))
    optimizer.zero_grad(set_to_none=False)
    assert not model.head[0].weight.grad.any()
    assert not model.table.weight.grad._values().any()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 4) * float("inf")).backward()
    before = everything(model)
    scaler.step(optimizer)
    assert_equal(everything(model), before)


def test_groups_that_are_added(make):
    table, more = make.disk(9, 2, name="table"), make.disk(9, 2, name="more")
    first, second = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizer = CombinedOptimizer([*table.parameters(), *first.parameters()], adamw)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.add_param_group({"params": [more.weight, *second.parameters()], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.01, 0.5, 0.5]
    second(first(table(torch.tensor([1])) + more(torch.tensor([2])))).sum().backward()
    before = second.weight.item()
    optimizer.step()
    scheduler.step()
    assert (weights(more) != 0.0).any(dim=1).tolist() == [False, False, True] + [False] * 6
    assert second.weight.item() != before
    kept = optimizer.state_dict()
    optimizer.param_groups[3]["lr"] = 7.0
    optimizer.load_state_dict(kept)
    assert optimizer.dense.param_groups[1]["lr"] == pytest.approx(0.05)
    assert optimizer.param_groups[3] is optimizer.dense.param_groups[1]
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": first.parameters()})
    assert len(optimizer.param_groups) == 4


def test_groups_as_trainers_make_them(make):
    """Hugging Face's has one group with decay and one without, whichever half a parameter is of."""
    table, head = make.disk(9, 2), torch.nn.Linear(2, 1)
    groups = [
        {"params": [table.weight, head.weight], "weight_decay": 0.1},
        {"params": [head.bias], "weight_decay": 0.0},
    ]
    optimizer = CombinedOptimizer(groups, adamw)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert optimizer.sparse.param_names == ["embedding"]


def test_tables_alone(make):
    table = make.disk(9, 2)
    optimizer = CombinedOptimizer(table)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.dense is None
    assert weights(table)[1].tolist() == pytest.approx([-1e-3] * 2)


REFUSED = {
    "no table": (
        lambda make: CombinedOptimizer(torch.nn.Linear(2, 1), adamw),
        "none of the 2 parameters is a table",
    ),
    "no dense optimizer": (
        lambda make: CombinedOptimizer([make.disk(9, 2).weight, torch.zeros(2)]),
        "dense=None is no optimizer for the 1 dense",
    ),
    "a dense optimizer that searches": (
        lambda make: CombinedOptimizer(
            [make.disk(9, 2).weight, torch.nn.Parameter(torch.zeros(2))], torch.optim.LBFGS
        ),
        "LBFGS evaluates a closure several times",
    ),
    "no bound": (lambda make: CombinedOptimizer(make.disk(9, 2), max_grad_norm=0.0), "max_grad_norm=0.0"),
    "one checkpoint": (
        lambda make: CombinedOptimizer(make.disk(9, 2), checkpoints=make.directory("c"), keep=1),
        "keep=1 is too few",
    ),
    "no checkpoints": (lambda make: CombinedOptimizer(make.disk(9, 2), keep=2), "nobody makes"),
    "a place inside": (
        lambda make: CombinedOptimizer(make.disk(9, 2), checkpoints=make.directory() / "kept"),
        "is inside the state directory .*: pass a directory beside it",
    ),
    "an address": (lambda make: CombinedOptimizer(make.disk(9, 2), checkpoints="s3://a/b"), "checkpoints="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(make, case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(make)


def test_it_is_not_copied(make):
    _, optimizer = build(make)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="can't be copied or pickled"):
            copying(optimizer)


def test_going_back_to_what_was_saved(make, tmp_path):
    """Dense layers, their moments, tables, and weights in memory whose moments are on disk."""
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, range(4))
    file = saved(model, optimizer)
    expected = train(model, optimizer, range(4, 8)), everything(model)
    train(model, optimizer, range(8, 11))
    optimizer.close()

    model, optimizer = build(make, resume=True)  # whoever loads need not make checkpoints
    assert optimizer.global_step == 11
    restore(file, model, optimizer)
    assert optimizer.global_step == 4
    assert train(model, optimizer, range(4, 8)) == expected[0]
    assert_equal(everything(model), expected[1])


def test_rows_that_are_set_without_a_step_are_in_the_next_file_and_not_in_the_last(make, tmp_path):
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, range(3))
    before, files = everything(model), [saved(model, optimizer)]
    model.table.set_rows(torch.tensor([2, 7]), torch.full((2, 4), 9.0))
    after = everything(model)
    files += [saved(model, optimizer), saved(model, optimizer)]
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"step-3", "step-3-2"}
    train(model, optimizer, range(3, 5))
    for file, expected in zip(files, (before, after, after), strict=True):
        restore(file, model, optimizer)
        assert optimizer.global_step == 3
        assert_equal(everything(model), expected)


def test_the_same_step_of_another_course_is_not_taken_for_the_one_that_was_saved(make, tmp_path):
    """Gone back and on with other batches, the tables are at the step of a saved file, and are others."""
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, [0, 1])
    early = saved(model, optimizer)
    train(model, optimizer, [2, 3])
    late, expected = saved(model, optimizer), everything(model)
    restore(early, model, optimizer)
    train(model, optimizer, [7, 8])
    assert optimizer.global_step == 4
    restore(late, model, optimizer)
    assert_equal(everything(model), expected)
    restore(early, model, optimizer)
    train(model, optimizer, [7, 8])
    optimizer.state_dict()  # in place of the checkpoint that the later file refers to
    with pytest.raises(RuntimeError, match="holds something else now"):
        restore(late, model, optimizer)


def test_a_new_directory_takes_the_checkpoint_too(make, tmp_path):
    table = make.disk(9, 2)
    optimizer = CombinedOptimizer(table, checkpoints=tmp_path / "kept")
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    file, expected = saved(table, optimizer), weights(table)
    table = make.disk(9, 2, where="elsewhere")
    restore(file, table, CombinedOptimizer(table))
    assert torch.equal(weights(table), expected)


def test_a_step_without_a_checkpoint_is_told_of(make):
    model, optimizer = build(make)
    train(model, optimizer, [0])
    file = saved(model, optimizer)
    train(model, optimizer, [1])
    with pytest.raises(RuntimeError, match=r"saved at step 1 but .* at\s+step 2.*CombinedOptimizer\(checkp"):
        restore(file, model, optimizer)


@pytest.mark.parametrize("fault", ["gone", "another"])
def test_a_checkpoint_that_is_not_the_one_is_told_of(make, tmp_path, fault):
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, [0])
    kept = optimizer.state_dict()
    train(model, optimizer, [1])
    if fault == "gone":
        (tmp_path / "kept" / "step-1").rename(tmp_path / "moved")
    else:
        optimizer.export_checkpoint(tmp_path / "kept" / "step-1", overwrite=True)
    before = contents(make.directory())
    with pytest.raises(StateMismatchError, match=r"can't be used|holds something else") as refused:
        optimizer.load_state_dict(kept)
    assert isinstance(refused.value.__cause__, CheckpointNotFoundError) == (fault == "gone")
    assert contents(make.directory()) == before


def test_model_and_optimizer_of_different_steps_are_refused(make, tmp_path):
    model, optimizer = build(make, checkpoints=tmp_path / "kept")
    train(model, optimizer, [0])
    early = optimizer.state_dict()
    train(model, optimizer, [1])
    late = model.state_dict()
    train(model, optimizer, [2])
    model.load_state_dict(late)
    with pytest.raises(StateMismatchError, match=r"saved at step 1 but .* at step 2"):
        optimizer.load_state_dict(early)
    train(model, optimizer, [2])
    optimizer.load_state_dict(early)
    assert optimizer.global_step == 1


def test_a_state_dict_of_another_kind_is_refused(make):
    model, optimizer = build(make)
    with pytest.raises(ValueError, match="refers to no tables"):
        optimizer.load_state_dict(adamw(model.head.parameters()).state_dict())
    with pytest.raises(ValueError, match="1 groups, the optimizer 2"):
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": [{"params": []}]})


def test_dense_layers_of_no_known_step_are_told_of_once(make):
    model, optimizer = build(make)
    train(model, optimizer, [0])
    file = saved(model, optimizer)
    optimizer.close()
    model, optimizer = build(make, resume=True)
    model.side.load_state_dict({"weight": torch.zeros(ROWS, 4)})
    with pytest.warns(StateWarning) as told:
        train(model, optimizer, [1])
    assert sum("nobody has said of which step" in str(each.message) for each in told) == 1
    train(model, optimizer, [2])
    assert file


def test_one_built_again_over_the_same_model_is_no_stranger(make):
    table, head = make.disk(ROWS, 2), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(table, head)
    for _ in range(2):
        optimizer = CombinedOptimizer(model, adamw)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert optimizer.global_step == 2


def test_checkpoints_are_made_once_and_kept_for_a_while(make, tmp_path):
    kept = tmp_path / "kept"
    table = make.disk(9, 2)
    optimizer = CombinedOptimizer(table, checkpoints=kept, keep=2)
    optimizer.state_dict()
    assert not kept.exists()  # of step 0 there is nothing to keep
    for number in range(1, 5):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        reference = optimizer.state_dict()["dsa"]["checkpoint"]
        written = (kept / f"step-{number}" / "zarr.json").stat().st_mtime_ns
        table.state_dict()
        assert (kept / f"step-{number}" / "zarr.json").stat().st_mtime_ns == written
        assert Path(reference["url"]) == kept / f"step-{number}"
        assert dsa.open_checkpoint(reference["url"]).content_root == reference["content_root"]
    assert sorted(os.listdir(kept)) == ["step-3", "step-4"]
    optimizer.close()
    assert optimizer.state_dict()["dsa"]["global_step"] == 4


def test_a_closed_one_makes_no_checkpoint(make, tmp_path):
    table = make.disk(9, 2)
    optimizer = CombinedOptimizer(table, checkpoints=tmp_path / "kept")
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.close()
    with pytest.raises(StateClosedError, match="was closed"):
        optimizer.state_dict()
    with pytest.raises(StateClosedError, match="was closed"):
        optimizer.step()


def test_killed_at_any_call_of_a_save_or_of_going_back(make, tmp_path):
    """What the last whole file refers to can be loaded, whatever was under way."""
    file, place = tmp_path / "saved.pt", make.directory()
    start = tmp_path.parent / f"{tmp_path.name}-start"

    def prepare():
        model, optimizer = build(make, resume=place.exists() or None, checkpoints=tmp_path / "kept", keep=2)
        if file.exists():
            kept = torch.load(file, weights_only=True)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
        return model, optimizer

    def operation(made):
        model, optimizer = made
        train(model, optimizer, range(optimizer.global_step, optimizer.global_step + 2))
        aside = tmp_path / "aside.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, aside)
        aside.replace(file)

    def live():
        torch.set_num_threads(1)  # those of OpenMP don't live on in a fork
        made = prepare()
        operation(made)
        made[1].close()

    for _ in range(2):
        assert in_child(live) == 0
    shutil.copytree(tmp_path, start)
    states = {}
    for total in (4, 6, 8):
        model, optimizer = build(make, where=f"whole-{total}")
        train(model, optimizer, range(total))
        states[total] = everything(model)

    def restore_all():
        for name in ("state", "kept", "saved.pt", "aside.pt"):
            path = tmp_path / name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            if (start / name).is_dir():
                shutil.copytree(start / name, path)
            elif (start / name).exists():
                shutil.copy(start / name, path)

    def stands_at():
        model, optimizer = prepare()
        step = optimizer.global_step
        assert_equal(everything(model), states[step])
        optimizer.close()
        return step

    # The last call renames the file; a thread may make one call less, and nothing is killed then.
    stands = [stands_at() for _ in deaths(prepare, operation, restore_all, most=8)]
    assert set(stands[:-1]) == {4}
    assert in_child(live) == 0
    assert stands_at() in (6, 8)


def again(optimizer):
    """An optimizer built as trainers do that build theirs again: from the first parameter group."""
    (group,) = optimizer.param_groups
    return type(optimizer)(group["params"], **{key: value for key, value in group.items() if key != "params"})


REBUILT = {
    "torch's counter": {"bias_correction": "parameter"},
    "decay": {"weight_decay": 0.1, "weight_decay_mode": "decoupled", "bias_correction": "global"},
    "a dialect by its arguments": {"convention": dsa.conventions.TORCH_SPARSE_ADAM},
    "decay of all rows": {
        "weight_decay": 0.1,
        "weight_decay_mode": "decoupled",
        "weight_decay_catch_up": True,
    },
}


@pytest.mark.parametrize("case", REBUILT)
def test_d27_an_optimizer_built_again_from_its_groups_is_the_same(make, case):
    found = []
    for rebuild in (False, True):
        state = "catch_up_adam" if "weight_decay_catch_up" in REBUILT[case] else "adam"
        table = make.disk(9, 2, where=str(rebuild), state=state)
        optimizer = make.adam(table, where=str(rebuild), **REBUILT[case])
        for number in range(4):
            if rebuild:
                optimizer = again(optimizer)
            optimizer.zero_grad()
            table(torch.tensor([number, 1])).sum().backward()
            optimizer.step()
        found.append(weights(table))
    assert torch.equal(*found)


def test_d27_what_a_constructor_can_not_be_told_is_an_error(make):
    optimizer = make.adam(make.disk(9, 2), convention=dsa.conventions.DSA_ADAM)
    with pytest.raises(TypeError, match="eps_placement"):
        again(optimizer)


def test_d27_options_of_all_groups_are_not_changed_in_one(make):
    table = make.disk(9, 2)
    optimizer = make.adam(table, bias_correction="parameter")
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["bias_correction"] = "row"
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="bias_correction='row' of a parameter group is not the optimizer's"):
        optimizer.step()
    other = make.adam(table)
    with pytest.raises(ValueError, match="bias_correction='parameter'"):
        other.load_state_dict(saved)


def test_d27_of_two_optimizers_over_one_table_the_later_one_steps(make):
    table = make.disk(9, 2)
    first = make.adam(table)
    second = DiskSparseAdam(table.parameters(), lr=0.2)
    table(torch.tensor([1])).sum().backward()
    before = contents(make.directory())
    with pytest.raises(StateError, match="'embedding' was handed to another optimizer after this one"):
        first.step()
    assert contents(make.directory()) == before
    second.step()
    del second
    gc.collect()
    first.step()
    assert first.global_step == 2
    first.close()


def test_a_table_grows_under_it(make, tmp_path):
    table, head = make.disk(9, 2), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(table, head)
    optimizer = CombinedOptimizer(model, adamw, checkpoints=tmp_path / "kept")
    for number in (1, 11):
        if number == 11:
            optimizer.grow("embedding", 12)
        model(torch.tensor([number])).sum().backward()
        optimizer.step()
    assert (optimizer.global_step, len(weights(table))) == (2, 12)
    assert dsa.open_checkpoint(optimizer.state_dict()["dsa"]["checkpoint"]["url"]).global_step == 2
