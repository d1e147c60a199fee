"""Embeddings that read beside training: nothing written, nothing locked, no gradients, other processes."""

import copy
import multiprocessing
import pickle

import pytest
import torch
from layers import contents, step, weights

import dsa
from dsa import DiskEmbedding, DiskEmbeddingBag, init
from dsa.errors import RowIndexError, StateClosedError, StateNotFoundError, StateWarning

ROWS, DIM = 12, 3


@pytest.fixture
def trained(make):
    """A table that is open in this process and was trained for a step, and its optimizer."""
    layer = make.disk(ROWS, DIM, init=init.Normal(ROWS, DIM, seed=1))
    optimizer = make.adam(layer)
    step(layer, optimizer, [1, 7])
    return layer, optimizer


@pytest.fixture
def look(make):
    """`DiskEmbedding.open` on the test's directory; closed in the end."""

    def opened(kind=DiskEmbedding, **options):
        layer = kind.open(make.directory(), **options)
        make.callback(layer.close)
        return layer

    return opened


def test_rows_are_those_of_the_last_step_while_somebody_trains(trained, look):
    layer, optimizer = trained
    served = look()
    for _ in range(3):
        assert torch.equal(served(torch.arange(ROWS)), weights(layer))
        assert served.global_step == optimizer.global_step
        step(layer, optimizer, [2, 7])
    assert (served.num_embeddings, served.embedding_dim, served.k) == (ROWS, DIM, 0.0)
    assert served(torch.tensor([[1, 2], [2, 1]])).shape == (2, 2, DIM)
    assert repr(served).startswith(f"ReadOnlyEmbedding({ROWS}, {DIM}, table='embedding', path=")


def test_nothing_is_written_or_locked(trained, look, make):
    layer, _ = trained
    layer.close()
    before = contents(make.directory())
    served = look()
    served(torch.arange(ROWS))
    again = make.disk(ROWS, DIM, resume=True)
    assert torch.equal(served(torch.arange(ROWS)), weights(again))
    again.close()
    served.close()
    look()
    assert {name for name in contents(make.directory())} == set(before)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_the_module_on_disk(make, look, mode):
    bag = make.bag(ROWS, DIM, mode=mode, init=init.Normal(ROWS, DIM, seed=1), padding_idx=2)
    served = look(DiskEmbeddingBag, mode=mode, padding_idx=2)
    ids, offsets = torch.tensor([1, 2, 2, 7]), torch.tensor([0, 3])
    assert torch.equal(served(ids, offsets), bag(ids, offsets).detach())
    factors = torch.tensor([0.5, 1.0, 2.0, 3.0])
    if mode == "sum":
        assert torch.equal(served(ids, offsets, factors), bag(ids, offsets, factors).detach())


def test_the_mean_on_a_ball_is_the_balls(make, look):
    bag = make.bag(ROWS, DIM, k=1.0, init=init.Uniform(ROWS, DIM, -0.3, 0.3, seed=1))
    served = look(DiskEmbeddingBag)
    assert torch.equal(served(torch.tensor([[1, 2]])), bag(torch.tensor([[1, 2]])).detach())
    with pytest.raises(ValueError, match="mode='sum' leaves the ball"):
        look(DiskEmbeddingBag, mode="sum")


def test_max_norm_is_applied_and_not_written(trained, look):
    layer, _ = trained
    before = weights(layer)
    served = look(max_norm=0.5)
    assert (served(torch.arange(ROWS)).norm(dim=1) <= 0.5).all()
    assert torch.equal(weights(layer), before)


def test_dtype_and_device_go_with_the_model(trained, look):
    served = look(dtype=torch.bfloat16)
    model = torch.nn.Sequential(served, torch.nn.Linear(DIM, 1, dtype=torch.bfloat16))
    assert model(torch.tensor([1])).dtype == torch.bfloat16
    model.float()
    assert served(torch.tensor([1])).dtype == torch.float32
    with pytest.raises(ValueError, match="floating"):
        look(dtype=torch.int64)


