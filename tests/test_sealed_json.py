"""JSON objects with a checksum."""

import msgspec
import pytest

from paceline._base.journal_records import check_seal, seal

CONTENT = {"version": 1, "trial": {"lr": 0.125, "name": "ä\n"}, "checksum_of": "none"}


@pytest.mark.parametrize("indent", [0, 1])
def test_a_flipped_bit_is_told_or_changes_nothing(indent: int) -> None:
    """All bits of a document, those of its checksum included."""
    data = msgspec.json.encode(CONTENT)
    sealed = seal(msgspec.json.format(data, indent=indent) if indent else data)
    assert msgspec.json.decode(check_seal(sealed)).keys() == {*CONTENT, "checksum"}
    num_told = 0
    for position in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[position // 8] ^= 1 << position % 8
        try:
            found = msgspec.json.decode(check_seal(bytes(changed)))
        except msgspec.DecodeError:
            num_told += 1
            continue
        assert {name: found.get(name) for name in CONTENT} == CONTENT, bytes(changed)
    assert num_told > 7 * len(sealed)


def test_an_object_without_a_checksum_is_read_as_it_is() -> None:
    data = msgspec.json.encode(CONTENT)
    assert check_seal(data) == data
