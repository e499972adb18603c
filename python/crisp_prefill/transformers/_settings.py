"""What a model's layers run under: set by `use`, or by `config.crisp`, else the defaults."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..policies import Crisp, Policy, policy_from_name
from ._record import watch


@dataclass(frozen=True)
class Settings:
    """policy: of prefill. min_q_len: tokens; a shorter run of queries goes to SDPA, as below 128 a
    selection costs as much as the attention it saves. layers: those that run under the policy, None
    for all of them; the others go to SDPA."""

    policy: Policy = Crisp()
    min_q_len: int = 128
    layers: frozenset[int] | None = None


_DEFAULT = Settings()
_IN_USE: dict[int, Settings] = {}  # by id of a config, while a `use` holds its model


@functools.lru_cache(maxsize=64)
def _from_json(text: str) -> Settings:
    values = json.loads(text)
    name = values.pop("policy", "crisp")
    min_q_len = values.pop("min_q_len", _DEFAULT.min_q_len)
    layers = values.pop("layers", None)
    try:
        policy = replace(policy_from_name(name), **values)
    except TypeError as error:
        raise ValueError(f"config.crisp is {text}: {error}") from None
    return Settings(policy, min_q_len, None if layers is None else frozenset(layers))


def settings_of(config: Any) -> Settings:
    """The settings of a layer's config. config.crisp is a dict that survives saving: `policy` (a
    name), `min_q_len`, `layers`, and fields of the policy."""
    found = _IN_USE.get(id(config))
    if found is not None:
        return found
    given = getattr(config, "crisp", None)
    return _DEFAULT if given is None else _from_json(json.dumps(given))


def _implementations(config: Any) -> Any:
    """What set_attn_implementation takes to bring back what the config has now."""
    parts = {"": config._attn_implementation}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            parts[name] = part._attn_implementation
    return parts if len(parts) > 1 else parts[""]


@contextmanager
def use(
    model: Any,
    policy: Policy = Crisp(),
    *,
    min_q_len: int = _DEFAULT.min_q_len,
    layers: Collection[int] | None = None,
) -> Iterator[Any]:
    """Runs `model` with attention `crisp` under `policy`, and sets everything back at the end.

    min_q_len, layers: as in Settings. Warns at the end if attention ran and none of it was sparse.
    """
    if min_q_len < 1:
        raise ValueError(f"min_q_len is {min_q_len}, expected >= 1")
    settings = Settings(policy, min_q_len, None if layers is None else frozenset(layers))
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = _implementations(model.config)
    outer = {key: _IN_USE.get(key) for key in configs}
    model.set_attn_implementation("crisp")
    if model.config._attn_implementation != "crisp":
        raise ValueError(
            f"{type(model).__name__} keeps attention {model.config._attn_implementation!r}: it does "
            "not look its attention up by name, so crisp cannot be used with it"
        )
    _IN_USE.update(dict.fromkeys(configs, settings))
    try:
        with watch(f"use({type(model).__name__})"):
            yield model
    finally:
        for key, old in outer.items():
            if old is None:
                _IN_USE.pop(key, None)
            else:
                _IN_USE[key] = old
        model.set_attn_implementation(before)
