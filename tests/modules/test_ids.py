"""Layers and optimizers over tables whose rows belong to ids, beside dense ones that knew the ids."""

import numpy as np
import pytest
import torch

import dsa
from dsa import IdPolicy, init
from dsa.errors import RowIndexError, RowTypeError

DIM = 3
IDS = torch.tensor([5, -(2**63), 2**63 - 1, 0, 77, -1])


def layer(path, **options):
    return dsa.DiskEmbedding(None, DIM, init=init.Normal(None, DIM, seed=4), state_dir=path, **options)


def first(ids):
    """The weights that ids start with."""
    weights = np.empty((len(ids), DIM), np.float32)
    init.Normal(None, DIM, seed=4).fill(np.asarray(ids, np.int64), weights)
    return torch.from_numpy(weights)


def train(module, optimizer, *batches):
    for ids in batches:
        optimizer.zero_grad()
        (module(ids) ** 2).sum().backward()
        optimizer.step()


def test_a_layer_of_ids_learns_as_one_of_rows_does(tmp_path):
    keyed = layer(tmp_path / "keyed")
    dense = dsa.DiskEmbedding(6, DIM, init=first(IDS.tolist()), state_dir=tmp_path / "dense")
    one, other = (dsa.DiskSparseAdam(each.parameters(), lr=0.1) for each in (keyed, dense))
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        rows = torch.randint(0, 6, (4, 2), generator=generator)
        train(keyed, one, IDS[rows])
        train(dense, other, rows)
    assert torch.equal(keyed.eval()(IDS), dense(torch.arange(6)))
    assert sorted(keyed.ids().tolist()) == sorted(IDS.tolist())
    assert (keyed.num_embeddings, dense.num_embeddings) == (6, 6)
    keyed.close()
    dense.close()


def test_a_run_goes_on_where_it_ended(tmp_path):
    batches = [IDS[:3], IDS[2:], torch.tensor([8, 9, 5]), IDS]
    whole, ended = layer(tmp_path / "whole"), layer(tmp_path / "ended")
    train(whole, dsa.DiskSparseAdam(whole.parameters()), *batches)
    train(ended, dsa.DiskSparseAdam(ended.parameters()), *batches[:2])
    ended.close()
    ended = layer(tmp_path / "ended", resume=True)
    train(ended, dsa.DiskSparseAdam(ended.parameters()), *batches[2:])
    known = torch.cat([IDS, torch.tensor([8, 9])])
    assert torch.equal(whole.eval()(known), ended.eval()(known))
    whole.close()
    ended.close()


def test_bags_of_ids(tmp_path):
    bag = dsa.DiskEmbeddingBag(
        None, DIM, mode="sum", padding_idx=0, init=init.Normal(None, DIM, seed=4), state_dir=tmp_path
    )
    pooled = bag(torch.tensor([5, 0, 7, 0, 0]), torch.tensor([0, 3]))
    assert torch.equal(pooled.detach(), torch.stack([first([5, 7]).sum(0), torch.zeros(DIM)]))
    assert sorted(bag.ids().tolist()) == [5, 7]
    bag.close()


def test_unknown_ids_get_no_row_where_nothing_is_trained(tmp_path):
    given = torch.tensor([5, 6, 5])
    for name, unknown in (("eval", "zeros"), ("no_grad", "first"), ("frozen", "zeros")):
        module = layer(tmp_path / name, ids=IdPolicy(unknown=unknown))
        module.train(name != "eval")
        module.weight.requires_grad_(name != "frozen")
        with torch.set_grad_enabled(name != "no_grad"):
            found = module(given)
        expected = first(given.tolist()) if unknown == "first" else torch.zeros(3, DIM)
        assert torch.equal(found.detach(), expected)
        assert module.num_embeddings == 0
        module.close()
    module = layer(tmp_path / "error", ids=IdPolicy(unknown="error")).eval()
    with pytest.raises(RowIndexError, match=r"id 5 has no row in table 'embedding': .*unknown='zeros'"):
        module(given)
    module.close()


def test_unknown_ids_beside_known_ones_are_told_apart(tmp_path):
    module = layer(tmp_path, ids=IdPolicy(unknown="first"))
    optimizer = dsa.DiskSparseAdam(module.parameters(), lr=0.5)
    train(module, optimizer, torch.tensor([5, 7]))
    found = module.eval()(torch.tensor([[7, 8], [-9, 8]]))
    assert torch.equal(found[0, 1].detach(), first([8])[0])
    assert torch.equal(found[1].detach(), first([-9, 8]))
    assert not torch.equal(found[0, 0].detach(), first([7])[0])
    optimizer.zero_grad()
    found.sum().backward()
    assert module.weight.grad._nnz() == 1, "an id without a row gets no gradient"
    module.close()


def test_an_id_is_admitted_when_it_has_come_often_enough(tmp_path):
    module = layer(tmp_path, ids=IdPolicy(min_count=3))
    optimizer = dsa.DiskSparseAdam(module.parameters())
    train(module, optimizer, torch.tensor([1, 1, 2]), torch.tensor([2, 3]))
    assert module.ids().tolist() == []
    train(module, optimizer, torch.tensor([1, 3]))
    assert module.ids().tolist() == [1]
    module.close()
    module = layer(tmp_path, ids=IdPolicy(min_count=3), resume=True)
    train(module, dsa.DiskSparseAdam(module.parameters()), torch.tensor([2, 3, 4]))
    assert sorted(module.ids().tolist()) == [1, 2, 3]
    module.close()


