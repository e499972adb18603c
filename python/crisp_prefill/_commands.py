"""The commands `capture` and `compare`: a model of transformers on a prompt of one's own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NAMES = ("capture", "compare")


class Refused(Exception):
    """Bad use or bad input: exit code 2."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="crisp-prefill", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    capture = commands.add_parser("capture", help="q, k, v of layers as .safetensors for `crisp prefill`")
    compare = commands.add_parser("compare", help="TTFT, density, coverage, error, KL against dense")
    for command in (capture, compare):
        command.add_argument("model", help="name or folder of a model, or a .gguf file")
        command.add_argument("prompt", type=Path, help="text file")
        command.add_argument("--tokens", type=int, metavar="N", help="use the first N tokens only")
        command.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                             help="of the model (default: %(default)s)")
        command.add_argument("--device", default="cpu", help="of torch (default: %(default)s)")
    capture.add_argument("--layers", help="comma-separated, default: all")
    capture.add_argument("--out", type=Path, required=True, metavar="DIR")
    compare.add_argument("--policies", default="crisp,flexprefill",
                         help="comma-separated of dense, crisp, flexprefill (default: %(default)s)")
    compare.add_argument("--next-tokens", type=int, default=64, metavar="N",
                         help="length of the continuation, cut from the end (default: %(default)s)")
    compare.add_argument("--repeats", type=int, default=1, help="timed runs, best counts")
    compare.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _load(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": name}
    if name.endswith(".gguf"):
        path = Path(name)
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=getattr(torch, dtype))
    except (OSError, ValueError) as error:
        raise Refused(f"model {name!r} cannot be loaded: {error}") from error
    return model.to(device).eval(), tokenizer


def _read_ids(path: Path, tokenizer: Any, limit: int | None, device: str) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"prompt {path} cannot be read: {error}") from error
    ids = tokenizer(text, return_tensors="pt").input_ids
    if limit is not None:
        if not 1 <= limit <= ids.shape[1]:
            raise Refused(f"--tokens is {limit}, expected 1 to {ids.shape[1]}, the prompt's tokens")
        ids = ids[:, :limit]
    return ids.to(device)


def _layers(text: str | None, model: Any) -> list[int] | None:
    count = model.config.get_text_config().num_hidden_layers
    if text is None:
        return None
    try:
        layers = [int(word) for word in text.split(",")]
    except ValueError:
        raise Refused(f"--layers is {text!r}, expected whole numbers with commas") from None
    if not all(0 <= layer < count for layer in layers):
        raise Refused(f"--layers is {text!r}, expected numbers from 0 to {count - 1}")
    return layers


def _capture(arguments: argparse.Namespace) -> None:
    from rich.progress import track
    from safetensors.torch import save_file

    from .transformers import capture

    model, tokenizer = _load(arguments.model, arguments.dtype, arguments.device)
    ids = _read_ids(arguments.prompt, tokenizer, arguments.tokens, arguments.device)
    layers = _layers(arguments.layers, model)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = capture(model, ids, layers)
    for layer, one in track(sorted(found.items()), description="writing", console=_console()):
        path = arguments.out / f"layer{layer:02d}.safetensors"
        save_file(
            {"q": one.q, "k": one.k, "v": one.v}, path,
            metadata={"scale": repr(one.scale), "layer": str(layer), "model": arguments.model},
        )
        print(path)


def _compare(arguments: argparse.Namespace) -> None:
    from rich.progress import Progress

    from .policies import policy_from_name
    from .transformers.compare import compare

    try:
        policies: list[Any] = [policy_from_name(name) for name in arguments.policies.split(",")]
    except ValueError as error:
        raise Refused(f"--policies: {error}") from None
    model, tokenizer = _load(arguments.model, arguments.dtype, arguments.device)
    ids = _read_ids(arguments.prompt, tokenizer, arguments.tokens, arguments.device)
    with Progress(console=_console()) as bar:
        task = bar.add_task("", total=1 + 2 * len(policies))
        started = False

        def step(words: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=words)
            started = True

        try:
            rows = compare(model, ids, policies, continuation=arguments.next_tokens,
                           repeats=arguments.repeats, progress=step)
        except ValueError as error:
            raise Refused(str(error)) from error
        bar.update(task, advance=1)
    if arguments.json:
        document = {"model": arguments.model, "prompt": str(arguments.prompt),
                    "tokens": ids.shape[1] - arguments.next_tokens,
                    "next_tokens": arguments.next_tokens, "rows": [row.row() for row in rows]}
        print(json.dumps(document, allow_nan=False))
    else:
        _print_table(rows, ids.shape[1] - arguments.next_tokens, arguments.next_tokens)


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)


def _print_table(rows: list[Any], tokens: int, next_tokens: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{tokens} tokens of prompt, {next_tokens} of continuation")
    for name in ("policy", "TTFT ms", "speed-up", "density", "coverage", "worst", "error", "worst",
                 "KL", "same top-1", "perplexity"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(
            row.policy, f"{row.ttft_ms:.0f}", f"{row.speed_up:.2f}x", f"{row.density:.1%}",
            f"{row.coverage:.4f}", f"{row.worst_coverage:.4f}", f"{row.error:.4f}",
            f"{row.worst_error:.4f}", f"{row.kl:.2e}", f"{row.agreement:.1%}", f"{row.perplexity:.3f}",
        )
    Console(width=120).print(table)


def main(words: list[str]) -> int:
    """Runs `capture` or `compare`: 0 ok, 2 bad use or bad input with the reason on stderr."""
    arguments = _parser().parse_args(words)
    try:
        {"capture": _capture, "compare": _compare}[arguments.command](arguments)
    except Refused as error:
        print(f"crisp-prefill: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"crisp-prefill: error: {error.name} is not installed, needed by "
              f"{arguments.command}: pip install 'crisp-prefill[transformers]'", file=sys.stderr)
        return 2
    return 0
