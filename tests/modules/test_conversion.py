"""`convert_` and `materialize_`: whole models to disk and back."""

import pytest
import torch
from layers import contents, step, weights

import dsa
from dsa import DiskEmbedding, DiskEmbeddingBag, init
from dsa.errors import StateExistsError, StateMismatchError

ROWS, DIM = 40, 3


class Model(torch.nn.Module):
    """Embeddings of all kinds, one of them small."""

    def __init__(self, dtype=None, **options):
        super().__init__()
        self.items = torch.nn.Embedding(ROWS, DIM, padding_idx=2, dtype=dtype)
        self.users = torch.nn.ModuleDict({"old": torch.nn.Embedding(ROWS, DIM, max_norm=1.0, norm_type=1.0)})
        self.bags = torch.nn.EmbeddingBag(
            ROWS, DIM, mode="sum", padding_idx=3, include_last_offset=True, dtype=dtype
        )
        self.small = torch.nn.Embedding(5, DIM)
        self.head = torch.nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.items(ids) + self.users["old"](ids) + self.small(ids % 5))


@pytest.fixture
def convert(make):
    """`convert_` into the test's directory; what it opens is closed in the end."""

    def converted(model, where="state", min_rows=10, **options):
        result = dsa.convert_(model, make.directory(where), min_rows, **options)
        for module in model.modules():
            if isinstance(module, DiskEmbedding | DiskEmbeddingBag):
                make.callback(module.close)
        return result

    return converted


def test_every_large_embedding_is_replaced_with_its_weights_and_options(convert, make):
    torch.manual_seed(0)
    model = Model().eval()
    model.bags.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small, head = model.small, model.head
    model.items.weight.requires_grad_(False)
    result = convert(model)
    assert [type(each) for each in (model.items, model.users["old"], model.bags)] == [
        DiskEmbedding,
        DiskEmbedding,
        DiskEmbeddingBag,
    ]
    assert list(dict(model.named_children())) == ["items", "users", "bags", "small", "head"]
    assert (model.small, model.head) == (small, head)
    assert (model.items.padding_idx, model.users["old"].max_norm, model.users["old"].norm_type) == (2, 1.0, 1)
    assert (model.bags.mode, model.bags.padding_idx, model.bags.include_last_offset) == ("sum", 3, True)
    assert [model.items.training, model.bags.training] == [False, True]
    assert [model.items.weight.requires_grad, model.bags.weight.requires_grad] == [False, True]
    assert (model.items.sparse, model.items.scale_grad_by_freq) == (True, False)
    for name in ("items", "users.old", "bags"):
        rows = model.get_submodule(name).weight[torch.arange(ROWS)].detach()
        torch.testing.assert_close(rows, before[f"{name}.weight"], rtol=0, atol=0)
    assert [each.name for each in result.tables] == ["items", "users.old", "bags"]
    assert [(each.rows, each.dim, each.memory_bytes) for each in result.tables] == [(ROWS, DIM, 480)] * 3
    for each in result.tables:
        assert each.disk_bytes == dsa.estimate(ROWS, DIM).file
    text = str(result)
    assert text.splitlines()[0].split() == ["table", "rows", "dim", "in", "memory", "on", "disk"]
    assert "users.old" in text
    assert result.state_dir == str(make.directory())


def test_it_trains_as_the_model_in_memory_does(convert, make):
    torch.manual_seed(0)
    model, reference = Model(), Model()
    reference.load_state_dict(model.state_dict())
    convert(model)
    optimizers = [
        make.adam([model.items.weight], bias_correction="parameter"),
        torch.optim.SparseAdam([reference.items.weight], lr=0.1),
    ]
    reference.items.sparse = True
    for ids in torch.randint(0, ROWS, (4, 8)):
        losses = []
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(ids).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back_is_the_same_model(convert, dtype):
    torch.manual_seed(0)
    model = Model(dtype)
    model.items.weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text = repr(model)
    convert(model)
    dsa.materialize_(model)
    assert repr(model) == text
    assert model.state_dict().keys() == before.keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert not model.items.weight.requires_grad
    assert isinstance(model.items.weight, torch.nn.Parameter)
    assert model.bags(torch.tensor([1, 2]), torch.tensor([0, 2])).shape == (1, DIM)


def test_bfloat16_rows_on_disk_are_those_of_a_bfloat16_model(convert, make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(ROWS, 4, dtype=torch.bfloat16))
    before = model[0].weight.detach().clone()
    (converted,) = convert(model, state_dtype={"w": "bfloat16"}).tables
    assert model[0].weight.table.backend.schema.dtype["w"].base.itemsize == 2
    model[0].set_rows(torch.tensor([1]), before[[1]])
    dsa.materialize_(model)
    assert torch.equal(model[0].weight.detach(), before)
    assert converted.memory_bytes == ROWS * 4 * 2


def test_materialize_gives_what_was_trained_and_lets_the_directory_go(convert, make):
    model = Model()
    convert(model)
    optimizer = make.adam(model.items)
    step(model.items, optimizer, [1, 7])
    trained, directory = weights(model.items), model.items.weight.state
    dsa.materialize_(model, sparse=True)
    assert torch.equal(model.items.weight.detach(), trained)
    assert model.items.sparse
    assert not directory.is_open
    again = Model()
    convert(again, resume=True)
    assert torch.equal(weights(again.items), trained)


