"""The installed package: where it is, what importing it brings in, its command line and its types."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import crisp_prefill as crisp

PACKAGE = Path(crisp.__file__).parent


def run(*words, **how):
    return subprocess.run(
        [sys.executable, "-m", "crisp_prefill", *words], capture_output=True, text=True, **how
    )


def test_it_is_the_installed_one():
    assert sys.prefix in str(PACKAGE)
    assert crisp.__version__ == importlib.metadata.version("crisp-prefill")
    assert (PACKAGE / "py.typed").exists() and (PACKAGE / "_core.pyi").exists()


def test_import_needs_numpy_only():
    code = "import sys, crisp_prefill; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_one_binary_for_every_python():
    assert [path.name for path in PACKAGE.glob("_core*.so")] == ["_core.abi3.so"]


def test_command_line():
    assert run("--version").stdout == f"crisp {crisp.__version__}\n"
    done = run("--help")
    assert done.returncode == 0 and "prefill" in done.stdout and "capture and compare" in done.stdout
    done = run("prefill", "missing.safetensors")
    assert done.returncode == 2 and "missing.safetensors" in done.stderr
    script = Path(sys.prefix) / "bin" / "crisp-prefill"
    done = subprocess.run([script, "doctor"], capture_output=True, text=True)
    assert done.returncode == 0 and crisp.cpu_target() in done.stdout


def test_command_line_reads_what_python_writes(tmp_path):
    import json

    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, 1500, 64), np.float32) for heads in (4, 2, 2))
    for name, a in zip("qkv", (q, k, v)):
        np.save(tmp_path / f"{name}.npy", a)
    paths = [str(tmp_path / f"{name}.npy") for name in "qkv"]
    done = run("prefill", *paths, "--json")
    assert done.returncode == 0, done.stderr
    _, report = crisp.attention(
        *(a.swapaxes(0, 1)[None] for a in (q, k, v)), return_report=True
    )
    (policy,) = json.loads(done.stdout)["policies"]
    assert [head["num_blocks"] for head in policy["heads"]] == [
        row["num_blocks"] for row in report.rows()
    ]


def test_stub_lists_what_the_extension_has():
    from crisp_prefill import _core

    stub = (PACKAGE / "_core.pyi").read_text()
    for name in dir(_core):
        if not name.startswith("_"):
            assert f"class {name}:" in stub or f"def {name}(" in stub, name
            for member in dir(getattr(_core, name)) if isinstance(getattr(_core, name), type) else []:
                if not member.startswith("_"):
                    assert f"    {member}: " in stub or f"def {member}(" in stub, (name, member)


def test_threads_run_at_the_same_time():
    """The GIL is free during work: Python code of another thread goes on."""
    import threading
    import time

    import numpy as np

    q = np.random.default_rng(0).standard_normal((1, 4096, 8, 64), np.float32)
    done = threading.Event()

    def work():
        crisp.attention(q, q, q, policy=crisp.Dense(), num_threads=1)
        done.set()

    start, ticks = time.perf_counter(), 0
    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    took = time.perf_counter() - start
    assert took > 0.02
    # With the GIL held the loop could tick about once; it ticks every few milliseconds at worst.
    assert ticks > took / 0.02
