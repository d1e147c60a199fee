"""After `close` everything says closed, but for what its docstring excepts; a call that waited for it too."""

import threading

import numpy as np
import pytest
import torch

from dsa import DiskEmbedding, DiskEmbeddingBag, DiskSparseAdam, DiskSparseRiemannianAdam, init
from dsa.errors import StateClosedError

ROWS, DIM = 8, 2
BATCH = {"a": ([1], np.ones((1, DIM), np.float32))}


def explicit(path):
    return DiskSparseRiemannianAdam({"a": init.Zeros(ROWS, DIM)}, k=0.0, disk_dir=path)


def disk(path):
    return DiskEmbedding(ROWS, DIM, max_norm=1.0, state_dir=path)


def keyed(path):
    return DiskEmbedding(None, DIM, state_dir=path)


def bag(path):
    return DiskEmbeddingBag(ROWS, DIM, state_dir=path)


def sparse(path):
    parameter = torch.nn.Parameter(torch.zeros(ROWS, DIM))
    optimizer = DiskSparseAdam([parameter], state_dir=path)
    parameter.grad = torch.sparse_coo_tensor([[1]], [[1.0] * DIM], (ROWS, DIM), check_invariants=True)
    return optimizer


def without_gradients(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    optimizer.step()


def with_closure(optimizer):
    optimizer.step(lambda: pytest.fail("the closure of a closed optimizer was called"))


def torchs_state(optimizer):
    """The state dict of a SparseAdam over the same parameters."""
    moments = {"step": 1, "exp_avg": torch.zeros(ROWS, DIM), "exp_avg_sq": torch.zeros(ROWS, DIM)}
    return {"state": {0: moments}, "param_groups": optimizer.state_dict()["param_groups"]}


PORTABLE = {
    "export_checkpoint": lambda it: it.export_checkpoint("nowhere"),
    "save_checkpoint": lambda it: it.save_checkpoint("nowhere"),
    "export_weights": lambda it: it.export_weights("nowhere"),
    "import_checkpoint": lambda it: it.import_checkpoint("nowhere"),
    "load_checkpoint": lambda it: it.load_checkpoint("nowhere"),
}
MODULE = {
    **PORTABLE,
    "grow": lambda it: it.grow(2 * ROWS),
    "flush": lambda it: it.flush(),
    "set_rows": lambda it: it.set_rows(torch.tensor([1]), torch.zeros(1, DIM)),
    "set_rows of none": lambda it: it.set_rows(torch.tensor([], dtype=torch.int64), torch.zeros(0, DIM)),
    "load_state_dict": lambda it: it.load_state_dict(it.state_dict()),
    "load_state_dict of weights": lambda it: it.load_state_dict({"weight": torch.zeros(ROWS, DIM)}),
}
CALLS = {
    explicit: {
        **PORTABLE,
        "step": lambda it: it.step(BATCH),
        "step of nothing": lambda it: it.step({}),
        "read_rows": lambda it: it.read_rows([1]),
        "read_rows of none": lambda it: it.read_rows([]),
        "prefetch": lambda it: it.prefetch([1]),
        "set_curvature": lambda it: it.set_curvature(1.0),
        "reproject_all": lambda it: it.reproject_all(),
        "grow": lambda it: it.grow("table", 2 * ROWS),
        "ids": lambda it: it.ids(),
        "delete": lambda it: it.delete([1]),
        "flush": lambda it: it.flush(),
    },
    sparse: {
        **PORTABLE,
        "step": lambda it: it.step(),
        "step without gradients": without_gradients,
        "step with a closure": with_closure,
        "prefetch": lambda it: it.prefetch([1]),
        "grow": lambda it: it.grow(it.param_names[0], 2 * ROWS),
        "flush": lambda it: it.flush(),
        "add_param_group": lambda it: it.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3, 2))]}),
        "load_state_dict": lambda it: it.load_state_dict(it.state_dict()),
        "load_state_dict of SparseAdam": lambda it: it.load_state_dict(torchs_state(it)),
    },
    disk: {
        **MODULE,
        "forward": lambda it: it(torch.tensor([1])),
        "forward of none": lambda it: it(torch.zeros(0, dtype=torch.int64)),
    },
    keyed: {
        "forward": lambda it: it(torch.tensor([1])),
        "ids": lambda it: it.ids(),
        "insert": lambda it: it.insert(torch.tensor([1])),
        "delete": lambda it: it.delete(torch.tensor([1])),
    },
    bag: {**MODULE, "forward": lambda it: it(torch.tensor([[1]]))},
}
# What answers questions still, as the docstrings of `close` say, and what has nothing to do with the state.
ALLOWED = {
    explicit: {
        "close", "shutdown", "stats", "global_step", "zero_grad", "state_dict", "load_state_dict",
        "add_param_group", "convention",
    },
    sparse: {
        "close", "shutdown", "stats", "global_step", "param_names", "state_dict", "zero_grad", "convention",
    },
    keyed: {
        *MODULE, "k", "close", "extra_repr", "from_pretrained", "open", "reset_parameters", "sparse",
        "scale_grad_by_freq", "num_embeddings",
    },
    disk: {
        "ids", "insert", "delete", "num_embeddings",
        "close", "k", "extra_repr", "from_pretrained", "open", "reset_parameters", "sparse",
        "scale_grad_by_freq",
    },
    bag: {
        "ids", "insert", "delete", "num_embeddings",
        "close", "k", "extra_repr", "from_pretrained", "open", "reset_parameters", "sparse",
        "scale_grad_by_freq",
    },
}  # fmt: skip
EVERY = [(make, name) for make, calls in CALLS.items() for name in calls]


