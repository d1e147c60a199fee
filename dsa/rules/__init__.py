"""The mathematics of a row: first weights, updates, spaces and their curvature."""
