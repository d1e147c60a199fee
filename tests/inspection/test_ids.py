"""Looking at tables whose rows belong to ids: counts, and rows by id, beside training and after it."""

import numpy as np
import pytest
import torch

import dsa
from dsa import init
from dsa.backends import Zarr
from dsa.errors import RowIndexError
from dsa.inspection.render import render
from dsa.state.opening import opened

DIM = 4


def layer(path, **options):
    return dsa.DiskEmbedding(None, DIM, init=init.Normal(None, DIM, seed=4), state_dir=path, **options)


def train(module, optimizer, ids):
    optimizer.zero_grad()
    (module(torch.as_tensor(ids)) ** 2).sum().backward()
    optimizer.step()


@pytest.fixture
def trained(tmp_path):
    module = layer(tmp_path / "s")
    optimizer = dsa.DiskSparseAdam(module.parameters(), lr=0.1)
    train(module, optimizer, [5, -7, 2**62, 9])
    module.delete(torch.tensor([9]))
    train(module, optimizer, [5, 11, 12])
    module.delete(torch.tensor([12]))
    yield module, optimizer
    module.close()


def test_statistics_are_over_live_rows(trained, tmp_path):
    (table,) = dsa.summarize(tmp_path / "s").tables
    assert (table.live_rows, table.freed_rows, table.touched_rows, table.rows) == (4, 1, 4, 1024)
    assert (table.implausible_rows, table.stepped_rows) == (0, 4)
    assert (table.updates.count, table.updates.minimum) == (4, 1)
    assert table.weight_norms.minimum > 0.0, "a deleted row is zeros with a stamp"
    text = render(dsa.summarize(tmp_path / "s"))
    assert "4 ids have a row, 1 rows wait for another id, 1,019 were never given out" in text
    with dsa.open_state(tmp_path / "s") as view:
        assert "4 (0%)" in repr(view)
        assert sorted(view["embedding"].ids().tolist()) == [-7, 5, 11, 2**62]
    trained[0].export_checkpoint(tmp_path / "c")
    (other,) = dsa.summarize(dsa.open_checkpoint(tmp_path / "c").content()).tables
    assert (other.live_rows, other.freed_rows, other.weight_norms) == (4, 1, table.weight_norms)


def test_tables_of_rows_have_no_ids(tmp_path):
    with (
        dsa.DiskSparseRiemannianAdam({"a": init.Zeros(3, 2)}, k=0.0, disk_dir=tmp_path),
        dsa.open_state(tmp_path) as view,
    ):
        assert (view["a"].num_ids, dsa.summarize(view).tables[0].live_rows) == (None, None)
        for call in (view["a"].ids, lambda: view["a"].rows_of([1]), lambda: view["a"].weights_of([1])):
            with pytest.raises(TypeError, match="belong to no ids"):
                call()


def looked_at(path, module, ids):
    """What a view says of ids is what the module says."""
    module.eval()
    with dsa.open_state(path) as view:
        table = view["embedding"]
        np.testing.assert_array_equal(table.weights_of(ids), module(torch.tensor(ids)).numpy(force=True))
        rows = table.rows_of(ids)
        known = rows >= 0
        np.testing.assert_array_equal(table.read(rows[known])["id"], np.array(ids)[known])
        assert table.num_ids == module.num_embeddings
    module.train()


@pytest.mark.parametrize("options", [{}, {"backend": Zarr(compression="zstd")}, {"async_writes": True}])
def test_rows_are_found_by_id_beside_training(tmp_path, options):
    module = layer(tmp_path / "s", **options)
    optimizer = dsa.DiskSparseAdam(module.parameters(), lr=0.1)
    ids = [5, -7, 2**62, 9, -(2**63), 9, 77]
    for number in range(4):
        train(module, optimizer, ids[: number + 2])
        module.delete(torch.tensor(ids[number : number + 1]))
        looked_at(tmp_path / "s", module, ids)
    module.close()


def test_rows_are_found_without_an_index(trained, tmp_path):
    module, _ = trained
    ids = [5, -7, 9, 12, 11]
    expected = module.eval()(torch.tensor(ids)).numpy(force=True)
    module.close()
    (index,) = (tmp_path / "s").glob("*.ids")
    content = index.read_bytes()
    for damage in (b"", content[:5000], None, bytes(len(content))):
        index.unlink(missing_ok=True)
        if damage is not None:
            index.write_bytes(damage)
        with dsa.open_state(tmp_path / "s") as view:
            table = view["embedding"]
            assert (table.rows_of(ids) >= 0).tolist() == [True, True, False, False, True]
            np.testing.assert_array_equal(table.weights_of(ids), expected)
            assert table.num_ids == 4


def test_an_index_of_another_moment_is_not_trusted(trained, tmp_path):
    module, _ = trained
    module.close()
    (index,) = (tmp_path / "s").glob("*.ids")
    content = index.read_bytes()
    module = layer(tmp_path / "s", resume=True)
    module.insert(torch.tensor([500]))
    module.close()
    index.write_bytes(content)
    with dsa.open_state(tmp_path / "s") as view:
        assert view["embedding"].rows_of([500, 5, 501]).tolist()[0] >= 0


