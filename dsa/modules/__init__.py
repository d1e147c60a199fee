"""Layers for models whose weights are on disk."""
