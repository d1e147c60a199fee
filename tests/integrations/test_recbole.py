"""RecBole: its trainer, whose optimizer is built by one method; sampled evaluation; its own checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import assert_close, needs, recipe, weights

import dsa

pytestmark = needs("recbole")
USERS, ITEMS = 60, 40


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Makes the library's configuration and data: users that like items of their own parity."""
    for name, now in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        monkeypatch.setattr(np, name, now, raising=False)  # release 1.2.1 was made for numpy 1
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation

    load = torch.load
    # Its checkpoints hold objects of its own, which torch 2.6 and newer no longer load by default.
    monkeypatch.setattr(
        torch, "load", lambda *given, **named: load(*given, **{"weights_only": False, **named})
    )
    folder = Path("data/small")
    folder.mkdir(parents=True)
    draws = torch.Generator().manual_seed(1)
    user = torch.randint(0, USERS, (900,), generator=draws)
    item = torch.randint(0, ITEMS // 2, (900,), generator=draws) * 2 + user % 2
    rows = "".join(
        f"{a}\t{b}\t{n}\n" for n, (a, b) in enumerate(zip(user.tolist(), item.tolist(), strict=True))
    )
    (folder / "small.inter").write_text("user_id:token\titem_id:token\ttimestamp:float\n" + rows)
    config = Config(
        model="BPR",
        dataset="small",
        config_dict={
            "data_path": "data",
            "use_gpu": False,
            "embedding_size": 8,
            "train_batch_size": 64,
            "learning_rate": 0.02,
            "eval_args": {
                "mode": "uni20",
                "order": "RO",
                "split": {"RS": [0.8, 0.1, 0.1]},
                "group_by": "user",
            },
            "metrics": ["MRR"],
            "valid_metric": "MRR@10",
            "checkpoint_dir": "files",
            "show_progress": False,
        },
    )
    monkeypatch.setattr("sys.argv", ["recbole"])

    def made():
        seed(3)
        dataset = create_dataset(config)
        return config, dataset, data_preparation(config, dataset)  # loaders draw from generators of their own

    return made


def model_of(config, dataset, table):
    """The library's BPR, whose items are scored by a dense layer, with the tables that `table` makes."""
    from recbole.model.general_recommender import BPR

    class Scored(BPR):
        def __init__(self, config, dataset):
            super().__init__(config, dataset)
            self.scale = torch.nn.Linear(8, 8)

        def get_user_embedding(self, user):
            return self.scale(self.user_embedding(user))

    torch.manual_seed(5)
    model = Scored(config, dataset)
    model.user_embedding = table(model.user_embedding, "users")
    model.item_embedding = table(model.item_embedding, "items")
    return model


def on_disk(layer, name, resume=None):
    return dsa.DiskEmbedding.from_pretrained(
        layer, freeze=False, state_dir="tables", name=name, resume=resume
    )


def in_memory(layer, name):
    return torch.nn.Embedding.from_pretrained(layer.weight.data, freeze=False, sparse=True)


def seed(number):
    from recbole.utils import init_seed

    init_seed(number, True)


def losses_of(trainer, data, epochs):
    seed(9)
    trainer.epochs = epochs
    trainer.fit(data, saved=False, verbose=False, show_progress=False)
    return [trainer.train_loss_dict[epoch] for epoch in sorted(trainer.train_loss_dict)]


def test_the_loss_is_that_in_memory(parts):
    from recbole.trainer import Trainer

    class Own(Trainer):
        def _build_optimizer(self, **options):
            tables, dense = dsa.split_parameters(self.model)
            made = torch.optim.SparseAdam(tables, lr=0.02), torch.optim.Adam(dense, lr=0.02)

            class Both(torch.optim.Optimizer):
                def step(self, closure=None):
                    for half in made:
                        half.step()

            return Both([group for half in made for group in half.param_groups], {})

    class_on_disk = recipe("recbole", "recbole.trainer")["OnDisk"]
    losses, scores = [], []
    for kind, table in ((Own, in_memory), (class_on_disk, on_disk)):
        config, dataset, (trained, _, test) = parts()
        trainer = kind(config, model_of(config, dataset, table))
        losses.append(losses_of(trainer, trained, 3))
        scores.append(trainer.evaluate(test, load_best_model=False)["mrr@10"])
    assert_close(losses[1], losses[0])
    assert scores[1] == pytest.approx(scores[0], rel=1e-3)
    trainer.optimizer.close()


def test_its_own_checkpoints_are_gone_back_to(parts):
    config, dataset, (trained, _, _) = parts()
    trainer = recipe("recbole", "recbole.trainer")["OnDisk"](config, model_of(config, dataset, on_disk))
    losses_of(trainer, trained, 1)
    trainer._save_checkpoint(0, verbose=False)
    before = trainer.optimizer.global_step, weights(trainer.model.item_embedding)
    losses_of(trainer, trained, 2)
    assert trainer.optimizer.global_step > before[0]
    trainer.resume_checkpoint(trainer.saved_model_file)
    assert trainer.optimizer.global_step == before[0]
    assert torch.equal(weights(trainer.model.item_embedding), before[1])
    trainer.optimizer.close()
