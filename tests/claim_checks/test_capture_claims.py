"""Claims about tracing and compiling, settled with JAX and PyTorch here."""

import functools
import time

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
import jax.numpy as jnp  # noqa: E402

from course_utils import example, ir  # noqa: E402


def counted(fn):
    """``fn``, and how often Python ran it."""
    runs = []

    @functools.wraps(fn)
    def counting(*args):
        runs.append(1)
        return fn(*args)

    return counting, runs


def collector():
    """A torch.compile backend that keeps each graph and compiles nothing."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    return keep, graphs


def test_eager_code_is_no_graph_until_it_is_traced():  # 3, 19, 42
    def layer(x):
        return torch.relu(x + 1)

    keep, graphs = collector()
    layer(torch.ones(2))
    assert not graphs  # Python ran, and nobody wrote anything down
    torch.compile(layer, backend=keep)(torch.ones(2))
    assert [node.op for node in graphs[0].graph.nodes] == [
        "placeholder", "call_function", "call_function", "output"]


def test_tracing_lowering_and_compiling_are_separate_steps():  # 18, 21, 29
    step = jax.jit(example.function())
    traced = step.trace(*example.specs()[:3])
    assert [str(e.primitive) for e in traced.jaxpr.eqns].count(
        "dot_general") == 1
    lowered = traced.lower()
    assert "stablehlo.dot_general" in lowered.as_text()
    assert not hasattr(lowered, "memory_analysis")  # nothing is compiled yet
    assert hasattr(lowered.compile(), "memory_analysis")


def test_the_einsum_of_the_notes_converts_its_bf16():  # 33, 37
    def multiply(x, y):
        return jnp.einsum("bf,fd->db", x, y)

    hlo = ir.ladder(multiply, jax.ShapeDtypeStruct((128, 256), jnp.float32),
                    jax.ShapeDtypeStruct((256, 16), jnp.bfloat16))["hlo"].text
    assert "f32[256,16]{1,0} convert(" in hlo
    assert "lhs_contracting_dims={0}, rhs_contracting_dims={1}" in hlo
    assert "ROOT" in hlo and "f32[16,128]{1,0} dot(" in hlo


def test_python_runs_once_for_each_shape_and_dtype():  # 28, 32
    fn, runs = counted(lambda x: x * 2)
    step = jax.jit(fn)
    for x in (jnp.ones(3), jnp.zeros(3), jnp.ones(4), jnp.ones(4, "int32")):
        step(x)
    assert len(runs) == 3  # the second call found its executable ready
    with jax.disable_jit():
        step(jnp.ones(3)), step(jnp.ones(3))
    assert len(runs) == 5  # outside jit, Python runs every time


def test_the_first_call_pays_for_the_compiler():  # 31
    step = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    x = jnp.ones((64, 64))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        step(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    assert seconds[0] > 5 * min(seconds[1:])


def test_one_large_product_gains_nothing_from_jit():  # 30
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    kernel, = ir.ladder(jnp.matmul, square, square).kernels
    assert kernel.author == "library"  # the same routine, jit or not


def test_a_print_breaks_the_graph_in_two():  # 42
    def talks(x):
        x = x + 1
        print("now")
        return x * 2

    keep, graphs = collector()
    torch.compile(talks, backend=keep)(torch.ones(2))
    assert len(graphs) == 2
    keep, _ = collector()
    with pytest.raises(Exception, match="print"):
        torch.compile(talks, backend=keep, fullgraph=True)(torch.ones(2))


def test_aot_autograd_makes_a_backward_graph_before_it_is_needed():  # 43
    from functorch.compile import aot_function, make_boxed_func

    graphs = []

    def keep(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes
                       if node.op == "call_function"])
        return make_boxed_func(graph.forward)

    x = torch.ones(3, 3, requires_grad=True)
    y = aot_function(lambda x: torch.relu(x @ x), keep, keep)(x)
    y.sum().backward()
    forward, backward = graphs
    products = torch.ops.aten.mm.default
    assert forward.count(products) == 1 and backward.count(products) == 2


def test_torch_compile_serves_inference_as_well():  # 27
    with torch.inference_mode():
        keep, graphs = collector()
        y = torch.compile(lambda x: x + 1, backend=keep)(torch.ones(2))
    assert len(graphs) == 1 and not y.requires_grad


def test_a_jax_call_returns_an_array_with_shape_before_its_value():  # 69-71
    @jax.jit
    def long(x):
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ x), x)

    x = jnp.eye(500)
    long(x).block_until_ready()  # compile
    start = time.perf_counter()
    y = long(x)
    early, returned = y.is_ready(), time.perf_counter() - start
    assert y.shape == (500, 500) and y.dtype == jnp.float32
    later = y + 1  # may be queued behind it
    y.block_until_ready()
    done = time.perf_counter() - start
    assert not early and returned < done / 2
    assert y.is_ready() and later.shape == y.shape


def test_async_dispatch_is_the_default_on_cpus():  # 74b
    assert jax.config.values["jax_cpu_enable_async_dispatch"] is True


def test_a_small_op_costs_its_call_and_not_its_work():  # 25
    def best(x):
        seconds = []
        for _ in range(30):
            start = time.perf_counter()
            x + x
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    one, thousand, many = (best(torch.ones(n)) for n in (1, 10**3, 10**6))
    assert thousand < 10 * one < many  # 1,000 times the work, then 10**6
