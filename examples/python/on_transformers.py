"""A model of transformers with its prefill under crisp, and what every layer did.

    python examples/python/on_transformers.py [MODEL [PROMPT.txt]]

Without a model it makes a tiny random one.
"""

import sys
from collections import defaultdict

import torch
import transformers

import crisp_prefill as crisp
import crisp_prefill.transformers  # registers the attention "crisp"


def tiny():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(3, 256, (1, 2048))


def load(name, prompt):
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, attn_implementation="crisp")
    return model.eval(), tokenizer(open(prompt).read(), return_tensors="pt").input_ids


def main():
    model, ids = load(*sys.argv[1:3]) if len(sys.argv) > 2 else tiny()
    with crisp.use(model, crisp.Crisp()), crisp.record() as report:
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, do_sample=False
        )
    print(f"{ids.shape[1]} tokens of prompt, then {tokens[0, ids.shape[1]:].tolist()}")
    print(f"density {report.density:.1%}, elsewhere: {dict(report.fallbacks)}")
    layers = defaultdict(list)
    for row in report.rows():
        if row["ran"] == "crisp":
            layers[row["layer"]].append(f"{row['pattern']} {row['density']:.0%}")
    for layer, heads in layers.items():
        print(f"  layer {layer}: {', '.join(heads)}")


if __name__ == "__main__":
    main()
