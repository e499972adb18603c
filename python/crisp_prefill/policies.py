"""Policies: how a head chooses its blocks. Plain values whose defaults are the papers'.

Every parameter means what `crisp.h` says of the field of its name; values out of range are refused
by the call that uses them, with name, value and expectation.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Union

from . import _core

if TYPE_CHECKING:
    from .mask import BlockMask

class _AsText:
    """What torch.compile can take: the policy as one constant, made when the policy is."""

    _text: str

    def __post_init__(self) -> None:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        object.__setattr__(self, "_text", json.dumps(values, default=_plain_number))


def _plain_number(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else repr(value)


DENSE, CRISP, FLEX_PREFILL, USER_MASK = range(4)


@dataclass(frozen=True)
class Dense(_AsText):
    """Every causal block (every block of non-causal attention)."""

    _text: str = field(init=False, repr=False, compare=False, default="")


@dataclass(frozen=True)
class Crisp(_AsText):
    """CRISP (arXiv 2609.01925). Masses are of the attention of the last 128 queries."""

    tau_proxy: float = 0.2
    """Routing: structural mass at which a head becomes Vertical-Slash, >= 0."""
    alpha: float = 1.0
    """Vertical-Slash heads keep blocks above alpha x the background mass, > 0."""
    gamma: float = 0.95
    """Coverage target of pooled heads, in (0, 1]."""
    sink_tokens: int = 128
    """Window of the structural mass at the start, tokens >= 1; its blocks are always kept."""
    recency_tokens: int = 128
    """The same at the end."""
    min_budget_tokens: int = 1024
    """Least kept per direction, tokens, rounded up to blocks of 128."""
    dense_below_tokens: int = 1024
    """Number of keys below which every causal block is kept."""
    noise_floor: Literal["mean", "median"] = "mean"
    pooled_keeps_budget: bool = True
    """Pooled heads keep min_budget_tokens of columns and diagonals as well."""
    routing: Literal["structural_mass", "js_distance"] = "structural_mass"
    """Ablation: `js_distance` routes like FlexPrefill, pooled when the distance is below tau_js."""
    selection: Literal["noise_floor", "coverage"] = "noise_floor"
    """Ablation: `coverage` keeps the smallest set of blocks that holds gamma of the mass."""
    tau_js: float = 0.1
    _text: str = field(init=False, repr=False, compare=False, default="")


@dataclass(frozen=True)
class FlexPrefill(_AsText):
    """FlexPrefill (arXiv 2502.20766): `official` is the published code, `paper` the paper's form."""

    tau: float = 0.1
    """Routing: Jensen-Shannon distance below which a head is pooled, >= 0."""
    gamma: float = 0.95
    """Coverage target, in (0, 1]."""
    min_budget_tokens: int = 1024
    dense_below_tokens: int = 1024
    variant: Literal["official", "paper"] = "official"
    _text: str = field(init=False, repr=False, compare=False, default="")


@dataclass(frozen=True)
class UserMask:
    """A mask of your own; bits above the causal diagonal are ignored, nothing is added."""

    mask: BlockMask


Policy = Union[Dense, Crisp, FlexPrefill, UserMask]

_WORDS: dict[str, tuple[str, ...]] = {
    "noise_floor": ("mean", "median"),
    "routing": ("structural_mass", "js_distance"),
    "selection": ("noise_floor", "coverage"),
    "variant": ("official", "paper"),
}
_KINDS: dict[type, int] = {Dense: DENSE, Crisp: CRISP, FlexPrefill: FLEX_PREFILL}
_BY_NAME: dict[str, type[Dense] | type[Crisp] | type[FlexPrefill]] = {
    "dense": Dense,
    "crisp": Crisp,
    "flexprefill": FlexPrefill,
}


def _to_core_value(name: str, value: Any) -> Any:
    if name in _WORDS:
        if value not in _WORDS[name]:
            raise ValueError(f"policy.{name} is {value!r}, expected one of {_WORDS[name]}")
        return _WORDS[name].index(value)
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, (int, float)):
        raise TypeError(f"policy.{name} is {value!r}, expected a number")
    if isinstance(getattr(_core.Policy(CRISP), name), int) and value != int(value):
        raise ValueError(f"policy.{name} is {value!r}, expected a whole number")
    return value


@functools.lru_cache(maxsize=64)
def core_policy(policy: Dense | Crisp | FlexPrefill) -> _core.Policy:
    """The C struct of a policy without a mask."""
    if type(policy) not in _KINDS:
        raise TypeError(f"policy is {policy!r}, expected Dense, Crisp, FlexPrefill or UserMask")
    core = _core.Policy(_KINDS[type(policy)])
    for one in fields(policy):
        if one.init:
            name = "tau_js" if one.name == "tau" else one.name
            setattr(core, name, _to_core_value(name, getattr(policy, one.name)))
    return core


def core_user_mask(mask: _core.Mask) -> _core.Policy:
    """The C struct of UserMask."""
    core = _core.Policy(USER_MASK)
    core.mask = mask
    return core


def policy_name(policy: Policy) -> str:
    """"dense", "crisp", "flexprefill" or "mask", as the command line calls them."""
    for name, kind in _BY_NAME.items():
        if isinstance(policy, kind):
            return name
    return "mask"


def policy_from_name(name: str) -> Dense | Crisp | FlexPrefill:
    """A policy with its defaults from "dense", "crisp" or "flexprefill"."""
    if name not in _BY_NAME:
        raise ValueError(f"policy is {name!r}, expected one of {tuple(_BY_NAME)}")
    return _BY_NAME[name]()


def policy_to_json(policy: Dense | Crisp | FlexPrefill) -> str:
    """{"name": "crisp", "policy": {its fields}}."""
    if type(policy) not in _KINDS:
        raise TypeError(f"policy is {policy!r}, expected Dense, Crisp or FlexPrefill")
    return '{"name": "' + policy_name(policy) + '", "policy": ' + policy._text + "}"


@functools.lru_cache(maxsize=64)
def policy_from_json(text: str) -> Dense | Crisp | FlexPrefill:
    """The inverse of policy_to_json."""
    values = json.loads(text)
    return replace(policy_from_name(values["name"]), **values["policy"])
