"""Attention of a layer of your own in torch: in place, merged from two parts, and compiled.

    python examples/python/on_torch.py
"""

import torch

import crisp_prefill as crisp
from crisp_prefill.torch import prefill


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q = torch.randn(2, 2048, 8, 64, dtype=dtype, device=device)
    k, v = (torch.randn(2, 2048, 2, 64, dtype=dtype, device=device) for _ in range(2))

    # A batch whose second prompt is padded by 100 tokens on the left, written where we want it.
    out = torch.empty_like(q)
    _, report = crisp.attention(q, k, v, key_starts=[0, 100], out=out, return_report=True)
    print(f"{device}: density {report.density:.1%}, {len(report.rows())} rows of report")

    # Two halves of the keys, joined by their log-sum-exps.
    dense = crisp.Dense()
    halves = [
        crisp.attention(q, k[:, part], v[:, part], policy=dense, causal=False, return_lse=True)
        for part in (slice(0, 1000), slice(1000, None))
    ]
    merged, _ = crisp.merge_states(*halves[0], *halves[1])
    whole = crisp.attention(q, k, v, policy=dense, causal=False)
    print(f"merged halves differ from the whole by {(merged - whole).abs().max().item():.1e}")

    # One node of a compiled graph.
    policy = crisp.Crisp(alpha=1.25)
    layer = torch.compile(
        lambda q, k, v: prefill(q, k, v, policy=policy)[0] + 1, fullgraph=True, backend="aot_eager"
    )
    same = torch.equal(layer(q, k, v), crisp.attention(q, k, v, policy=policy) + 1)
    print(f"compiled equals eager: {same}")


if __name__ == "__main__":
    main()
