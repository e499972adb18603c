"""Select, look, attend: the stages on numpy arrays, and what the selection loses.

    python examples/python/on_numpy.py [FILE.safetensors]

Without a file it makes heads of its own: one with a sink, one without any structure.
"""

import sys

import numpy as np

import crisp_prefill as crisp


def synthetic(tokens=4096, dim=64):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, tokens, 2, dim), np.float32) for _ in range(3))
    q[:, :, 0, :4] += 5  # head 0: every query likes the first few keys
    k[:, :4, 0, :4] += 5
    return q, k, v


def from_file(path):
    """q, k, v [heads, tokens, head_dim] of a capture, as views [1, tokens, heads, head_dim]."""
    from safetensors.numpy import load_file  # bfloat16 needs ml_dtypes as well

    tensors = load_file(path)
    return tuple(tensors[name].swapaxes(0, 1)[None] for name in "qkv")


def main():
    q, k, v = from_file(sys.argv[1]) if len(sys.argv) > 1 else synthetic()
    dense = crisp.attention(q, k, v, policy=crisp.Dense())
    for policy in (crisp.Crisp(), crisp.FlexPrefill()):
        mask, report = crisp.select_blocks(q, k, policy=policy, return_report=True)
        out = crisp.attend(q, k, v, mask)
        error = np.linalg.norm((out - dense).astype(np.float64)) / np.linalg.norm(dense.astype(np.float64))
        print(f"{type(policy).__name__}: density {mask.density():.1%}, coverage "
              f"{mask.coverage(q, k):.4f}, relative error {error:.4f}")
        for row in report.rows():
            print(f"  head {row['head']}: {row['pattern']}, density {row['density']:.1%}")


if __name__ == "__main__":
    main()
