"""Compiled mathematics on arrays: no files, and no state but threads that wait for slices."""

from dsa.kernels.compiling import announce_compilation

announce_compilation()
