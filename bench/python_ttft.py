#!/usr/bin/env python3
"""Time to first token of a model of transformers under crisp, against SDPA and FlashAttention-2.

    script/python --torch      # or any environment with crisp-prefill, torch and transformers
    build/python/torch/bin/python bench/python_ttft.py --device cuda --lengths 32k,128k

The model has the geometry of Llama-3.1-8B and random weights; crisp runs a random user mask of a
given density, the same in every layer, so that no figure depends on weights. What is timed is one
prefill of the whole prompt with its KV cache, up to the last token's logits. Runs of the
implementations alternate after one warm-up each. Writes one JSON line per length and implementation:
milliseconds (median, min, max), the ratio of its median over crisp's, shape, machine, versions.
"""

import argparse
import contextlib
import json
import platform
import statistics
import sys
import time

import numpy as np
import torch
import transformers

import crisp_prefill as crisp
import crisp_prefill.transformers  # noqa: F401  registers "crisp"

BASELINES = ("sdpa", "sdpa-cudnn", "flash_attention_2")


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tokens = lambda text: int(text[:-1]) * 1024 if text.endswith("k") else int(text)
    parser.add_argument("--lengths", type=lambda text: [tokens(part) for part in text.split(",")],
                        default=[32768, 131072])
    parser.add_argument("--baselines", type=lambda text: text.split(","), default=["sdpa-cudnn"],
                        help=f"comma-separated of {', '.join(BASELINES)}")
    parser.add_argument("--density", type=float, default=0.15, help="kept over causal blocks, in (0, 1]")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096, help="heads of 128; a quarter of them kv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    for name in arguments.baselines:
        if name not in BASELINES:
            parser.error(f"--baselines has {name!r}, expected {', '.join(BASELINES)}")
    if not 0 < arguments.density <= 1:
        parser.error(f"--density is {arguments.density}, expected in (0, 1]")
    if arguments.hidden % 512 != 0:
        parser.error(f"--hidden is {arguments.hidden}, expected a multiple of 512")
    return arguments


def make_model(arguments):
    heads = arguments.hidden // 128
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 7 // 2,
        num_hidden_layers=arguments.layers, num_attention_heads=heads,
        num_key_value_heads=heads // 4, head_dim=128,
        max_position_embeddings=max(arguments.lengths),
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, arguments.dtype))
    with torch.device(arguments.device):
        return transformers.LlamaForCausalLM(config).eval()


def make_mask(model, tokens, density, device):
    """Random blocks of the lower triangle; the diagonal and the first column are always there."""
    heads, blocks = model.config.num_attention_heads, -(-tokens // 128)
    rng = np.random.default_rng(0)
    forced = 2 * blocks - 1
    free = blocks * (blocks + 1) / 2 - forced
    share = max(0.0, (density * blocks * (blocks + 1) / 2 - forced) / max(free, 1))
    bits = rng.random((heads, blocks, blocks), np.float32) < share
    bits[:, np.arange(blocks), np.arange(blocks)] = True
    bits[:, :, 0] = True
    return crisp.BlockMask.from_dense(
        torch.from_numpy(bits).to(device), q_len=tokens, kv_len=tokens
    )


@contextlib.contextmanager
def running(model, name, mask):
    if name == "crisp":
        with crisp.use(model, crisp.UserMask(mask)):
            yield
        return
    model.set_attn_implementation(name.partition("-")[0])
    if name != "sdpa-cudnn":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):  # no other: a fallback would be another figure
        yield


def time_prefill(model, ids):
    wait = torch.cuda.synchronize if ids.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    with torch.no_grad():
        model(ids, use_cache=True, logits_to_keep=1)
    wait()
    return (time.perf_counter() - start) * 1e3


def main():
    arguments = parse_arguments()
    model = make_model(arguments)
    device = torch.device(arguments.device)
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    for tokens in arguments.lengths:
        ids = torch.randint(0, 128256, (1, tokens), device=device)
        mask = make_mask(model, tokens, arguments.density, device)
        density = mask.density()
        names = ["crisp", *arguments.baselines]
        times = {name: [] for name in names}
        for round_ in range(arguments.rounds + 1):
            for name in names:
                with running(model, name, mask):
                    ms = time_prefill(model, ids)
                if round_ > 0:
                    times[name].append(ms)
        ours = statistics.median(times["crisp"])
        for name in names:
            median = statistics.median(times[name])
            print(json.dumps({
                "what": "ttft", "attention": name, "tokens": tokens, "ms": round(median, 2),
                "min_ms": round(min(times[name]), 2), "max_ms": round(max(times[name]), 2),
                "over_crisp": round(median / ours, 3), "density": round(density, 4),
                "layers": arguments.layers, "hidden": arguments.hidden, "dtype": arguments.dtype,
                "machine": machine, "torch": torch.__version__,
                "transformers": transformers.__version__, "crisp": crisp.__version__,
                "argv": sys.argv[1:],
            }), flush=True)


if __name__ == "__main__":
    main()
