"""The mask function of `crisp`, and 4D masks for what runs elsewhere.

Like flash attention's it makes no [q_len, kv_len] mask for plain causal attention: it returns None
when all keys are there and the queries are the last of them, else a 2D bool [batch, kv_len] that says
which keys are there, with what our kernels need to know of it as the attribute `crisp_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

RIGHT_PADDING = "right padding"
HOLES = "holes in the mask"


@dataclass(frozen=True)
class Keys:
    """Which keys each row has. end: position behind the last query, shared by all rows. reason: why
    no kernel of ours can take it, else None and the lists are set."""

    end: int
    reason: str | None = None
    starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


def _is_tracing(*tensors: Any) -> bool:
    return bool(torch.compiler.is_compiling() or torch.jit.is_tracing())


def read_keys(mask: Tensor, end: int) -> Keys:
    """From 2D bool [batch, kv_len]; waits for the device, once per forward."""
    bits = mask.cpu()
    count = bits.sum(dim=1)
    first = bits.int().argmax(dim=1)
    last = bits.shape[1] - bits.flip(1).int().argmax(dim=1)
    starts, lengths = [], []
    for a, b, n in zip(first.tolist(), last.tolist(), count.tolist()):
        if n == 0:
            a, b = end, end
        if b - a != n:
            return Keys(end, HOLES)
        if b != end:
            return Keys(end, RIGHT_PADDING)
        starts.append(a)
        lengths.append(n)
    return Keys(end, None, tuple(starts), tuple(lengths))


def keys_of(mask: Tensor) -> Keys:
    """Of a mask that crisp_mask made."""
    found: Optional[Keys] = getattr(mask, "crisp_keys", None)
    return read_keys(mask, mask.shape[1]) if found is None else found


def crisp_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls once per forward and kind of mask; see the top of this file.

    Everything that is not plain causal (windows, packed sequences, bidirectional parts), and decode,
    gets the mask that `sdpa` would get, and then runs there.
    """

    def of_sdpa() -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask, **kwargs,
        )
        return mask

    plain = mask_function is causal_mask_function and kwargs.get("allow_is_causal_skip", True)
    if not plain or q_length == 1 or kv_offset != 0:
        return of_sdpa()
    if attention_mask is not None and (attention_mask.ndim != 2 or attention_mask.shape[1] > kv_length):
        return of_sdpa()
    whole = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_length
    if attention_mask is None and whole:
        return None
    if _is_tracing():
        return of_sdpa()  # which keys are there cannot be read while tracing
    end = int(q_offset) + q_length
    keys = torch.arange(kv_length, device=kwargs.get("device", "cpu")) < end
    keys = keys.expand(batch_size, kv_length)
    if attention_mask is not None:
        given = torch.nn.functional.pad(
            attention_mask.bool(), (0, kv_length - attention_mask.shape[1])
        )
        keys = keys & given.to(keys.device)
    if end == kv_length and bool(keys.all()):
        return None
    keys = keys.contiguous()
    setattr(keys, "crisp_keys", read_keys(keys, end))
    return keys


def mask_for_sdpa(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """4D bool [batch or 1, 1, q_len, kv_len] from what crisp_mask returned; None if SDPA's own
    causal rule says the same. 4D masks pass through."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is not None and mask.ndim == 4:
        return mask
    if mask is None and (q_len == kv_len or q_len == 1):
        return None
    end = kv_len if mask is None else keys_of(mask).end
    rows = torch.arange(end - q_len, end, device=query.device)[:, None]
    seen = (torch.arange(kv_len, device=query.device)[None] <= rows)[None, None]
    return seen if mask is None else seen & mask[:, None, None, :]


def mask_for_eager(
    mask: Tensor | None, query: Tensor, key: Tensor, is_causal: bool
) -> Tensor | None:
    """The same as numbers to add: 0 and the most negative of the dtype."""
    seen = mask_for_sdpa(mask, query, key)
    if seen is None:
        q_len, kv_len = query.shape[2], key.shape[2]
        if q_len == 1 or not is_causal:
            return None
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len)
        seen = seen[None, None]
    if seen.dtype != torch.bool:
        return seen
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(seen, zero, torch.finfo(query.dtype).min)
