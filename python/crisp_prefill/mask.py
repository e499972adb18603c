"""BlockMask: which key blocks every block of queries of every head attends to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _core
from ._arrays import adopt, arrays_of


def _first_q_block(q_len: int, kv_len: int, block_size: int) -> int:
    return max(kv_len - q_len, 0) // block_size


def num_q_blocks(q_len: int, kv_len: int, block_size: int) -> int:
    """Rows of a sequence. The first may be short: blocks count from the sequence's first key."""
    if q_len == 0:
        return 0
    end = max(kv_len - q_len, 0) + q_len
    return -(-end // block_size) - _first_q_block(q_len, kv_len, block_size)


def visible_blocks(q_len: int, kv_len: int, block_size: int, causal: bool) -> np.ndarray:
    """bool [q_blocks, kv_blocks] of one sequence: the blocks a dense run visits."""
    rows = num_q_blocks(q_len, kv_len, block_size)
    columns = -(-kv_len // block_size)
    if not causal:
        return np.ones((rows, columns), bool)
    first = _first_q_block(q_len, kv_len, block_size)
    return np.arange(columns)[None, :] <= first + np.arange(rows)[:, None]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """One bit per (head, q_block, kv_block).

    words: uint32 numpy array or int32 torch tensor [num_heads, num_q_blocks, words_per_row]; bit
        kv_block % 32 of word kv_block // 32. words_per_row is even.
    num_kv_blocks: columns; every row is as wide as the widest sequence's.
    sequences: (q_len, kv_len) in tokens of each sequence; their rows follow each other.
    """

    words: Any
    num_kv_blocks: int
    sequences: tuple[tuple[int, int], ...]
    causal: bool = True
    block_size: int = 128
    _bounds: tuple[int, ...] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        bounds = [0]
        for q_len, kv_len in self.sequences:
            bounds.append(bounds[-1] + num_q_blocks(q_len, kv_len, self.block_size))
        object.__setattr__(self, "_bounds", tuple(bounds))
        shape = tuple(self.words.shape)
        expected = (shape[0], bounds[-1], -(-self.num_kv_blocks // 64) * 2)
        if shape != expected:
            raise ValueError(f"words has shape {shape}, expected {expected}")

    @property
    def num_heads(self) -> int:
        return int(self.words.shape[0])

    @property
    def num_q_blocks(self) -> int:
        return int(self.words.shape[1])

    def rows_of(self, sequence: int) -> tuple[int, int]:
        """First and end row of a sequence."""
        return self._bounds[sequence], self._bounds[sequence + 1]

    def core(self) -> _core.Mask:
        """The C struct over `words`, which must outlive it."""
        address = arrays_of(self.words).pointer(self.words)
        return _core.Mask(
            address, self.num_heads, self.num_q_blocks, self.num_kv_blocks, self.block_size
        )

    @staticmethod
    def from_dense(
        dense: Any, *, q_len: Any, kv_len: Any, causal: bool = True, block_size: int = 128
    ) -> BlockMask:
        """From bool [heads, q_blocks, kv_blocks], numpy or torch; True: attended to.

        q_len, kv_len: tokens of the sequence, or a list of them: then the rows of the sequences
        follow each other, and kv_blocks is that of the longest. Blocks above the causal diagonal
        and past a sequence's end are dropped: they are never attended to.
        """
        source = adopt("dense", dense)
        bits = arrays_of(source).to_numpy(source)
        if bits.dtype != np.bool_ or bits.ndim != 3:
            raise ValueError(
                f"dense is {bits.dtype} with {bits.ndim} dimensions, expected bool [heads, q_blocks, "
                "kv_blocks]"
            )
        if block_size not in (64, 128):
            raise ValueError(f"block_size is {block_size}, expected 64 or 128")
        q_lens = [q_len] if isinstance(q_len, int) else list(q_len)
        kv_lens = [kv_len] if isinstance(kv_len, int) else list(kv_len)
        if len(q_lens) != len(kv_lens):
            raise ValueError(f"kv_len has {len(kv_lens)} entries, expected {len(q_lens)} as q_len")
        sequences = tuple(zip(q_lens, kv_lens))
        rows = sum(num_q_blocks(q, kv, block_size) for q, kv in sequences)
        columns = max(-(-kv // block_size) for kv in kv_lens)
        if bits.shape[1:] != (rows, columns):
            raise ValueError(
                f"dense has {bits.shape[1]} x {bits.shape[2]} blocks, expected {rows} x {columns} for "
                f"q_len {q_len}, kv_len {kv_len} and blocks of {block_size}"
            )
        padded = np.zeros((bits.shape[0], rows, -(-columns // 64) * 64), bool)
        first = 0
        for q, kv in sequences:
            seen = visible_blocks(q, kv, block_size, causal)
            end = first + seen.shape[0]
            padded[:, first:end, : seen.shape[1]] = bits[:, first:end, : seen.shape[1]] & seen
            first = end
        words = _aligned_words(np.packbits(padded, axis=-1, bitorder="little"))
        return BlockMask(_like(words, source), columns, sequences, causal, block_size)

    def to_dense(self) -> np.ndarray:
        """bool [heads, q_blocks, kv_blocks] on the host."""
        words = np.ascontiguousarray(arrays_of(self.words).to_numpy(self.words))
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
        return bits[..., : self.num_kv_blocks].astype(bool)

    def density(self, per_head: bool = False) -> Any:
        """Kept over visible blocks: a float, or [sequences, heads] of them. NaN where none is visible."""
        dense = self.to_dense()
        kept = np.zeros((len(self.sequences), self.num_heads))
        visible = np.zeros((len(self.sequences), 1))
        for index, (q_len, kv_len) in enumerate(self.sequences):
            first, end = self.rows_of(index)
            seen = visible_blocks(q_len, kv_len, self.block_size, self.causal)
            kept[index] = (dense[:, first:end, : seen.shape[1]] & seen).sum(axis=(1, 2))
            visible[index] = seen.sum()
        with np.errstate(invalid="ignore"):
            if per_head:
                return kept / visible
            return float(np.divide(kept.sum(), visible.sum() * self.num_heads))

    def coverage(self, q: Any, k: Any, *, scale: float | None = None, **lengths: Any) -> float:
        """Share of the true attention mass in the kept blocks, mean over rows and heads.

        q, k: what the mask was selected for, with the same key_starts, key_lengths, cu_seqlens and
        block_table. Costs two attentions: a row's mass is exp(lse with the mask - lse without).
        """
        from .functions import attend, attention
        from .policies import Dense

        _, kept = attend(
            q, k, k, self, scale=scale, causal=self.causal, return_lse=True, **lengths
        )
        _, full = attention(
            q, k, k, policy=Dense(), scale=scale, causal=self.causal, return_lse=True, **lengths
        )
        arrays = arrays_of(kept)
        kept, full = arrays.to_numpy(kept), arrays.to_numpy(full)
        rows = np.isfinite(full)
        return float(np.exp(kept[rows].astype(np.float64) - full[rows]).mean())


def _aligned_words(packed: np.ndarray) -> np.ndarray:
    """The bytes of rows of 64-bit words, in memory that is 8-byte aligned."""
    words = np.empty((*packed.shape[:-1], packed.shape[-1] // 8), np.uint64)
    words.view(np.uint8)[...] = packed
    return words.view(np.uint32)


def _like(words: np.ndarray, source: Any) -> Any:
    """Words next to `source`: numpy, or a torch tensor on its device."""
    if isinstance(source, np.ndarray):
        return words
    import torch

    return torch.from_numpy(words.view(np.int32)).to(source.device)
