"""The commands of `dsa`, each a thin layer over one function of the package.

A module has `DETAILS`, more words for its help, `add_arguments` and `run`. What takes time to import is
imported in `run`.
"""
