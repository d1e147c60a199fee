"""The program of the post that announced the original project: a layer in memory, its moments on disk."""

import torch

from dsa import DiskSparseAdam

num_embeddings = 10_000_000
embedding_dim = 128
embedding = torch.nn.EmbeddingBag(num_embeddings, embedding_dim, sparse=True)

optimizer = DiskSparseAdam(
    embedding.parameters(),
    lr=0.001,
    state_dir="./opt_state_cache",
)

# The post takes these two from its reader.
batches = 20
dataloader = [torch.randint(0, num_embeddings, (256, 8)) for _ in range(batches)]


def compute_loss(output):
    return output.square().mean()


for batch_indices in dataloader:
    optimizer.zero_grad()
    output = embedding(batch_indices)
    loss = compute_loss(output)
    loss.backward()
    optimizer.step()
