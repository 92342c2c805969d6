"""Digests of tensors, computed on their device; only the digests are copied to the host."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import xxhash

# Of tensors with more than four blocks, one in so many is looked at, unless all are asked for.
_BLOCK_BYTES, _STRIDE = 1 << 14, 32
_LARGE_BLOCK_BYTES = 1 << 20
# So many words have 64-bit copies at a time.
_MAX_WORDS = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16}
_GOLDEN, _MIXER = -0x61C8864680B583EB, -0x40A7B892E31B1A47


class TensorDigests:
    """Digests of tensors that are added one after the other.

    The same bits have the same digest on devices of one type.

    Args:
        turn: Which blocks of tensors above 64 KiB are looked at; None for all of them.
    """

    def __init__(self, turn: int | None = None) -> None:
        self._turn = turn
        self._digests: dict[str, str] = {}
        self._sums: dict[torch.device, BlockSums] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor by a name of its own; what has no memory of its own counts by its type."""
        self._digests[name] = f"{tensor.dtype} {tensor.layout}"
        if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
            return
        self._digests[name] += f" {list(tensor.shape)}"
        flat = tensor.detach().contiguous().reshape(-1)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        words = flat.view(_WORDS.get(flat.element_size(), torch.int32))
        places = self._places(len(words), words.element_size())
        if tensor.is_cpu:
            # The processor reads memory faster than torch multiplies.
            content, hasher = words.numpy(), xxhash.xxh3_64()
            for place in places:
                hasher.update(content[place].data)
            self._digests[name] += f" {hasher.hexdigest()}"
        elif not tensor.is_meta:
            sums = self._sums.setdefault(tensor.device, BlockSums(tensor.device))
            sums.add(name, [words[place] for place in places])

    def _places(self, num_words: int, word_bytes: int) -> list[slice]:
        """Return which blocks of a tensor are looked at."""
        begin, stride, size = 0, 1, _LARGE_BLOCK_BYTES // word_bytes
        if self._turn is not None and num_words * word_bytes > 4 * _BLOCK_BYTES:
            stride, size = _STRIDE, _BLOCK_BYTES // word_bytes
            begin = self._turn % min(_STRIDE, -(-num_words // size)) * size
        return [slice(at, at + size) for at in range(begin, num_words, stride * size)]

    def finish(self) -> dict[str, str]:
        """Return all digests by name; the host waits for each device once."""
        for sums in self._sums.values():
            for name, numbers in sums.finish().items():
                self._digests[name] += "".join(f" {number:x}" for number in numbers)
        return self._digests


class BlockSums:
    """Sums of the words of blocks on a device, in which each word counts by its place in the block.

    The factors are odd, so the change of one word changes the sum for certain.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        places = torch.arange(_LARGE_BLOCK_BYTES, device=device) * _GOLDEN
        self._factors = (places ^ (places >> 29)) * _MIXER | 1
        self._blocks: list[torch.Tensor] = []
        self._num_words = 0
        self._num_blocks: dict[str, int] = {}
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, blocks: Sequence[torch.Tensor]) -> None:
        """Add the blocks of a tensor, as words of at most 32 bits."""
        self._num_blocks[name] = len(blocks)
        for block in blocks:
            self._blocks.append(block)
            self._num_words += len(block)
            if self._num_words > _MAX_WORDS:
                self._sum_up()

    def finish(self) -> dict[str, list[int]]:
        """Return the sums of each tensor's blocks."""
        self._sum_up()
        sums = iter(torch.cat(self._sums).tolist() if self._sums else ())
        return {
            name: [next(sums) for _ in range(number)] for name, number in self._num_blocks.items()
        }

    def _sum_up(self) -> None:
        # A few operations for all blocks: a device takes longer to begin one than to do it.
        blocks, self._blocks, self._num_words = self._blocks, [], 0
        if not blocks:
            return
        words = torch.cat(blocks).to(torch.int64)
        words *= torch.cat([self._factors[: len(block)] for block in blocks])
        ends = [end - 1 for end in accumulate(map(len, blocks))]
        totals = words.cumsum(0)[torch.tensor(ends, device=words.device)]
        self._sums.append(torch.diff(totals, prepend=totals.new_zeros(1)))
