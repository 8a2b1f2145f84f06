"""Lines of an IR lead to the reader's file, wherever that lies."""

import importlib.machinery
import types

import pytest

from course_utils import ir

JAX = """
import jax, jax.numpy as jnp
def fn(x):
    y = jnp.sin(x)
    return jnp.var(y, axis=0)
ARGS = jax.ShapeDtypeStruct((8, 8), jnp.float32),
"""
TRITON = """
import torch, triton
import triton.language as tl
@triton.jit
def fn(x, n):
    i = tl.arange(0, 128)
    m = i < tl.cdiv(n, 2)
    tl.store(x + i, tl.sort(tl.load(x + i, mask=m, other=0.0)), mask=m)
ARGS = torch.empty(1000, device="meta"), 1000
"""


def climbed(file, source, target):
    file.parent.mkdir()
    file.write_text(source)
    module = types.ModuleType("written")
    module.__file__ = str(file)
    importlib.machinery.SourceFileLoader("written", str(file)).exec_module(
        module)
    return ir.ladder(module.fn, *module.ARGS, target=target)


@pytest.mark.parametrize("source, target", [
    (JAX, "cpu"), (TRITON, "h100"), (TRITON, "mi300x")])
def test_a_path_may_hold_any_letter(source, target, tmp_path):
    pytest.importorskip("triton" if source is TRITON else "jax")
    plain, odd = (climbed(tmp_path / folder / file, source, target)
                  for folder, file in (("a", "kern.py"), (
                      "코스 é=1", "my kern.py")))
    assert plain.names == odd.names
    for one, other in zip(plain, odd, strict=True):
        linked = [sum(map(bool, rung.origins)) for rung in (one, other)]
        assert linked[0] == linked[1], one.name
        assert set(one.origins) == set(other.origins)
    assert any(plain[plain.names[-1]].origins)
