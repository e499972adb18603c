"""q, k, v and out are read and written where they lie: by address, and by peak memory."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import crisp_prefill as crisp
from crisp_prefill import _core


class Spy:
    """Stands in for _core.Tensor and notes the addresses that reach the library."""

    def __init__(self):
        self.addresses = []
        self.make = _core.Tensor

    def __call__(self, data, *rest):
        self.addresses.append(data)
        return self.make(data, *rest)


@pytest.mark.parametrize("layout", ["dense", "head-major", "slice"])
def test_addresses(monkeypatch, qkv, layout):
    arrays = [*qkv(batch=2, q_len=140), np.zeros((2, 140, 4, 64), np.float32)]
    if layout == "head-major":
        arrays = [np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2) for a in arrays]
    elif layout == "slice":
        arrays = [np.concatenate([a, a], axis=1)[:, 7:147] for a in arrays]
    spy = Spy()
    monkeypatch.setattr(_core, "Tensor", spy)
    crisp.attention(*arrays[:3], out=arrays[3])
    starts = {a.__array_interface__["data"][0] + b * a.strides[0] for a in arrays for b in (0, 1)}
    assert spy.addresses and set(spy.addresses) <= starts


def test_peak_memory():
    """A copy of any of the four would add its 64 MiB; the call's own memory is far below that."""
    code = textwrap.dedent("""
        import resource, numpy as np, crisp_prefill as crisp
        q = np.random.default_rng(0).standard_normal((2, 8, 8192, 128), np.float32).swapaxes(1, 2)
        k = np.random.default_rng(1).standard_normal((2, 8, 8192, 128), np.float32).swapaxes(1, 2)
        v, out = k.copy(), np.ones((2, 8192, 8, 128), np.float32)
        bits = np.zeros((8, 128, 64), bool)
        bits[:, np.arange(128), np.arange(128) % 64] = True
        mask = crisp.BlockMask.from_dense(bits, q_len=[8192] * 2, kv_len=[8192] * 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        crisp.attend(q, k, v, mask, out=out)
        assert (out != 1).any()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32 * 1024, f"{done.stdout} KiB more"
