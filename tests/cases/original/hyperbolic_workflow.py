"""The original project's third example: a table on the Poincaré ball, a new curvature, a checkpoint."""

import torch

from dsa.optimizers.sparse_riemannian_adam import DiskSparseRiemannianAdam

# The document takes these from its reader. Rows this short keep their length in the ball.
num_entities = 100_000
initial_weights = torch.randn(num_entities, 64) * 0.01
batches = [(torch.randint(0, num_entities, (1024,)), torch.randn(1024, 64)) for _ in range(20)]

optimizer = DiskSparseRiemannianAdam(
    params={"hyperbolic_nodes": initial_weights},
    lr=1e-3,
    k=1.0,
    disk_dir="./hyperbolic_cache",
    resume=False,
    weight_decay=0.0,
    weight_decay_mode="l2",
)

for indices, gradients in batches:
    optimizer.step(updates={"hyperbolic_nodes": (indices, gradients)})

emb = optimizer.read_rows(indices, name="hyperbolic_nodes")

optimizer.set_curvature(0.5)

optimizer.export_checkpoint("./checkpoints/run-001")
optimizer.shutdown()
