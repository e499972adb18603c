"""What the README and docs/python.md show runs as pasted, and so do the examples."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMPY = [("docs/python.md", 0)]
TORCH = [("README.md", 0), ("docs/python.md", 1), ("docs/python.md", 2)]


def block(path, index):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / path).read_text(), re.M | re.S)[index]


def run(code, cwd):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], capture_output=True, text=True,
        cwd=cwd, timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("path, index", NUMPY)
def test_numpy_blocks(path, index, tmp_path):
    run(block(path, index), tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("path, index", TORCH)
def test_torch_blocks(path, index, tmp_path):
    run(block(path, index), tmp_path)


def test_every_block_is_tested():
    for path in ("README.md", "docs/python.md"):
        blocks = re.findall(r"^```python\n", (ROOT / path).read_text(), re.M)
        assert len(blocks) == sum(1 for name, _ in NUMPY + TORCH if name == path), path


def test_numpy_example():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/python/on_numpy.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "vertical_slash" in done.stdout and "pooled" in done.stdout


@pytest.mark.torch
@pytest.mark.parametrize("name, word", [
    ("on_torch", "compiled equals eager: True"), ("on_transformers", "elsewhere: {'decode': 8}"),
])
def test_torch_examples(name, word):
    done = subprocess.run(
        [sys.executable, str(ROOT / f"examples/python/{name}.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert word in done.stdout, done.stdout
