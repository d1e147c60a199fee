"""The original project's first example: a table in a directory, explicit rows and gradients."""

import os
import shutil

import torch

from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cache_dir = "./dsa_local_cache"

if os.path.exists(cache_dir):
    shutil.rmtree(cache_dir)

num_entities = 100_000
dim = 64
batch_size = 1024

initial_weights = torch.randn(num_entities, dim) * 0.1
params = {"entity_emb": initial_weights}

optimizer = DiskSparseRiemannianAdam(
    params=params,
    lr=0.01,
    k=0.0,
    disk_dir=cache_dir,
)

target_embeddings = torch.randn(num_entities, dim) * 0.1

for epoch in range(1, 101):
    indices = torch.randint(0, num_entities, (batch_size,))

    vec = optimizer.read_rows(indices).to(device).requires_grad_(True)

    target_vec = target_embeddings[indices].to(device)
    loss = torch.mean((vec - target_vec) ** 2)

    loss.backward()

    optimizer.step(updates={"entity_emb": (indices, vec.grad.cpu())})
    if epoch % 25 == 0:
        print(f"epoch {epoch} loss {loss.item():.6f}")

optimizer.shutdown()

shutil.rmtree(cache_dir)
