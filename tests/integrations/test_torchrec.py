"""TorchRec: the collection of bags that is not sharded."""

import torch
from recipes import assert_close, needs, recipe

pytestmark = needs("torchrec")


def test_a_collection_of_bags():
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    def made():
        torch.manual_seed(0)
        return EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=50, feature_names=["a", "b"]),
                EmbeddingBagConfig(name="t2", embedding_dim=3, num_embeddings=20, feature_names=["c"]),
            ]
        )

    def train(collection, optimizer):
        losses = []
        for number in range(30):
            draws = torch.Generator().manual_seed(number)
            lengths = torch.randint(0, 4, (3 * 8,), generator=draws)
            values = torch.randint(0, 20, (int(lengths.sum()),), generator=draws)
            features = KeyedJaggedTensor(keys=["a", "b", "c"], values=values, lengths=lengths)
            optimizer.zero_grad()
            loss = (collection(features).values() - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    own, collection = made(), made()
    for bag in own.embedding_bags.values():
        bag.sparse = True
    optimizer = recipe("torchrec")["on_disk"](collection)
    expected = train(own, torch.optim.SparseAdam(own.parameters(), lr=0.05))
    assert_close(train(collection, optimizer), expected)
    optimizer.close()
