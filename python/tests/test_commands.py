"""crisp-prefill capture and compare, on a tiny random model with a tokenizer of bytes."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import crisp_prefill as crisp
from crisp_prefill._commands import main
from crisp_prefill.transformers.compare import compare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder and a prompt, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=4096,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    model.save_pretrained(path)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: i + 3 for i, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    text = " ".join(f"line {i} of the prompt, {i * i} things in it." for i in range(60))
    (path / "prompt.txt").write_text(text)
    return path


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "crisp_prefill", *map(str, words)], capture_output=True, text=True,
        timeout=300,
    )


def test_capture_writes_what_the_command_line_reads(folder, tmp_path):
    prompt = folder / "prompt.txt"
    done = run("capture", folder, prompt, "--layers", "0,2", "--out", tmp_path / "out", "--tokens", 1500)
    assert done.returncode == 0, done.stderr
    paths = done.stdout.split()
    assert [path.rpartition("/")[2] for path in paths] == ["layer00.safetensors", "layer02.safetensors"]
    ours = run("prefill", paths[0], "--json")
    assert ours.returncode == 0, ours.stderr
    (policy,) = json.loads(ours.stdout)["policies"]
    # The same layer inside the model keeps the same blocks.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt.read_text(), return_tensors="pt").input_ids[:, :1500]
    with torch.no_grad(), crisp.use(model), crisp.record() as seen:
        model(ids)
    inside = [row["num_blocks"] for row in seen.rows() if row["layer"] == 0]
    assert [head["num_blocks"] for head in policy["heads"]] == inside


def test_compare(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(3, 260, (1, 1400), generator=torch.Generator().manual_seed(0))
    steps = []
    dense, all_kept, sparse = compare(
        model, ids, [crisp.Dense(), crisp.Crisp(min_budget_tokens=128)], continuation=32,
        progress=steps.append,
    )
    assert len(steps) == 5
    assert dense.policy == "sdpa" and dense.kl == 0 and dense.agreement == 1
    assert all_kept.density == 1 and all_kept.coverage == 1 and all_kept.error == 0
    assert 0 <= all_kept.kl < 1e-6 and all_kept.perplexity == pytest.approx(dense.perplexity, rel=1e-4)
    assert 0 < sparse.density < 1 and 0 < sparse.worst_coverage <= sparse.coverage < 1
    assert 0 < sparse.error <= sparse.worst_error and sparse.kl > all_kept.kl
    assert sparse.speed_up == dense.ttft_ms / sparse.ttft_ms
    assert model.config._attn_implementation == "sdpa"
    for what, message in [
        (dict(continuation=1400), "continuation is 1400, expected 2 to 1399"),
        (dict(repeats=0), "repeats is 0, expected >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            compare(model, ids, [crisp.Dense()], **what)


def test_compare_command(folder, capsys):
    words = ["compare", str(folder), str(folder / "prompt.txt"), "--next-tokens", "16"]
    assert main([*words, "--policies", "crisp"]) == 0
    table = capsys.readouterr().out
    for word in ("TTFT", "density", "coverage", "KL", "sdpa", "crisp"):
        assert word in table
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["policy"] for row in rows] == ["sdpa", "crisp", "flexprefill"]


def test_refusals(folder, tmp_path, capsys):
    prompt = folder / "prompt.txt"
    for words, message in [
        (("compare", tmp_path / "none", prompt), "cannot be loaded"),
        (("compare", folder, tmp_path / "none.txt"), "cannot be read"),
        (("compare", folder, prompt, "--tokens", 0), "--tokens is 0, expected 1 to"),
        (("compare", folder, prompt, "--policies", "best"), "policy is 'best', expected one of"),
        (("capture", folder, prompt, "--out", tmp_path, "--layers", "0,9"), "expected numbers from 0 to 2"),
    ]:
        assert main([str(word) for word in words]) == 2, words
        said = capsys.readouterr()
        assert message in said.err and said.out == ""
