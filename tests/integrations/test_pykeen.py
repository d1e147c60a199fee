"""PyKEEN: sLCWA in its loop, which builds the optimizer again; both evaluators; its own checkpoints."""

import pytest
import torch
from recipes import assert_close, needs, recipe, weights

import dsa

pytestmark = needs("pykeen")
ENTITIES, RELATIONS, DIM = 40, 3, 8


def triples():
    from pykeen.triples import TriplesFactory

    draws = torch.Generator().manual_seed(1)
    head = torch.randint(0, ENTITIES, (300,), generator=draws)
    relation = torch.randint(0, RELATIONS, (300,), generator=draws)
    mapped = torch.stack([head, relation, (head + relation + 1) % ENTITIES], dim=1).unique(dim=0)
    names = {f"e{each}": each for each in range(ENTITIES)}
    return TriplesFactory(mapped, names, {f"r{each}": each for each in range(RELATIONS)})


def start():
    return torch.randn(ENTITIES, DIM, generator=torch.Generator().manual_seed(2))


def model_with(representation, options):
    from pykeen.models import ERModel

    return ERModel(
        triples_factory=triples(),
        interaction="transe",
        interaction_kwargs={"p": 2},
        entity_representations=representation,
        entity_representations_kwargs={"shape": (DIM,), **options},
        relation_representations_kwargs={"shape": (DIM,), "initializer": "xavier_uniform_"},
        random_seed=7,
        loss="margin_ranking",
    )


def halves():
    return {
        "dense": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "sparse": lambda parameters: dsa.DiskSparseAdam(parameters, lr=0.05, bias_correction="parameter"),
    }


def on_disk(resume=None):
    parts = recipe("pykeen", "pykeen.nn", **halves())
    table = dsa.DiskEmbedding(ENTITIES, DIM, init=start(), state_dir="tables", resume=resume)
    return table, model_with(parts["OnDisk"], {"table": table}), parts["Optimizer"]


def in_memory():
    """The same model with a torch layer that has sparse gradients, and an optimizer of both halves."""
    layer = torch.nn.Embedding.from_pretrained(start(), freeze=False, sparse=True)
    model = model_with(recipe("pykeen", "pykeen.nn", **halves())["OnDisk"], {"table": layer})

    class Optimizer(torch.optim.Optimizer):
        def __init__(self, params, **group):
            members = list(params)
            tables = [each for each in members if each is layer.weight]
            dense = [each for each in members if each is not layer.weight]
            self.halves = [
                torch.optim.SparseAdam(tables, lr=0.05),
                torch.optim.AdamW(dense, lr=0.01),
            ]
            super().__init__([each for half in self.halves for each in half.param_groups], {})

        def step(self, closure=None):
            for half in self.halves:
                half.step()

    return layer, model, Optimizer


def train(model, optimizer, epochs, **options):
    from pykeen.training import SLCWATrainingLoop

    torch.manual_seed(11)
    loop = SLCWATrainingLoop(
        model=model, triples_factory=triples(), optimizer=optimizer(params=model.get_grad_params())
    )
    losses = loop.train(
        triples(), num_epochs=epochs, batch_size=64, use_tqdm=False, clear_optimizer=False, **options
    )
    return loop, losses


def ranks(model):
    """The mean reciprocal rank among all entities, and among some drawn ones."""
    from pykeen.evaluation import RankBasedEvaluator, SampledRankBasedEvaluator
    from pykeen.utils import set_random_seed

    factory = triples()
    set_random_seed(3)
    evaluators = [
        RankBasedEvaluator(),
        SampledRankBasedEvaluator(evaluation_factory=factory, num_negatives=10),
    ]
    return [
        each.evaluate(
            model,
            factory.mapped_triples,
            additional_filter_triples=[factory.mapped_triples],
            use_tqdm=False,
            batch_size=16,
        ).get_metric("both.realistic.inverse_harmonic_mean_rank")
        for each in evaluators
    ]


def test_the_loss_is_that_in_memory():
    _, own, plain = in_memory()
    _, model, optimizer = on_disk()
    expected = train(own, plain, 6)[1]
    loop, losses = train(model, optimizer, 6)
    assert_close(losses, expected)
    assert losses[-1] < losses[0]
    assert ranks(model) == pytest.approx(ranks(own), rel=1e-3)
    loop.optimizer.close()


def test_going_back_to_a_checkpoint():
    table, model, optimizer = on_disk()
    loop, _ = train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": loop.optimizer.state_dict()}, "saved.pt")
    before = loop.optimizer.global_step, weights(table)
    loop.train(
        triples(), num_epochs=4, batch_size=64, use_tqdm=False, clear_optimizer=False, continue_training=True
    )
    assert loop.optimizer.global_step == 2 * before[0]
    saved = torch.load("saved.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    loop.optimizer.load_state_dict(saved["optimizer"])
    assert loop.optimizer.global_step == before[0]
    assert torch.equal(weights(table), before[1])
    loop.optimizer.close()


def test_its_own_checkpoints_are_gone_on_from(tmp_path, monkeypatch):
    found = {}
    for name, runs in {"whole": (4,), "interrupted": (2, 4)}.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        options = {
            "checkpoint_directory": tmp_path / name,
            "checkpoint_name": "loop.pt",
            "checkpoint_frequency": 0,
        }
        for number, epochs in enumerate(runs):
            table, model, optimizer = on_disk(resume=number > 0)
            loop, losses = train(model, optimizer, epochs, **options)
            found[name] = losses, weights(table)
            loop.optimizer.close()
    assert found["interrupted"][0] == found["whole"][0]
    assert torch.equal(found["interrupted"][1], found["whole"][1])
