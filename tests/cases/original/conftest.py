"""`tests/cases/test_original_programs.py` runs these programs; collecting tests must not import them."""

collect_ignore_glob = ["*.py"]
