"""Modules and optimizers whose tables grow: shapes follow, and what was begun before goes on."""

import numpy as np
import pytest
import torch

import dsa
from dsa import DiskEmbedding, DiskEmbeddingBag, DiskSparseAdam, init
from dsa.errors import StateMismatchError, StateWarning


def embedding(path, rows=10, resume=None, **options):
    rule = init.Normal(rows, 4, 0.1, seed=5)
    return DiskEmbedding(rows, 4, init=rule, state_dir=path, resume=resume, **options)


def steps(module, optimizer, highest, numbers):
    for number in numbers:
        ids = torch.randint(0, highest, (6,), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        (module(ids) - number).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_module_that_grew_is_as_one_that_had_the_rows(tmp_path, backend):
    for name, first in (("grown", 10), ("whole", 25)):
        module = embedding(tmp_path / name, first, backend=backend)
        with DiskSparseAdam(module.parameters(), lr=0.1) as optimizer:
            steps(module, optimizer, 10, range(3))
            module.grow(25)
            steps(module, optimizer, 25, range(3, 6))
            assert module.num_embeddings == module.weight.shape[0] == len(module.weight) == 25
            assert optimizer.param_groups[0]["params"][0] is module.weight
            assert "25, 4" in repr(module)
            optimizer.load_state_dict(optimizer.state_dict())
            module.load_state_dict(module.state_dict())
    assert dsa.diff(tmp_path / "grown", tmp_path / "whole").same
    again = embedding(tmp_path / "grown", 25, True)
    again.close()
    with pytest.raises(StateMismatchError, match="stored as 25 x 4 but 10 x 4"):
        embedding(tmp_path / "grown", 10, True)


def test_what_was_begun_before_a_growth_is_stepped_after_it(tmp_path):
    """A gradient that is there, and a forward whose backward is yet to come, with one of after beside it."""
    for name, first in (("grown", 10), ("whole", 30)):
        module = embedding(tmp_path / name, first)
        with DiskSparseAdam(module.parameters(), lr=0.1) as optimizer:
            module(torch.tensor([1, 2])).sum().backward()
            module.grow(max(20, first))
            optimizer.step()
            optimizer.zero_grad()
            loss = module(torch.tensor([3, 4])).square().sum()
            module.grow(30)
            loss.backward()
            module(torch.tensor([4, 29])).square().sum().backward()
            optimizer.step()
    assert dsa.diff(tmp_path / "grown", tmp_path / "whole").same


def test_a_new_forward_beside_an_old_one_that_waits(tmp_path):
    module = embedding(tmp_path)
    with DiskSparseAdam(module.parameters(), lr=0.1) as optimizer:
        old = module(torch.tensor([3])).square().sum()
        module.grow(30)
        module(torch.tensor([29])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        old.backward()
        optimizer.step()
        assert optimizer.global_step == 2


def test_bags_and_padding(tmp_path):
    bag = DiskEmbeddingBag(10, 4, padding_idx=3, init=init.Zeros(10, 4), state_dir=tmp_path, mode="sum")
    with DiskSparseAdam(bag.parameters(), lr=0.1) as optimizer:
        bag.grow(12)
        bag(torch.tensor([11, 3]), torch.tensor([0])).sum().backward()
        optimizer.step()
        assert bag(torch.tensor([11]), torch.tensor([0])).abs().sum() > 0
        assert bag.padding_idx == 3


def test_weights_that_are_given(tmp_path):
    module = DiskEmbedding.from_pretrained(torch.eye(4), state_dir=tmp_path, freeze=False)
    with pytest.raises(ValueError, match="pass init="):
        module.grow(6)
    module.grow(6, init=2 * torch.eye(4)[:2])
    assert torch.equal(module(torch.tensor([0, 4, 5])), torch.cat([torch.eye(4)[:1], 2 * torch.eye(4)[:2]]))
    module.close()


def test_the_optimizer_grows_tables_of_modules(tmp_path):
    module = embedding(tmp_path)
    with DiskSparseAdam([("words", module.weight)], lr=0.1) as optimizer:
        (name,) = optimizer.param_names
        optimizer.grow(name, 15)
        assert module.weight.shape == (15, 4)
        with pytest.raises(KeyError):
            optimizer.grow("other", 15)


def test_a_parameter_in_memory_grows_with_its_moments(tmp_path):  # case C25
    """Old rows keep weights, moments and counters, bit for bit; new ones have weights and no moments."""
    torch.manual_seed(0)
    module = torch.nn.Embedding(10, 4, sparse=True)
    new = torch.randn(4, 4)
    with DiskSparseAdam(module.named_parameters(), lr=0.1, state_dir=tmp_path) as optimizer:
        steps(module, optimizer, 10, range(5))
        table = optimizer._sparse.state.tables["weight"]
        old, weights = table.backend.read(np.arange(10)), module.weight.detach().clone()
        parameter = module.weight
        for wrong in (None, new[:3]):
            with pytest.raises(ValueError, match=r"shape \(10, 4\) grows to 14 rows: pass an array of 4 x 4"):
                optimizer.grow("weight", 14, wrong)
        optimizer.grow("weight", 14, new)
        assert module.weight is parameter
        assert torch.equal(module.weight.detach(), torch.cat([weights, new]))
        assert table.backend.read(np.arange(10)).tobytes() == old.tobytes()
        assert not table.backend.read(np.arange(10, 14)).view(np.uint8).any()
        steps(module, optimizer, 14, range(5, 8))
        assert optimizer.global_step == 8
    with DiskSparseAdam(module.named_parameters(), lr=0.1, state_dir=tmp_path, resume=True) as optimizer:
        steps(module, optimizer, 14, range(8, 9))


def test_a_closed_state_grows_for_a_larger_parameter(tmp_path):  # case C25
    """Without being told to, a state of 10 rows is not one of 14, and it never shrinks."""
    torch.manual_seed(0)
    module = torch.nn.Embedding(10, 4, sparse=True)
    with DiskSparseAdam(module.named_parameters(), lr=0.1, state_dir=tmp_path) as optimizer:
        steps(module, optimizer, 10, range(5))
        old = optimizer._sparse.state.tables["weight"].backend.read(np.arange(10))
    larger = torch.nn.Embedding(14, 4, sparse=True)
    with torch.no_grad():
        larger.weight[:10] = module.weight
    with pytest.raises(StateMismatchError, match=r"10 x 4 but 14 x 4"):
        DiskSparseAdam(larger.named_parameters(), lr=0.1, state_dir=tmp_path, resume=True)
    with pytest.raises(KeyError):
        dsa.grow_tables(tmp_path, {"other": 14})
    with pytest.raises(ValueError, match="never shrinks"):
        dsa.grow_tables(tmp_path, {"weight": 9})
    dsa.grow_tables(tmp_path, {"weight": 14})
    with DiskSparseAdam(larger.named_parameters(), lr=0.1, state_dir=tmp_path, resume=True) as optimizer:
        backend = optimizer._sparse.state.tables["weight"].backend
        assert backend.read(np.arange(10)).tobytes() == old.tobytes()
        assert not backend.read(np.arange(10, 14)).view(np.uint8).any()
        with pytest.warns(StateWarning, match="nobody can tell whether"):
            steps(larger, optimizer, 14, range(5, 7))
        assert optimizer.global_step == 7