@pytest.mark.parametrize("unknown", ["zeros", "first", "error"])
def test_unknown_ids_in_a_view(trained, tmp_path, unknown):
    with dsa.open_state(tmp_path / "s") as view:
        table = view["embedding"]
        if unknown == "error":
            with pytest.raises(RowIndexError, match="id 8 has no row in table 'embedding'"):
                table.weights_of([5, 8], unknown)
            return
        expected = np.zeros((1, DIM), np.float32)
        if unknown == "first":
            init.Normal(None, DIM, seed=4).fill(np.array([8]), expected)
        np.testing.assert_array_equal(table.weights_of([8], unknown), expected)
        assert table.weights_of([]).shape == (0, DIM)


def test_a_module_that_reads_follows_a_table_that_grows(trained, tmp_path):
    module, optimizer = trained
    served = dsa.DiskEmbedding.open(tmp_path / "s")
    bags = dsa.DiskEmbeddingBag.open(tmp_path / "s", mode="sum", padding_idx=-7)
    assert served.num_embeddings == 4
    module.insert(torch.arange(100, 6_000))
    train(module, optimizer, [5_900, 5])
    wanted = torch.tensor([[5, 5_900], [-7, 10**9]])
    assert torch.equal(served(wanted), module.eval()(wanted).detach())
    assert torch.equal(bags(wanted), torch.stack([served(wanted)[0].sum(0), torch.zeros(DIM)]))
    module.delete(torch.tensor([5]))
    assert not served(torch.tensor([5])).any()
    first = dsa.DiskEmbedding.open(tmp_path / "s", unknown="first")
    assert first(torch.tensor([5])).any()
    for each in (served, bags, first):
        each.close()


def test_verification_knows_ids(trained, tmp_path):
    module, _ = trained
    assert dsa.verify(tmp_path / "s").ok, "beside training"
    module.close()
    found = dsa.verify(tmp_path / "s")
    assert (found.problems, found.remarks) == ((), ())
    (index,) = (tmp_path / "s").glob("*.ids")
    content = index.read_bytes()
    index.unlink()
    found = dsa.verify(tmp_path / "s")
    assert found.ok
    assert found.remarks == ("the index of the ids of table 'embedding' is made anew with the next opening",)
    index.write_bytes(content)
    with opened(tmp_path / "s", None) as state:
        table = state.tables["embedding"]
        (row,) = table.keys.find(np.array([5]))
        record = table.backend.read(np.array([row]))
        record["id"] = 77
        table.backend.write(np.array([row]), record)
    (problem,) = dsa.verify(tmp_path / "s").problems
    assert "the index of the ids of table 'embedding' is of 4 ids and 1 free rows" in problem
    with opened(tmp_path / "s", None) as state:
        record["id"] = -7
        state.tables["embedding"].backend.write(np.array([row]), record)
    (problem,) = dsa.verify(tmp_path / "s").problems
    assert "both belong to the id -7" in problem


def test_a_checkpoint_in_which_an_id_has_two_rows_is_not_whole(trained, tmp_path):
    from dataclasses import replace

    from dsa.checkpoint.export import write_checkpoint

    trained[0].export_checkpoint(tmp_path / "good")
    assert dsa.verify(tmp_path / "good").ok
    content = dsa.open_checkpoint(tmp_path / "good").content()

    def blocks(table):
        for first, records in table.blocks():
            records["id"][:2] = 5
            yield first, records

    tables = tuple(replace(table, blocks=lambda table=table: blocks(table)) for table in content.tables)
    write_checkpoint(replace(content, tables=tables), tmp_path / "bad")
    assert (
        "rows 0 and 1 of table 'embedding' both belong to the id 5"
        in dsa.verify(tmp_path / "bad").problems[0]
    )


def test_tables_are_compared_by_id(tmp_path):
    """However rows were given out, grown and freed."""
    ids = torch.tensor([5, -7, 2**62, 9])
    one, other = layer(tmp_path / "a"), layer(tmp_path / "b")
    one.insert(ids)
    other.insert(torch.arange(2_000) + 100)
    other.delete(torch.arange(2_000) + 100)
    other.insert(ids.flip(0))
    (table,) = dsa.diff(tmp_path / "a", tmp_path / "b").tables
    assert (table.same, table.compared, table.rows) == (True, 4, 0)
    other.set_rows(torch.tensor([-7]), torch.full((1, DIM), 9.0))
    one.delete(torch.tensor([9]))
    one.insert(torch.tensor([1, 2]))
    other.export_checkpoint(tmp_path / "c")
    (table,) = dsa.diff(tmp_path / "a", tmp_path / "c").tables
    assert table.facts == {"ids that the other lacks": (2, 1)}
    assert (table.compared, table.rows) == (6, 4)
    weights = next(each for each in table.fields if each.name == "w")
    assert (weights.rows, weights.first_rows, weights.largest_row) == (1, (-7,), -7)
    one.close()
    other.close()