def test_rows_are_set_inserted_and_deleted_by_id(tmp_path):
    module = layer(tmp_path, ids=IdPolicy(max_rows=4))
    module.insert(torch.tensor([7, 8, 7]), torch.ones(3, DIM))
    module.insert(torch.tensor([8, 9]))
    module.set_rows(torch.tensor([8]), torch.full((1, DIM), 2.0))
    expected = torch.cat([torch.ones(1, DIM), torch.full((1, DIM), 2.0), first([9])])
    assert torch.equal(module.weight[torch.tensor([7, 8, 9])].detach(), expected)
    with pytest.raises(RowIndexError, match=r"id 10 has no row .*: give it one by insert"):
        module.set_rows(torch.tensor([10]), torch.ones(1, DIM))
    with pytest.raises(ValueError, match=r"a batch of 5 distinct ids has no room .* cap is 4"):
        module.insert(torch.arange(20, 25))
    assert module.delete(torch.tensor([7, 11])) == 1
    assert sorted(module.ids().tolist()) == [8, 9]
    module.close()


def test_what_dense_tables_and_ids_do_not_share(tmp_path):
    dense = dsa.DiskEmbedding(4, DIM, state_dir=tmp_path / "dense")
    for call in (dense.ids, lambda: dense.insert(torch.tensor([1])), lambda: dense.delete(torch.tensor([1]))):
        with pytest.raises(TypeError, match="belong to no ids"):
            call()
    dense.close()
    with pytest.raises(ValueError, match="num_embeddings=4 asks for that many rows"):
        dsa.DiskEmbedding(4, DIM, ids=IdPolicy(), state_dir=tmp_path / "both")
    keyed = layer(tmp_path / "keyed")
    with pytest.raises(TypeError, match="names no ids"):
        keyed.weight[:3]
    with pytest.raises(RowTypeError, match="pass a 1-D array of integers"):
        keyed(torch.tensor([0.5]))
    with pytest.raises(RuntimeError, match=r"use insert\(ids, weights\)"):
        keyed.load_state_dict({"weight": torch.ones(3, DIM)})
    keyed.close()


def test_an_explicit_optimizer_of_ids(tmp_path):
    tables = {"user": init.Normal(None, DIM, seed=4), "item": init.Zeros(5, DIM)}
    policy = {"user": IdPolicy(unknown="first")}
    optimizer = dsa.DiskSparseRiemannianAdam(tables, lr=0.1, k=0.0, disk_dir=tmp_path / "a", ids=policy)
    with optimizer:
        grads = np.ones((3, DIM), np.float32)
        optimizer.step({"user": ([7, -3, 7], grads), "item": ([1, 2, 3], grads)})
        assert sorted(optimizer.ids("user").tolist()) == [-3, 7]
        assert torch.equal(optimizer.read_rows([9], "user"), first([9]))
        assert torch.allclose(optimizer.read_rows([-3], "user"), first([-3]) - 0.1)
        assert optimizer.delete([7, 8], "user") == 1
        optimizer.prefetch([7, -3], "user")
        assert optimizer.ids("user").tolist() == [-3]
    with pytest.raises(ValueError, match=r"the rows of \['item'\] belong to none"):
        dsa.DiskSparseRiemannianAdam(tables, disk_dir=tmp_path / "b", ids={"item": IdPolicy()})
    with pytest.raises(KeyError, match="'x', which is not one of the tables"):
        dsa.DiskSparseRiemannianAdam(tables, disk_dir=tmp_path / "b", ids={"x": IdPolicy()})


def test_gradients_of_batches_before_and_after_the_table_has_grown_add_up(tmp_path):
    module = layer(tmp_path)
    optimizer = dsa.DiskSparseAdam(module.parameters())
    early = module(torch.arange(10)).sum()
    late = module(torch.arange(5_000)).sum()
    (early + late).backward()
    optimizer.step()
    assert module.num_embeddings == 5_000
    module.close()


def test_pretrained_rows_get_ids(tmp_path):
    torch.manual_seed(0)
    for plain, kind in (
        (torch.nn.Embedding, dsa.DiskEmbedding),
        (torch.nn.EmbeddingBag, dsa.DiskEmbeddingBag),
    ):
        known = plain(6, DIM, padding_idx=2)
        options = {"state_dir": tmp_path / kind.__name__, "init": init.Zeros(None, DIM), "row_ids": IDS}
        module = kind.from_pretrained(known, **options)
        assert (module.padding_idx, module.weight.requires_grad) == (2**63 - 1, False)
        assert sorted(module.ids().tolist()) == sorted(set(IDS.tolist()) - {2**63 - 1})
        assert torch.equal(module(IDS[None]), known(torch.arange(6)[None]))
        module.close()
        again = kind.from_pretrained(known, **options, resume=True)
        assert torch.equal(again(IDS[None]), known(torch.arange(6)[None]))
        again.close()


def test_pretrained_rows_that_ids_do_not_fit(tmp_path):
    weights = np.ones((3, DIM), np.float32)
    for row_ids in ([1, 2], [1, 2, 2]):
        with pytest.raises(ValueError, match=r"row_ids names 2 distinct ids for 3 rows"):
            dsa.DiskEmbedding.from_pretrained(weights, row_ids=row_ids, state_dir=tmp_path / "s")
    policy = IdPolicy(max_rows=2)
    with pytest.raises(ValueError, match="max_rows=2 has no room for 3 rows"):
        dsa.DiskEmbedding.from_pretrained(weights, row_ids=[1, 2, 3], ids=policy, state_dir=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_layers_of_ids_do_not_go_into_memory(tmp_path):
    model = torch.nn.Sequential(layer(tmp_path))
    with pytest.raises(ValueError, match=r"the rows of '0' belong to ids, .*convert_ids"):
        dsa.materialize_(model)
    model[0].close()
