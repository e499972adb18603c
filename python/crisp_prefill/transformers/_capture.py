"""Attention functions that look on: one keeps q, k and v of chosen layers, one measures what a
policy loses in every layer. Both are registered next to `crisp` and used by the commands only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ..functions import attention
from ..policies import Dense, Policy
from ._masks import crisp_mask


@dataclass(frozen=True)
class Captured:
    """Attention inputs of one layer after RoPE: q [q_heads, tokens, head_dim], k and v [kv_heads,
    tokens, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


@dataclass(frozen=True)
class Loss:
    """What a policy costs one layer: coverage is the attention mass kept, error |out - dense| /
    |dense| of a head; both mean over heads, with the worst head."""

    layer: int
    coverage: float
    worst_coverage: float
    error: float
    worst_error: float


@dataclass
class _State:
    layers: Collection[int] | None = None
    captured: dict[int, Captured] = field(default_factory=dict)
    policy: Policy = Dense()
    losses: list[Loss] = field(default_factory=list)


_state = _State()
_FUNCTIONS = AttentionInterface()


def _capture_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    wanted = _state.layers is None or module.layer_idx in _state.layers
    if query.shape[2] > 1 and wanted and module.layer_idx not in _state.captured:
        if query.shape[0] != 1:
            raise ValueError(f"the batch is {query.shape[0]}, expected one prompt to capture")
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        q, k, v = (a[0].detach().cpu().contiguous() for a in (query, key, value))
        _state.captured[module.layer_idx] = Captured(q, k, v, float(scale))
    return _FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _measure_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> Any:
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError("the prompt is padded or in chunks, expected it whole to measure")
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))
    exact, full = attention(q, k, v, policy=Dense(), scale=scaling, return_lse=True)
    out, kept = attention(q, k, v, policy=_state.policy, scale=scaling, return_lse=True)
    coverage = (kept - full).double().exp().mean(dim=(0, 2))
    change = (out.double() - exact.double()).square().sum(dim=(0, 1, 3)).sqrt()
    error = change / exact.double().square().sum(dim=(0, 1, 3)).sqrt()
    _state.losses.append(
        Loss(module.layer_idx, coverage.mean().item(), coverage.min().item(), error.mean().item(),
             error.max().item())
    )
    return out, None


AttentionInterface.register("crisp_capture", _capture_forward)
AttentionMaskInterface.register("crisp_capture", sdpa_mask)
AttentionInterface.register("crisp_measure", _measure_forward)
AttentionMaskInterface.register("crisp_measure", crisp_mask)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def capture(model: Any, ids: Tensor, layers: Collection[int] | None = None) -> dict[int, Captured]:
    """One prefill of ids [1, tokens] in SDPA, keeping the attention inputs of `layers` (None: all)."""
    _state.layers, _state.captured = layers, {}
    with _attention(model, "crisp_capture"), torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    missing = set(layers or ()) - set(_state.captured)
    if missing:
        raise ValueError(f"layers has {sorted(missing)}, expected layers with attention that the "
                         "model looks up by name")
    captured, _state.captured = _state.captured, {}
    return captured


def measure(model: Any, ids: Tensor, policy: Policy) -> list[Loss]:
    """One prefill of ids [1, tokens] under `policy`, each layer held against dense attention on the
    same inputs."""
    _state.policy, _state.losses = policy, []
    with _attention(model, "crisp_measure"), torch.no_grad():
        model(ids, use_cache=False, logits_to_keep=1)
    losses, _state.losses = _state.losses, []
    return losses


__all__ = ["Captured", "Loss", "capture", "measure"]
