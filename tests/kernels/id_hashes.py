"""SplitMix64 in plain Python, forwards and backwards: ids with a hash of one's choice."""

MASK = 2**64 - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(number):
    return number - 2**64 if number >= 2**63 else number


def hash_of(key, seed):
    z = (key ^ seed) & MASK
    z = (z ^ (z >> 30)) * _FIRST & MASK
    z = (z ^ (z >> 27)) * _SECOND & MASK
    return z ^ (z >> 31)


def _unshift(number, bits):
    found = number
    for _ in range(64 // bits + 1):
        found = number ^ (found >> bits)
    return found


def id_of(hashed, seed):
    """Return the id whose hash is this."""
    z = _unshift(hashed, 31) * pow(_SECOND, -1, 2**64) & MASK
    z = _unshift(z, 27) * pow(_FIRST, -1, 2**64) & MASK
    return signed(_unshift(z, 30) ^ seed)
