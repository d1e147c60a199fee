"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["number", "size"]


def number(value: float) -> str:
    """Return about three significant digits, without an exponent.

    Example:
        >>> number(1234.5), number(12.345), number(1.2345), number(0.12345)
        ('1,234', '12.3', '1.23', '0.123')
    """
    decimals = 0 if value >= 100.0 else 1 if value >= 10.0 else 2 if value >= 1.0 else 3
    return f"{value:,.{decimals}f}"


def size(count: int) -> str:
    """Return a number of bytes in MB or GB.

    Example:
        >>> size(1_544_004_096), size(1_500_000)
        ('1.54 GB', '1.5 MB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
