"""The options of Adam that every contender uses."""

from __future__ import annotations

from typing import Final

__all__ = ["BETA1", "BETA2", "EPS", "LR"]

LR: Final = 1e-3
BETA1: Final = 0.9
BETA2: Final = 0.999
EPS: Final = 1e-8
