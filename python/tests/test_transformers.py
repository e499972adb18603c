"""`crisp` as an attention of transformers, on tiny random models."""

import json
import warnings

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import crisp_prefill as crisp
import crisp_prefill.transformers as adapter
from crisp_prefill.transformers import _record

SHAPE = dict(
    vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_dropout=0.0,
)
FAMILIES = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {}, "Mistral": {"sliding_window": None}, "Gemma": {},
    "Gemma2": {"sliding_window": 64, "query_pre_attn_scalar": 16}, "Phi3": {},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 32},
}
SPARSE = crisp.Crisp(min_budget_tokens=128, dense_below_tokens=0)
EAGER = {"Gemma2", "GptOss"}


def make(family, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **FAMILIES[family], **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if family == "GptOss":
        model.set_experts_implementation("eager")  # its others have no double precision
    # Random weights make flat attention; larger ones make it as uneven as that of real models.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv" in name:
                weight.mul_(20)
    return model


def tokens(batch, length, seed=0):
    return torch.randint(3, 200, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model, attention, ids, policy=None, **how):
    with torch.no_grad():
        if policy is None:
            model.set_attn_implementation(attention)
            return model(ids, **how).logits
        with crisp.use(model, policy):
            return model(ids, **how).logits


def allowed(model, baseline, ids, **how):
    """Twice what the baseline itself is away from the same model in double precision."""
    import copy

    double = copy.deepcopy(model).double()
    exact = logits(double, baseline, ids, **how)
    error = (logits(model, baseline, ids, **how) - exact).abs().max()
    return exact, 2 * error


@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_equals_the_baseline(family):
    model, baseline, ids = make(family), "eager" if family in EAGER else "sdpa", tokens(2, 200)
    exact, bound = allowed(model, baseline, ids)
    with crisp.record() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = logits(model, "crisp", ids, crisp.Dense())
    assert (ours - exact).abs().max() <= bound
    if family in EAGER:
        assert seen.num_sparse == 0 and set(entry.ran for entry in seen.entries) == {"eager"}
    else:
        assert seen.num_sparse == len(seen.entries) == 3


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GptOss"])
def test_the_past_only(family):
    """Tokens that change later change no logits before them."""
    model, ids = make(family), tokens(1, 300)
    other = ids.clone()
    other[0, 256:] = tokens(1, 44, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = (logits(model, "crisp", x, crisp.Dense()) for x in (ids, other))
    assert torch.equal(a[0, :256], b[0, :256])
    assert not torch.equal(a[0, 256:], b[0, 256:])


def test_sparse_is_reported_per_layer_and_head():
    model, ids = make("Llama"), tokens(1, 900)
    with crisp.use(model, SPARSE), crisp.record() as seen, torch.no_grad():
        model(ids)
    rows = seen.rows()
    assert len(rows) == 3 * 4 and {row["layer"] for row in rows} == {0, 1, 2}
    assert {row["head"] for row in rows} == {0, 1, 2, 3}
    assert all(row["pattern"] in crisp.PATTERNS and row["ms"] > 0 for row in rows)
    assert 0 < seen.density < 1
    document = json.loads(seen.to_json())
    assert document["rows"] == rows and document["num_sparse"] == 3 and not document["fallbacks"]


def test_a_users_mask():
    model, ids = make("Llama"), tokens(1, 400)
    bits = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    bits[:, range(4), range(4)] = True
    mask = crisp.BlockMask.from_dense(bits, q_len=400, kv_len=400)
    with crisp.use(model, crisp.UserMask(mask)), crisp.record() as seen, torch.no_grad():
        model(ids)
    assert {row["pattern"] for row in seen.rows()} == {"mask"}
    assert seen.density == pytest.approx(mask.density(), abs=0) and seen.density < 1


def generate(model, ids, mask=None, **how):
    with torch.no_grad():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids) if mask is None else mask, do_sample=False,
            **{"max_new_tokens": 6, "min_new_tokens": 6, **how},
        )


CALLS = {
    "dynamic": {}, "static": {"cache_implementation": "static"}, "beams": {"num_beams": 3},
    "chunks": {"prefill_chunk_size": 140}, "no cache": {"use_cache": False},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
def test_generate_gives_the_tokens_of_sdpa(call, padded):
    model, ids = make("Llama"), tokens(2, 280)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :70] = 0
        ids[1, :70] = 0
    how = CALLS[call]
    model.set_attn_implementation("sdpa")
    expected = generate(model, ids, mask, **how)
    with crisp.use(model, crisp.Dense()), crisp.record() as seen:
        got = generate(model, ids, mask, **how)
    assert torch.equal(got, expected)
    # Prefill ran under the policy; whatever did not was decode, or the last chunk cut short.
    assert seen.num_sparse >= 3
    assert set(seen.fallbacks) <= {"decode"}, seen.fallbacks


