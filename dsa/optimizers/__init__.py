"""The optimizers, and what happens between a gradient and the rows of a table."""