def test_materialize_leaves_a_directory_open_that_others_use(convert, make):
    other = make.disk(4, 2, name="other")
    model = Model()
    convert(model)
    dsa.materialize_(model)
    assert other(torch.tensor([1])).shape == (1, 2)


def test_on_the_meta_device_nothing_is_allocated_and_rows_are_drawn_by_the_modules_rule(convert):
    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {
                "table": torch.nn.Embedding(10**9, 64, padding_idx=5, dtype=torch.bfloat16),
                "bags": torch.nn.EmbeddingBag(10**9, 64),
                "head": torch.nn.Linear(64, 1),
            }
        )
        result = convert(model, allocate="sparse")
    assert [each.memory_bytes for each in result.tables] == [128 * 10**9, 256 * 10**9]
    rows = model["table"](torch.arange(10**9 - 500, 10**9)).detach().float()
    assert (model["table"].weight.dtype, model["table"].weight.device.type) == (torch.bfloat16, "cpu")
    assert abs(rows.mean()) < 0.05
    assert abs(rows.std() - 1.0) < 0.05
    assert not model["table"](torch.tensor([5])).any()
    assert not torch.equal(rows, model["bags"].weight[10**9 - 500 :].detach())
    assert model["head"].weight.is_meta
    model.to_empty(device="cpu")
    assert model["head"](model["bags"](torch.tensor([[1, 2]]))).shape == (1, 1)


def test_first_weights_of_ones_own(convert):
    with torch.device("meta"):
        model = Model()
    asked = []

    def draw(name, rows, dim):
        asked.append((name, rows, dim))
        return init.Uniform(rows, dim, 0.25, 0.25)

    convert(model, init=draw)
    assert asked == [(name, ROWS, DIM) for name in ("items", "users.old", "bags")]
    assert model.bags.weight[1].tolist() == [0.25] * DIM


@pytest.mark.filterwarnings("default:Full backward hook is firing:UserWarning")  # of any embedding
def test_hooks_and_what_was_written_onto_a_module_are_kept(convert):
    model = Model()
    seen = []
    handle = model.items.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model.items.register_full_backward_pre_hook(lambda module, gradient: seen.append("backward"))
    model.items.weight.register_hook(lambda grad: seen.append(grad.is_sparse))
    model.items.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad._nnz()))
    model.items.note = "of the user"
    convert(model)
    model.items(torch.tensor([1])).sum().backward()
    assert seen == [DiskEmbedding, "backward", True, 1]
    assert model.items.note == "of the user"
    handle.remove()
    seen.clear()
    model.items(torch.tensor([1]))
    assert seen == []


def test_a_module_that_is_in_a_model_twice_stays_one(convert):
    shared = torch.nn.Embedding(ROWS, DIM)
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(shared)})
    result = convert(model)
    assert model["a"] is model["b"][0]
    assert [each.modules for each in result.tables] == [("a", "b.0")]
    assert "a is also the weight of b.0" in str(result)
    dsa.materialize_(model)
    assert model["a"] is model["b"][0]


def test_embeddings_with_one_weight_share_one_table(convert, make):
    a, b = torch.nn.Embedding(ROWS, DIM), torch.nn.EmbeddingBag(ROWS, DIM, mode="mean")
    b.weight = a.weight
    model = torch.nn.ModuleDict({"a": a, "b": b})
    values = a.weight.detach().clone()
    result = convert(model)
    assert [each.name for each in result.tables] == ["a"]
    assert model["a"].weight is model["b"].weight
    assert list(model.parameters()) == [model["a"].weight]
    optimizer = make.adam(model)
    (model["a"](torch.tensor([1])).sum() + model["b"](torch.tensor([[1]])).sum()).backward()
    assert model["a"].weight.grad.to_dense()[1].tolist() == [2.0] * DIM
    optimizer.step()
    dsa.materialize_(model)
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["a"].weight[2:].detach(), values[2:])


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2.0


class Renamed(torch.nn.Embedding):
    """A subclass that looks rows up as torch does."""


def tied(model):
    model.decoder = torch.nn.Linear(DIM, ROWS, bias=False)
    model.decoder.weight = model.bags.weight


def tied_by_memory(model):
    model.decoder = torch.nn.Linear(DIM, ROWS, bias=False)
    model.decoder.weight = torch.nn.Parameter(model.bags.weight.detach())


def parametrized(model):
    torch.nn.utils.parametrizations.weight_norm(model.bags)


def patched(model):
    model.bags.forward = lambda ids: ids


def not_finite(model):
    with torch.no_grad():
        model.bags.weight[7, 1] = torch.nan