def test_it_does_not_train(trained, look):
    served = look()
    model = torch.nn.Sequential(served, torch.nn.Linear(DIM, 1))
    assert not served.training
    assert not served(torch.tensor([1])).requires_grad
    model.train()
    with pytest.raises(RuntimeError, match=r"open for reading and gets no gradients: call eval\(\)"):
        model(torch.tensor([1]))
    with torch.no_grad():
        model(torch.tensor([1]))
    served.eval()
    model(torch.tensor([1])).sum().backward()
    assert list(served.parameters()) == []
    with pytest.raises(ValueError, match="no parameter"):
        dsa.DiskSparseAdam(served.parameters())
    with pytest.raises(RuntimeError, match="open for reading: make a DiskEmbedding with resume=True"):
        served.set_rows(torch.tensor([1]), torch.zeros(1, DIM))


def test_what_is_not_there_is_refused(make, trained, look, tmp_path):
    with pytest.raises(StateNotFoundError):
        DiskEmbedding.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(KeyError, match="there is no table 'items': name one of"):
        look(name="items")
    with pytest.raises(RowIndexError, match="'embedding'"):
        look()(torch.tensor([ROWS]))
    make.adam([torch.nn.Parameter(torch.zeros(2, 2))], where="moments")
    with pytest.raises(KeyError, match="holds no weights"):
        DiskEmbedding.open(make.directory("moments"), "param_0")


def test_closed_is_closed(look, trained):
    served = look()
    served.close()
    served.close()
    with pytest.raises(StateClosedError, match=r"the module that reads table 'embedding'.*was closed"):
        served(torch.tensor([1]))
    assert repr(served)


def test_a_replaced_state_is_told(trained, look, make):
    layer, _ = trained
    served = look()
    layer.close()
    with pytest.warns(StateWarning, match="resume=False"):
        make.disk(ROWS, DIM, resume=False)
    with pytest.raises(StateClosedError, match=r"replaced or removed|open it again"):
        served(torch.tensor([1]))


def test_state_dicts_of_the_model_that_trains_fit(trained, look):
    layer, optimizer = trained
    saved = torch.nn.Sequential(layer).state_dict()
    model = torch.nn.Sequential(look())
    model.load_state_dict(saved)
    assert model.state_dict().keys() == saved.keys()
    step(layer, optimizer, [1])
    with pytest.warns(StateWarning, match="is of step 1 and table 'embedding' in .* is at step 2"):
        model.load_state_dict(saved)


def test_state_dicts_of_another_state_do_not(trained, look, make):
    model = torch.nn.Sequential(look())
    other = torch.nn.Sequential(make.disk(ROWS, DIM, where="other"))
    with pytest.raises(RuntimeError, match="belongs to another state"):
        model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})


def test_copies_open_the_directory_anew(trained, look):
    served = look()
    for each in (copy.deepcopy(served), pickle.loads(pickle.dumps(served))):
        assert torch.equal(each(torch.arange(ROWS)), served(torch.arange(ROWS)))
        each.close()
    assert served(torch.tensor([1])).shape == (1, DIM)


class Rows(torch.utils.data.Dataset):
    def __init__(self, served):
        self.served = served

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.served(torch.tensor([index]))[0]


def read(served, queue):
    queue.put(served(torch.arange(ROWS)).tolist())


def test_spawned_processes_read_beside_training(trained, look):
    layer, _ = trained
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=read, args=(look(), queue))
    process.start()
    assert queue.get(timeout=120) == weights(layer).tolist()
    process.join()


def test_workers_of_a_loader_read_beside_training(trained, look):
    layer, _ = trained
    loader = torch.utils.data.DataLoader(Rows(look()), batch_size=4, num_workers=1)
    (batch,) = list(loader)
    assert torch.equal(batch, weights(layer)[:4])


def test_compiled_models_leave_the_graph(trained, look):
    torch._dynamo.reset()
    model = torch.nn.Sequential(look(), torch.nn.Linear(DIM, 1)).eval()
    ids = torch.tensor([1, 2])
    torch.testing.assert_close(torch.compile(model, backend="eager")(ids), model(ids))
    torch._dynamo.reset()
