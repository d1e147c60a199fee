"""The original project's second example: the same in a cloud notebook's working directory."""

import os
import shutil

import torch

from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

KAGGLE_CACHE_DIR = "/kaggle/working/dsa_optimizer_cache"
os.makedirs(KAGGLE_CACHE_DIR, exist_ok=True)

num_entities = 1_000_000
dim = 128
batch_size = 2048

embeddings = torch.randn(num_entities, dim) * 0.01

optimizer = DiskSparseRiemannianAdam(
    params={"entity_emb": embeddings},
    lr=0.001,
    k=0.0,
    disk_dir=KAGGLE_CACHE_DIR,
    max_queue_size=300,
)

for epoch in range(1, 11):
    indices = torch.randint(0, num_entities, (batch_size,))

    vec = optimizer.read_rows(indices).to(device).requires_grad_(True)

    loss = (vec**2).sum()
    loss.backward()

    optimizer.step(updates={"entity_emb": (indices, vec.grad.cpu())})
    if epoch % 5 == 0:
        print(f"epoch {epoch} loss {loss.item():.6f}")

optimizer.shutdown()

if os.path.exists(KAGGLE_CACHE_DIR):
    shutil.rmtree(KAGGLE_CACHE_DIR)
    print("the directory is gone")
