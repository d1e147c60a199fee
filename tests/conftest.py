"""Hypothesis profiles: `ci` is the same on every run, `deep` looks longer (HYPOTHESIS_PROFILE=deep)."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("deep", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
