"""Seeds made of several numbers."""

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """Return a 63-bit seed from several integers (the finaliser of SplitMix64, chained).

    Neighbouring inputs give unrelated seeds, unlike a sum.
    """
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