@pytest.mark.parametrize("call", ["dynamic", "static"])
def test_padding_changes_nothing_for_a_sparse_policy(call):
    """A left-padded row selects and attends as the same prompt alone."""
    model, ids = make("Llama"), tokens(1, 700)
    padded = torch.cat([torch.zeros(1, 53, dtype=torch.long), ids], dim=1)
    ids2 = torch.cat([tokens(1, 753, seed=4), padded])
    mask = torch.ones_like(ids2)
    mask[1, :53] = 0
    with crisp.use(model, SPARSE):
        with crisp.record() as alone:
            one = generate(model, ids, **CALLS[call])
        with crisp.record() as batch:
            two = generate(model, ids2, mask, **CALLS[call])
    assert torch.equal(one[0, 700:], two[1, 753:])
    blocks = [
        [r["num_blocks"] for r in seen.rows() if r.get("sequence") == sequence]
        for seen, sequence in ((alone, 0), (batch, 1))
    ]
    assert blocks[0] == blocks[1] and len(blocks[0]) == 12


FALLBACKS = {
    "sliding window": ("Mistral", {"sliding_window": 64}, {}),
    "learned sinks": ("GptOss", {}, {}),
    "softcap": ("Gemma2", {}, {}),
    "q_len below 128": ("Llama", {}, {"length": 100}),
    "head_dim 12": ("Llama", {"head_dim": 12}, {}),
    "right padding": ("Llama", {}, {"mask": lambda m: m[1, -30:].zero_()}),
    "holes in the mask": ("Llama", {}, {"mask": lambda m: m[1, 30:60].zero_()}),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_fallbacks_are_counted_and_right(reason):
    family, changes, how = FALLBACKS[reason]
    model, ids = make(family, **changes), tokens(2, how.get("length", 200))
    baseline = "eager" if family in EAGER else "sdpa"
    mask = torch.ones_like(ids)
    how.get("mask", lambda m: None)(mask)
    exact, bound = allowed(model, baseline, ids, attention_mask=mask)
    with pytest.warns(RuntimeWarning, match=f"NOTHING RAN SPARSE.*{reason}"):
        with crisp.record() as seen:
            ours = logits(model, "crisp", ids, crisp.Dense(), attention_mask=mask)
    assert seen.fallbacks == {reason: 3}
    rows = mask.bool()
    assert (ours - exact)[rows].abs().max() <= bound


def test_other_fallbacks():
    model, ids = make("Llama"), tokens(1, 200)
    causal = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
    custom = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
    cases = [
        ("custom mask", {"attention_mask": custom}, {}),
        ("kv_len below 1024", {}, {"policy": crisp.Crisp()}),
        ("layer left out", {}, {"layers": []}),
    ]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids).logits
        for reason, inputs, how in cases:
            with crisp.record() as seen, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with crisp.use(model, **{"policy": crisp.Dense(), **how}):
                    got = model(ids, **inputs).logits
            assert seen.fallbacks == {reason: 3}
            torch.testing.assert_close(got, expected)


def test_gradients_go_to_sdpa():
    model, ids = make("Llama"), tokens(1, 200)
    with crisp.record() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with crisp.use(model, crisp.Dense()):
            model(ids).logits.sum().backward()
    assert seen.fallbacks == {"requires grad": 3}
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_float64_goes_to_sdpa():
    model, ids = make("Llama").double(), tokens(1, 200)
    with crisp.record() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits(model, "crisp", ids, crisp.Dense())
    assert seen.fallbacks == {"float64 on cpu": 3}


def test_use_restores():
    model = make("Llama")
    model.set_attn_implementation("eager")
    with pytest.raises(KeyError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with crisp.use(model, crisp.Dense()):
            assert model.config._attn_implementation == "crisp"
            assert adapter.settings_of(model.config).policy == crisp.Dense()
            with crisp.use(model, SPARSE, layers=[1]):
                assert adapter.settings_of(model.config).policy == SPARSE
            assert adapter.settings_of(model.config).policy == crisp.Dense()
            raise KeyError
    assert model.config._attn_implementation == "eager"
    assert adapter.settings_of(model.config) == adapter.Settings()


def test_settings_in_the_config(tmp_path):
    model = make("Llama")
    model.config.crisp = {"policy": "crisp", "alpha": 1.5, "min_q_len": 64, "layers": [0, 2]}
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="crisp")
    settings = adapter.settings_of(again.config)
    assert settings == adapter.Settings(crisp.Crisp(alpha=1.5), 64, frozenset([0, 2]))
    again.config.crisp = {"alpah": 1}
    with pytest.raises(ValueError, match="config.crisp is .*alpah"):
        adapter.settings_of(again.config)


def test_a_warning_outside_of_use(monkeypatch):
    monkeypatch.setattr(_record, "_warned", set())
    model, ids = make("Llama"), tokens(1, 50)
    with pytest.warns(RuntimeWarning, match="layer 0 ran in sdpa, not sparse: q_len below 128"):
        logits(model, "crisp", ids)


def test_compiled_model():
    model, ids = make("Llama", num_hidden_layers=1), tokens(1, 200)
    with crisp.use(model, crisp.Dense()), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(got, eager)
