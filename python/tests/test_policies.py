"""Policies: the defaults of the C interface, and what is refused."""

from dataclasses import fields

import pytest

import crisp_prefill as crisp
from crisp_prefill import _core
from crisp_prefill.policies import (
    core_policy,
    policy_from_json,
    policy_from_name,
    policy_name,
    policy_to_json,
)

NUMBERS = [
    "tau_proxy", "alpha", "gamma", "tau_js", "sink_tokens", "recency_tokens", "min_budget_tokens",
    "dense_below_tokens", "noise_floor", "pooled_keeps_budget", "routing", "selection", "variant",
]


@pytest.mark.parametrize(
    "kind, policy", list(enumerate([crisp.Dense(), crisp.Crisp(), crisp.FlexPrefill()]))
)
def test_defaults_are_those_of_the_library(kind, policy):
    ours, library = core_policy(policy), _core.Policy(kind)
    assert ours.kind == library.kind == kind
    for name in NUMBERS:
        assert getattr(ours, name) == getattr(library, name), name


@pytest.mark.parametrize("policy", [crisp.Crisp, crisp.FlexPrefill])
def test_every_field_reaches_the_library(policy):
    words = {"median", "js_distance", "coverage", "paper"}
    for field in (field for field in fields(policy) if field.init):
        default = getattr(policy(), field.name)
        if isinstance(default, bool):
            other = not default
        elif isinstance(default, str):
            other = next(w for w in words if w in str(field.type) and w != default)
        else:
            other = default * 2
        name = "tau_js" if field.name == "tau" else field.name
        changed = core_policy(policy(**{field.name: other}))
        assert getattr(changed, name) != getattr(core_policy(policy()), name), field.name


def test_names():
    for name in ("dense", "crisp", "flexprefill"):
        assert policy_name(policy_from_name(name)) == name
    with pytest.raises(ValueError, match="policy is 'best', expected one of"):
        policy_from_name("best")


def test_policies_as_text():
    for policy in (crisp.Dense(), crisp.Crisp(alpha=1.25), crisp.FlexPrefill(variant="paper")):
        assert policy_from_json(policy_to_json(policy)) == policy
    with pytest.raises(TypeError, match="policy is UserMask.*, expected Dense, Crisp or FlexPrefill"):
        policy_to_json(crisp.UserMask(None))


def test_refusals(qkv):
    q, k, v = qkv(q_len=1100)
    for policy, message in [
        (crisp.Crisp(alpha=0), r"policy.alpha is 0, must be finite and > 0"),
        (crisp.Crisp(gamma=1.5), r"policy.gamma is 1.5, must be in \(0, 1\]"),
        (crisp.Crisp(routing="best"), r"policy.routing is 'best', expected one of"),
        (crisp.Crisp(sink_tokens=1.5), r"policy.sink_tokens is 1.5, expected a whole number"),
        (crisp.FlexPrefill(min_budget_tokens=-1), r"policy.min_budget_tokens is -1, must be >= 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            crisp.attention(q, k, v, policy=policy)
    with pytest.raises(TypeError, match="policy is 'crisp', expected Dense, Crisp"):
        crisp.attention(q, k, v, policy="crisp")
    with pytest.raises(ValueError, match="must be true for the Crisp policy"):
        crisp.attention(q, k, v, causal=False)
