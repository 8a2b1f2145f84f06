"""Whose a function is, and what it takes from around it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course_utils._front import front_end, outside, uncompiled

torch = pytest.importorskip("torch")

tanh = np.tanh  # a global, and in f below an attribute


def test_what_lies_outside_a_function_is_what_it_loads():
    def f(x):
        return [x.tanh() + jax.numpy.pi * later(y) for y in x]

    assert outside(f) == ({}, {"jax": jax})  # later has no value yet
    later = len
    assert outside(f) == ({"later": len}, {"jax": jax})


def ones_torch(n):
    return [torch.ones(k, 3) for k in range(n)]


def ones_jax(n):
    return list(map(lambda k: jnp.ones((k, 3)), range(n)))


def through(helper):
    return lambda n: helper(n)


def calls_torch(n):
    return ones_torch(n)


class Layer(torch.nn.Module):
    def forward(self, n):
        return n


class Holder:
    def __init__(self, value):
        self.value = value

    def method(self, n):
        return ones_torch(n)


@pytest.mark.parametrize("fn, args, whose", [
    (ones_torch, (3,), "torch"), (ones_jax, (3,), "JAX"),
    (through(ones_torch), (3,), "torch"), (through(ones_jax), (3,), "JAX"),
    (calls_torch, (3,), "torch"), (Holder(0).method, (3,), "torch"),
    (functools.partial(calls_torch, 3), (), "torch"),
    (Layer(), (3,), "torch"), (Layer().forward, (3,), "torch"),
    (torch.eye, (3,), "torch"), (jnp.eye, (3,), "JAX"),
    (torch.compile(lambda n: n), (3,), "torch"),
    (jax.vmap(lambda n: n), (3,), "JAX"), (lambda x: x, (3,), "JAX"),
    (lambda x: x, (np.ones(3),), "JAX"),
    (lambda x: x, ({"w": [torch.ones(3)]},), "torch"),
    (lambda x: x, (jax.ShapeDtypeStruct((3,), "float32"),), "JAX"),
    # What is at hand tells first: a helper may know both.
    (lambda x: (ones_torch(x), ones_jax(x)), (torch.ones(3),), "torch"),
], ids=lambda value: getattr(value, "__name__", None))
def test_whose_a_call_is(fn, args, whose):
    assert front_end(fn, args) == whose


def test_both_is_an_error():
    with pytest.raises(TypeError, match="mix torch and JAX"):
        front_end(lambda a, b: a, (torch.ones(3), jnp.ones(3)))


def test_functions_that_call_each_other_end():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert front_end(even, (3,), "neither") == "neither"


@dataclasses.dataclass
class Node:
    value: object
    up: object = None
    unset: object = dataclasses.field(init=False)


def test_what_holds_itself_ends():
    node = Node(torch.ones(3))
    node.up = [node, {"again": node}]
    assert front_end(lambda x: x @ node.value, (node,)) == "torch"
    assert front_end(lambda x: x @ node.value, (3,)) == "torch"
    deep = []
    for _ in range(5000):
        deep = [deep]
    assert front_end(lambda x: x, (deep,)) == "JAX"


def either(x):
    return torch.sin(x) if isinstance(x, torch.Tensor) else jnp.sin(x)


def plainly(x):
    return x.detach().numpy() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("fn", [
    either, lambda x: either(x), lambda x: plainly(x) * 2],
    ids=["both", "a helper's both", "a helper's torch"])
def test_a_name_in_the_code_does_not_outweigh_numpy(fn):
    assert front_end(fn, (np.ones(3),)) == "JAX"
    assert front_end(fn, (torch.ones(3),)) == "torch"


def test_what_wraps_a_compiled_function_is_not_taken_for_it():
    layer, shift = Layer(), lambda n: n + 1
    assert uncompiled(torch.compile(layer)) is layer
    assert uncompiled(compiled := torch.compile(shift)) is shift

    @functools.wraps(compiled)
    def twice(n):
        return compiled(compiled(n))

    assert uncompiled(twice) is twice and uncompiled(shift) is shift
