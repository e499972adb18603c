"""`crisp::prefill`, attention as one torch operator: opaque to torch.compile, one node of its graph.

    from crisp_prefill.torch import prefill
    out, lse = prefill(q, k, v, policy=crisp.Crisp())

There is no backward pass: tensors that require grad are refused.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .functions import attention
from .policies import Crisp, Dense, FlexPrefill, policy_from_json, policy_to_json


@torch.library.custom_op("crisp::prefill", mutates_args=(), device_types=("cpu", "cuda"))
def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str,
    scale: float,
    causal: bool,
    key_starts: Optional[list[int]],
    key_lengths: Optional[list[int]],
) -> tuple[Tensor, Tensor]:
    out, lse = attention(
        q, k, v, policy=policy_from_json(policy), scale=scale, causal=causal,
        key_starts=key_starts, key_lengths=key_lengths, return_lse=True,
    )
    # What the fake implementation promises: a batch in one call has its lse head by head.
    return out, lse.contiguous()


@_prefill.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str,
    scale: float,
    causal: bool,
    key_starts: Optional[list[int]],
    key_lengths: Optional[list[int]],
) -> tuple[Tensor, Tensor]:
    batch, q_len, heads, _ = q.shape
    out = q.new_empty(q.shape)
    return out, q.new_empty((batch, heads, q_len), dtype=torch.float32)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    policy: Dense | Crisp | FlexPrefill = Crisp(),
    scale: float | None = None,
    causal: bool = True,
    key_starts: list[int] | None = None,
    key_lengths: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [batch, q_len, heads, head_dim], lse float32 [batch, heads, q_len]).

    Arguments as of crisp_prefill.attention, tensors only. May be called inside torch.compile, with
    policies made outside; UserMask is refused, as an operator's arguments are numbers and tensors.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, expected a tensor that does not: crisp has no "
                             "backward pass. Use torch.no_grad() or .detach()")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    result: Any = _prefill(
        q, k, v, policy_to_json(policy), scale, causal, key_starts, key_lengths
    )
    out, lse = result
    return out, lse


__all__ = ["prefill"]
