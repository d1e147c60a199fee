"""Compiled mathematics on arrays: no files, no threads of its own, no state."""

from dsa.kernels.compiling import announce_compilation

announce_compilation()
