"""Compiled mathematics on arrays: no files, no threads of its own, no state."""