@pytest.mark.parametrize(("make", "name"), EVERY, ids=lambda value: getattr(value, "__name__", value))
def test_closed_is_closed(tmp_path, monkeypatch, make, name):
    monkeypatch.chdir(tmp_path)
    it = make(tmp_path / "state")
    it.close()
    files = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(StateClosedError, match=r"was closed: .*resume=True"):
        CALLS[make][name](it)
    it.close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == files


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_every_public_method_is_in_one_of_the_tables(tmp_path, make):
    it = make(tmp_path / "state")
    own = {
        name
        for kind in type(it).__mro__
        if kind.__module__.startswith("dsa.")
        for name in vars(kind)
        if not name.startswith("_")
    }
    assert own <= {*CALLS[make], *ALLOWED[make], "weight"}
    it.close()
    assert repr(it)
    if make is not explicit:
        assert it.state_dict()
    if make in (explicit, sparse):
        assert it.global_step == 0
        assert it.stats()["steps"] == 0
        it.zero_grad()


def state_of(it):
    return it.weight.state if isinstance(it, torch.nn.Module) else it._portable_state()


# Those that take the state's lock in this package's façades; the others are of the state's own tests.
WAITING = [
    (explicit, name)
    for name in ("step", "step of nothing", "read_rows", "set_curvature", "reproject_all", "flush")
]
WAITING += [(sparse, name) for name in ("step", "flush", "load_state_dict", "load_state_dict of SparseAdam")]
WAITING += [(disk, "forward"), (disk, "flush"), (bag, "forward"), (bag, "flush")]


class Gate:
    """A lock that tells when somebody wants it who has to wait."""

    def __init__(self, lock):
        self.lock = lock
        self.wanted = threading.Event()

    def __enter__(self):
        if not self.lock.acquire(blocking=False):
            self.wanted.set()
            self.lock.acquire()

    def __exit__(self, *raised):
        self.lock.release()


@pytest.mark.parametrize(("make", "name"), WAITING, ids=lambda value: getattr(value, "__name__", value))
def test_a_call_that_waits_for_close_says_closed(tmp_path, make, name):
    it = make(tmp_path / "state")
    state = state_of(it)
    gate = state.exclusive = Gate(state.exclusive)
    outcome = []

    def call():
        try:
            CALLS[make][name](it)
        except BaseException as error:
            outcome.append(error)

    with gate:
        waiting = threading.Thread(target=call)
        waiting.start()
        assert gate.wanted.wait(60)
        it.close()
    waiting.join()
    assert [type(error) for error in outcome] == [StateClosedError], outcome
