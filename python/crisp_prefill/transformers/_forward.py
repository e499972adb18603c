"""The attention function of `crisp`: prefill under the policy, the rest where it belongs."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..functions import attention
from ..policies import Crisp, FlexPrefill, UserMask
from ..torch import prefill as prefill_op
from . import _record
from ._masks import keys_of, mask_for_eager, mask_for_sdpa
from ._settings import Settings, settings_of

_FUNCTIONS = AttentionInterface()
_ON_CPU = (torch.float32, torch.float16, torch.bfloat16)
_ON_CUDA = (torch.float16, torch.bfloat16)


def _only_eager(softcap: float | None, s_aux: Any, kwargs: dict[str, Any]) -> str | None:
    """Why not even SDPA can run the layer."""
    if s_aux is not None:
        return "learned sinks"
    if softcap is not None:
        return "softcap"
    if kwargs.get("output_attentions"):
        return "output_attentions"
    return None


def _shape_reason(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    dim = query.shape[-1]
    if value.shape[-1] != dim:
        return "head_dim of v differs from that of q and k"
    if query.device.type not in ("cpu", "cuda"):
        return f"device {query.device.type}"
    on_cuda = query.device.type == "cuda"
    if query.dtype not in (_ON_CUDA if on_cuda else _ON_CPU):
        return f"{query.dtype} on {query.device.type}".removeprefix("torch.")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        return "dtypes of q, k and v differ"
    if dim % 8 != 0 or not 8 <= dim <= (256 if on_cuda else 512):
        return f"head_dim {dim}"
    return None


def _reason(
    settings: Settings, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    dropout: float, sliding_window: int | None, is_causal: bool, kwargs: dict[str, Any],
) -> str | None:
    """Why the call does not run under the policy; None if it does."""
    q_len = query.shape[2]
    if q_len == 1:
        return _record.DECODE
    if not is_causal:
        return "not causal"
    if sliding_window is not None:
        return "sliding window"
    if kwargs.get("position_bias") is not None:
        return "position bias"
    if mask is not None and mask.ndim != 2:
        return "custom mask"
    if dropout:
        return "dropout"
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return "requires grad"
    if settings.layers is not None and getattr(module, "layer_idx", None) not in settings.layers:
        return "layer left out"
    if q_len < settings.min_q_len:
        return f"q_len below {settings.min_q_len}"
    if mask is not None and keys_of(mask).reason is not None:
        return keys_of(mask).reason
    kv_len = key.shape[2] if mask is None else keys_of(mask).end
    policy = settings.policy
    if isinstance(policy, (Crisp, FlexPrefill)) and kv_len < policy.dense_below_tokens:
        return f"kv_len below {policy.dense_below_tokens}"
    return _shape_reason(query, key, value)


def _events(query: Tensor) -> Any:
    if query.device.type != "cuda":
        return None
    with torch.cuda.device(query.device):
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        pair[0].record()
    return pair


def _run_sparse(
    settings: Settings, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None,
) -> tuple[Tensor, Any]:
    """(out [batch, q_len, heads, head_dim], report or None)."""
    q, k, v = (a.transpose(1, 2) for a in (query, key, value))
    if torch.compiler.is_compiling():
        if isinstance(settings.policy, UserMask):
            raise ValueError("policy is UserMask, expected another under torch.compile")
        return prefill_op(q, k, v, policy=settings.policy, scale=scaling)[0], None
    keys = None if mask is None else keys_of(mask)
    wanted = _record.recording()
    result = attention(
        q, k, v, policy=settings.policy, scale=scaling,
        key_starts=None if keys is None else list(keys.starts),
        key_lengths=None if keys is None else list(keys.lengths),
        return_report=wanted,
    )
    return result if wanted else (result, None)


def _run_dense(
    ran: str, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    is_causal: bool, kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    if ran == "sdpa":
        if is_causal:
            mask = mask_for_sdpa(mask, query, key)
        result: tuple[Tensor, Tensor | None] = _FUNCTIONS["sdpa"](
            module, query, key, value, mask, is_causal=is_causal, **kwargs
        )
        return result
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"{type(module).__name__} has no eager attention, which it needs: crisp "
                         "cannot run this model")
    result = eager(module, query, key, value, mask_for_eager(mask, query, key, is_causal), **kwargs)
    return result


def crisp_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [batch, heads, q_len, head_dim]; key, value [batch, kv_heads, kv_len, head_dim], not
    repeated. Returns (out [batch, q_len, heads, head_dim], attention weights of eager or None).

    The order of arguments is that of transformers' own functions: wrappers of the registry pass
    `dropout` by position.
    """
    settings = settings_of(getattr(module, "config", None))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    only_eager = _only_eager(softcap, s_aux, kwargs)
    reason = only_eager or _reason(
        settings, module, query, key, value, attention_mask, dropout, sliding_window, causal, kwargs
    )
    entry = _record.Entry(
        getattr(module, "layer_idx", None) or 0, "crisp" if reason is None else "sdpa",
        query.shape[2], key.shape[2], reason,
    )
    traced = torch.compiler.is_compiling()
    timed = _record.recording() and not traced
    if timed:
        entry.device_events = _events(query)
        start = time.perf_counter()
    if reason is None:
        out, entry.report = _run_sparse(settings, query, key, value, attention_mask, scaling)
        weights = None
    else:
        entry.ran = "eager" if only_eager else "sdpa"
        passed = {"dropout": dropout, "scaling": scaling, **kwargs}
        for name, given in (("sliding_window", sliding_window), ("softcap", softcap), ("s_aux", s_aux)):
            if given is not None:
                passed[name] = given
        out, weights = _run_dense(
            entry.ran, module, query, key, value, attention_mask, causal, passed
        )
    if timed:
        entry.host_ms = (time.perf_counter() - start) * 1e3
        if entry.device_events is not None:
            with torch.cuda.device(query.device):
                entry.device_events[1].record()
    if not traced:
        _record.note(entry)
    return out, weights
