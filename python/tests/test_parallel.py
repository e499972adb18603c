"""Tensor parallel: two gloo ranks give what one rank gives, and select the same blocks per head."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RANK = textwrap.dedent("""
    import json, sys, torch, transformers
    import crisp_prefill as crisp
    import crisp_prefill.transformers
    folder, ranks = sys.argv[1], int(sys.argv[2])
    how = {}
    if ranks > 1:
        from transformers.distributed import DistributedConfig
        how["distributed_config"] = DistributedConfig(tp_size=ranks)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()
    ids = torch.randint(3, 200, (1, 700), generator=torch.Generator().manual_seed(0))
    policy = crisp.Crisp(min_budget_tokens=128, dense_below_tokens=0)
    with torch.no_grad(), crisp.use(model, policy), crisp.record() as seen:
        logits = model(ids).logits
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    rows = [row for row in seen.rows() if row["layer"] == 0]
    heads = [[row["pattern"], row["num_blocks"], row["structural_mass"]] for row in rows]
    torch.save({"logits": logits, "heads": heads}, f"{folder}/{ranks}-{rank}.pt")
    if ranks > 1:
        torch.distributed.destroy_process_group()
""")


def run(folder, ranks):
    script = folder / "rank.py"
    script.write_text(RANK)
    launcher = [] if ranks == 1 else [
        "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
    ]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), str(folder), str(ranks)], capture_output=True,
        text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]


def test_two_ranks_equal_one(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    model.save_pretrained(tmp_path)
    (one,), two = run(tmp_path, 1), run(tmp_path, 2)
    # Layer 0 has the same inputs however heads are spread, so its heads agree to the bit.
    assert json.dumps(two[0]["heads"] + two[1]["heads"]) == json.dumps(one["heads"])
    assert len(one["heads"]) == 4
    # What follows sums the ranks' parts of hidden_size products in another order.
    scale = one["logits"].abs().max().item()
    allowed = 2 * config.num_hidden_layers * config.hidden_size * np.finfo(np.float32).eps * scale
    for rank in two:
        assert (rank["logits"] - one["logits"]).abs().max() <= allowed


def test_device_map(tmp_path):
    pytest.importorskip("accelerate")
    import crisp_prefill as crisp
    import crisp_prefill.transformers  # noqa: F401

    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map="auto", attn_implementation="crisp"
    ).eval()
    ids = torch.randint(3, 200, (1, 200), device=model.device)
    with torch.no_grad():
        with crisp.use(model, crisp.Dense()), crisp.record() as seen:
            ours = model(ids).logits
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(ours, model(ids).logits)
    assert seen.num_sparse == 2
