"""What a policy costs and saves on one's own model and prompt, against dense attention (SDPA)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..policies import Policy, policy_name
from ._capture import measure
from ._record import record
from ._settings import use


@dataclass(frozen=True)
class Comparison:
    """One row. ttft_ms: prefill of the prompt up to the first logits, best of the repeats.
    speed_up: dense ttft over this one. density, coverage, error: mean over layers (and heads), worst_*
    the worst layer and head. kl: mean KL(dense || policy) of the next-token distributions over the
    continuation, in nats; agreement: share of its tokens where both put the same token first.
    perplexity: of the continuation."""

    policy: str
    ttft_ms: float
    speed_up: float
    density: float
    coverage: float
    worst_coverage: float
    error: float
    worst_error: float
    kl: float
    agreement: float
    perplexity: float

    def row(self) -> dict[str, Any]:
        """As JSON takes it: None for NaN."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


@contextmanager
def _sdpa(model: Any) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _wait(ids: Tensor) -> None:
    if ids.device.type == "cuda":
        torch.cuda.synchronize(ids.device)


def _prefill(model: Any, ids: Tensor) -> tuple[float, Any]:
    """(ms, cache with the prompt's keys and values)."""
    _wait(ids)
    start = time.perf_counter()
    result = model(ids, use_cache=True, logits_to_keep=1)
    _wait(ids)
    return (time.perf_counter() - start) * 1e3, result.past_key_values


def _continuation(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """log p of every token after each of ids [1, n], with dense attention over the cache."""
    with _sdpa(model):
        return torch.log_softmax(model(ids, past_key_values=cache).logits[0].double(), dim=-1)


def _run(model: Any, prompt: Tensor, rest: Tensor, policy: Policy | None, repeats: int) -> Any:
    """(best ttft in ms, log p of the continuation, density)."""
    times, density = [], 1.0
    for repeat in range(repeats + 1):  # the first one warms up, and says the density
        if policy is None:
            with _sdpa(model):
                ms, cache = _prefill(model, prompt)
        elif repeat == 0:
            with use(model, policy), record() as seen:
                ms, cache = _prefill(model, prompt)
            density = seen.density
        else:
            with use(model, policy):
                ms, cache = _prefill(model, prompt)
        if repeat > 0:
            times.append(ms)
        if repeat < repeats:
            del cache
    return min(times), _continuation(model, rest, cache), density


def compare(
    model: Any,
    ids: Tensor,
    policies: list[Policy],
    *,
    continuation: int = 64,
    repeats: int = 1,
    progress: Callable[[str], None] = lambda step: None,
) -> list[Comparison]:
    """One row for SDPA and one per policy.

    ids [1, tokens]: the last `continuation` tokens follow the prompt; the rest is the prompt. Only
    the prompt runs under the policy: what the continuation sees of it is the keys and values.
    progress: called with a few words before each of the 1 + 2 x len(policies) steps.
    """
    if ids.ndim != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}, expected [1, tokens]")
    if not 2 <= continuation < ids.shape[1]:
        raise ValueError(f"continuation is {continuation}, expected 2 to {ids.shape[1] - 1}")
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, expected >= 1")
    prompt, rest = ids[:, :-continuation], ids[:, -continuation:]
    targets = rest[0, 1:, None]
    rows: list[Comparison] = []
    with torch.no_grad():
        progress("prefill with sdpa")
        dense_ms, dense, _ = _run(model, prompt, rest, None, repeats)
        ppl = dense[:-1].gather(1, targets).mean().neg().exp().item()
        rows.append(Comparison("sdpa", dense_ms, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, ppl))
        for policy in policies:
            name = policy_name(policy)
            progress(f"prefill with {name}")
            ms, ours, density = _run(model, prompt, rest, policy, repeats)
            progress(f"coverage of {name}")
            losses = measure(model, prompt, policy)
            kl = (dense.exp() * (dense - ours)).sum(dim=1).mean().item()
            agreement = (dense.argmax(1) == ours.argmax(1)).double().mean().item()
            rows.append(
                Comparison(
                    name, ms, dense_ms / ms, density,
                    sum(one.coverage for one in losses) / len(losses),
                    min(one.worst_coverage for one in losses),
                    sum(one.error for one in losses) / len(losses),
                    max(one.worst_error for one in losses), kl, agreement,
                    ours[:-1].gather(1, targets).mean().neg().exp().item(),
                )
            )
            if math.isnan(density):
                warnings.warn(f"crisp: no layer ran under {name}: the prompt has "
                              f"{prompt.shape[1]} tokens", RuntimeWarning, stacklevel=2)
    return rows


__all__ = ["Comparison", "compare"]