def with_gradient(model):
    model.bags(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()


def scaled(model):
    model.bags = Scaled(ROWS, DIM)


def counted(model):
    model.bags.scale_grad_by_freq = True


REFUSED = {
    tied: r"the weight of 'bags' is tied to 'decoder.weight' of a Linear.*pass skip=\['bags'\]",
    tied_by_memory: "the weight of 'bags' is tied to 'decoder.weight' of a Linear",
    parametrized: "'bags' .*(forward of its own|more than its weight)",
    patched: "'bags' is a EmbeddingBag with a forward of its own",
    scaled: r"'bags' is a Scaled with a forward of its own, which would be lost: .*skip=\['bags'\]",
    counted: "'bags' has scale_grad_by_freq=True",
    not_finite: "row 7 of the array holds nan",
    with_gradient: "'bags' has a gradient",
    torch.nn.Module.double: "is float64",
}


@pytest.mark.parametrize("spoil", REFUSED)
def test_nothing_is_replaced_when_one_can_not_be(convert, make, spoil):
    model = Model()
    spoil(model)
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=REFUSED[spoil]):
        convert(model)
    assert dict(model.named_modules()) == before
    assert not make.directory().exists() or set(contents(make.directory())) == set()
    if spoil not in (not_finite, torch.nn.Module.double):
        convert(model, skip=["bags"])
        assert isinstance(model.items, DiskEmbedding)
        assert model.bags is before["bags"]


def test_a_subclass_with_torchs_forward_is_replaced(convert):
    model = torch.nn.Sequential(Renamed(ROWS, DIM))
    convert(model)
    assert isinstance(model[0], DiskEmbedding)


def test_no_place_is_refused(make):
    with pytest.raises(ValueError, match=r"the model itself is the Embedding.*DiskEmbedding.from_pretrained"):
        dsa.convert_(torch.nn.Embedding(ROWS, DIM), make.directory(), 10)
    with pytest.raises(ValueError, match="no embedding of at least min_rows=100000 rows, its largest has 40"):
        dsa.convert_(Model(), make.directory())
    with pytest.raises(ValueError, match=r"skip names \['itms'\]"):
        dsa.convert_(Model(), make.directory(), 10, skip=["itms"])
    with pytest.raises(TypeError, match="skip='items' is a string"):
        dsa.convert_(Model(), make.directory(), 10, skip="items")
    with pytest.raises(ValueError, match="init gives 4 x 3 for 'items', which is 40 x 3"):
        dsa.convert_(Model(), make.directory(), 10, init=lambda *_: init.Zeros(4, 3))
    with pytest.raises(ValueError, match="no embedding on disk"):
        dsa.materialize_(Model())
    with pytest.raises(ValueError, match="the model itself is the DiskEmbedding"):
        dsa.materialize_(make.disk(4, 2))
    with pytest.raises(ValueError, match="takes means on the ball"):
        dsa.materialize_(torch.nn.Sequential(make.bag(4, 2, k=1.0, name="bag")))


def test_it_goes_on_where_it_was(convert, make):
    model = Model()
    convert(model)
    optimizer = make.adam(model.items)
    step(model.items, optimizer, [1, 7])
    trained = {name: weights(model.get_submodule(name)) for name in ("items", "users.old")}
    optimizer.close()
    fresh = Model()
    with pytest.raises(StateExistsError, match="resume=True"):
        convert(fresh)
    assert isinstance(fresh.items, torch.nn.Embedding)
    with torch.device("meta"):
        fresh = Model()
    result = convert(fresh, resume=True)
    assert [each.name for each in result.tables] == ["items", "users.old", "bags"]
    for name, values in trained.items():
        assert torch.equal(weights(fresh.get_submodule(name)), values)
    assert make.adam(fresh.items, resume=True).global_step == 1


def test_another_shape_is_no_model_to_go_on_with(convert):
    model = Model()
    convert(model)
    model.items.close()
    other = Model()
    other.bags = torch.nn.EmbeddingBag(ROWS + 1, DIM)
    with pytest.raises(StateMismatchError, match="40 x 3 but 41 x 3"):
        convert(other, resume=True)
    assert isinstance(other.items, torch.nn.Embedding)
    convert(Model(), resume=True)


def test_two_models_want_different_directories(convert):
    first, second = Model(), Model()
    convert(first)
    with pytest.raises(ValueError, match="is taken"):
        convert(second)
    assert isinstance(second.items, torch.nn.Embedding)
    assert first.items(torch.tensor([1])).shape == (1, DIM)


def test_an_interrupt_leaves_the_model_as_it_was(convert, monkeypatch, make):
    model = Model()
    before = dict(model.named_modules())

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsa.modules.conversion.carry_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(model)
    assert dict(model.named_modules()) == before
    monkeypatch.undo()
    convert(model, resume=True)


def test_the_update_rule_and_the_storage_are_passed_on(convert):
    model = Model()
    convert(model, state="rowwise_adagrad", durability="none", backend="zarr")
    assert model.items.weight.table.rule.name == "row_wise_adagrad"
    assert model.items.weight.state.storage.durability == "none"
    assert torch.isfinite(model.bags.weight[[1]]).all()


def test_d26_metadata_of_a_converted_model_is_what_it_was(convert):
    model = Model()
    told = [(name, each.shape, each.dtype, each.device) for name, each in model.named_parameters()]
    convert(model)
    assert [(name, each.shape, each.dtype, each.device) for name, each in model.named_parameters()] == told
