"""`dsa bench`: the optimizer beside its alternatives, on the machine at hand, in one process."""
