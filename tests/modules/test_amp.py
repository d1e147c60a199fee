"""Mixed precision: scaled gradients, half-precision tables, autocast."""

import numpy as np
import pytest
import torch
from layers import MEMORY_AND_DISK, backward, contents, row, step, weights

from dsa import clip_grad_norm_

both = pytest.mark.parametrize("kind", MEMORY_AND_DISK)
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def scaled(layer, optimizer, scaler, factor=1.0):
    optimizer.zero_grad()
    scaler.scale(layer(torch.tensor([1])).sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


@both
def test_c19_a_scaled_step_is_the_unscaled_one(make, kind):
    layer, optimizer = make.pair(kind, 3, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    scaled(layer, optimizer, scaler)
    assert row(layer, 1) == [np.float32(-0.09999996)]
    before, files = weights(layer), contents(make.directory())
    scaled(layer, optimizer, scaler, float("inf"))
    assert scaler.get_scale() == 512
    assert torch.equal(weights(layer), before)
    assert contents(make.directory()) == files
    assert optimizer.global_step == 1
    scaled(layer, optimizer, scaler)
    assert make.records(layer, 3, 1)["t"].tolist() == [0, 2, 0]


@both
def test_unscale_clip_step(make, kind):
    layer, optimizer = make.pair(kind, 3, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    scaler.scale(layer(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(layer.parameters(), max_norm=1.0)
    np.testing.assert_allclose(norm, np.sqrt(2 * 4 + 2 * 1), rtol=1e-6)
    scaler.step(optimizer)
    scaler.update()
    np.testing.assert_allclose(make.records(layer, 3, 2)["m"][1], 0.1 * 2 / np.sqrt(10), rtol=1e-5)


@halves
@both
def test_c20_moments_of_a_half_table_are_float32(make, kind, dtype):
    layer = make.layer(kind, 4, 2, dtype=dtype)
    optimizer = make.adam(layer, lr=1e-3)
    step(layer, optimizer, [1], 1e-3)
    np.testing.assert_allclose(make.records(layer, 4, 2)["v"][1], 1e-9, rtol=1e-2)
    step(layer, optimizer, [1], 1e-3)
    np.testing.assert_allclose(row(layer, 1), -0.002, rtol=1e-2)
    assert layer(torch.tensor([1])).dtype == dtype


@both
def test_c20_torch_refuses_to_unscale_half_gradients(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    layer.half()
    before = contents(make.directory())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled(layer, optimizer, scaler)
    assert contents(make.directory()) == before


@both
def test_c21_a_half_table_goes_on_as_if_never_closed(make, kind):
    def work(layer, optimizer, steps):
        for number in steps:
            step(layer, optimizer, [number % 3, 3], 0.1 + 0.37 * (number % 7))

    def halved(where, **resume):
        plain = kind == "memory"
        return (
            make.plain(4, 2, dtype=torch.bfloat16)
            if plain
            else make.disk(4, 2, where=where, dtype=torch.bfloat16, **resume)
        )

    once = halved("once")
    work(once, make.adam(once, where="once"), range(20))
    first = halved("twice")
    with make.adam(first, where="twice") as optimizer:
        work(first, optimizer, range(10))
        saved = optimizer.state_dict()
    second = first if kind == "memory" else halved("twice", resume=True)
    optimizer = make.adam(second, where="twice", resume=True)
    optimizer.load_state_dict(saved)
    work(second, optimizer, range(10, 20))
    assert torch.equal(weights(second), weights(once))
    assert (
        make.records(second, 4, 2, where="twice").tobytes()
        == make.records(once, 4, 2, where="once").tobytes()
    )


@both
def test_autocast(make, kind):
    layer, optimizer = make.pair(kind, 4, 2)
    top = torch.nn.Linear(2, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = top(layer(torch.tensor([1])))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    optimizer.step()
    np.testing.assert_allclose(np.abs(row(layer, 1)), 0.1, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_layer_on_disk_changes_its_dtype_and_keeps_float32_on_disk(make, dtype):
    layer = make.disk(4, 2, init=torch.full((4, 2), 0.3))
    optimizer = make.adam(layer)
    backward(layer, [2])
    assert layer.to(dtype) is layer
    assert layer.weight.grad.dtype == dtype
    layer.to(torch.float32)
    optimizer.zero_grad()
    layer.to(dtype)
    backward(layer, [1])
    assert layer(torch.tensor([0])).dtype == layer.weight.dtype == layer.weight.grad.dtype == dtype
    optimizer.step()
    stored = make.records(layer, 4, 2)["w"]
    assert stored.dtype == np.float32
    assert stored[0].tolist() == [np.float32(0.3)] * 2, (
        "handing rows out as another dtype does not round the table"
    )
    np.testing.assert_allclose(stored[1], 0.2, rtol=1e-6)
