"""How torch functions are captured: bytecode, guards, breaks, gradients."""

import dis
import functools
import io
import logging
import math
import platform
import re

import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from torch.nn import functional  # noqa: E402

from course_utils import ir  # noqa: E402
from course_utils.host import Missing  # noqa: E402

M, K, N = 6, 5, 4


pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def graphs_only(monkeypatch):
    """As where no objdump is: all but the machine code, at once."""
    monkeypatch.setattr(ir.torch, "lacking", lambda target: Missing(
        "objdump", "it disassembles", "apt install binutils"))


def example(x, w, b):
    return torch.relu(x @ w + b)


def chatty(x):
    print("first")
    y = x * 2
    print("then")
    return y + 1


def flip(x):
    y = x * 2
    if y.sum() > 0:
        return y + 1
    return y - 1


def helper(x):
    print("inside")
    return x + 1


def calls(x):
    return helper(x * 2) * 3


def echo(x):
    print("echo")
    return x


def twice(x):
    x = echo(x + 1)
    return echo(x * 2) - 1


def deep(x):
    return calls(x + 1) - calls(x)


def loop(x):
    for _ in range(2):
        print("again")
        x = x * 2
    return x


def guarded(x):
    try:
        print("trying")
    finally:
        x = x * 2
    return x


def generator(x):
    yield x * 2


def looping(x):
    return loop(x * 2) * 3


def item(x):
    return x * x.sum().item()


def arguments(dtype=torch.float64, device="meta"):
    return [torch.empty(shape, dtype=dtype, device=device)
            for shape in ((M, K), (K, N), (N,))]


@functools.cache
def learned(fn=example, wrt="all"):
    return ir.ladder(fn, *arguments(), wrt=wrt, fresh=True)


@functools.cache
def trained(target):
    """A training step in float32, compiled for ``target``."""
    return ir.ladder(example, *arguments(torch.float32), wrt="all",
                     target=target, fresh=True)


def graph(ladder, name):
    """The printed graph, as a function."""
    names = {"torch": torch, "device": torch.device}
    exec(ladder[name].text, names)
    module = next(v for v in names.values() if isinstance(v, type)
                  and v is not torch.device)
    return functools.partial(module.forward, None)


def test_the_rungs_of_a_training_step():
    graphs = ("python", "bytecode", "fx", "guards", "joint", "forward",
              "backward", "inductor-forward", "inductor-backward")
    assert trained("cpu").names == (*graphs, "assembly")
    assert trained("h100").names == (*graphs, "ptx", "sass")


@pytest.mark.parametrize("target, blas", [("cpu", "ATen"),
                                          ("h100", "cuBLAS")])
def test_kernels_of_a_training_step(target, blas):
    made = trained(target)
    products = [k for k in made.kernels if "mm" in k.name]
    assert {k.who for k in products} == {blas}
    # y = x w, then dw = x' dy and dx = dy w'; on a CPU b is added at once.
    x, w, y = 4 * M * K, 4 * K * N, 4 * M * N
    first, *rest = products
    assert first.name.startswith("forward/")
    assert first.bytes_read == x + w + 4 * N * (target == "cpu")
    assert {k.name for k in rest} == {"backward/mm"}
    assert sorted((k.bytes_read, k.bytes_written) for k in rest) == sorted(
        [(x + y, w), (y + w, x)])
    ours = [k for k in made.kernels if k.author == "compiler"]
    assert [k.name.partition("/")[0] for k in made.kernels] == sorted(
        [k.name.partition("/")[0] for k in made.kernels], reverse=True)
    assert "relu" in ours[0].ops and ours[0].bytes_written >= M * N
    for kernel in ours:
        name = kernel.name.replace("/", "_" if target == "cpu" else "/")
        assert name.partition("/")[2] or name in made["assembly"].text
        if target == "h100":
            assert 0 < kernel.registers <= 255 and kernel.spills == 0
            assert name.partition("/")[2] in made["sass"].text


def product(x, y):
    return torch.relu(x * y)


def test_the_compiled_training_step_computes_values_and_gradients(
        monkeypatch, graphs_only):
    """Inductor's code, run as shown, agrees with autograd."""
    from torch._inductor import config, cpu_vec_isa, utils

    torch.manual_seed(0)
    x, y, slope = torch.randn(3, 100)
    made = ir.ladder(product, x, y, wrt="all")
    if platform.machine() in ("x86_64", "AMD64"):  # as it was made
        monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list",
                            lambda: [cpu_vec_isa.VecAVX2()])
    as_made = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}

    def call(name, *args):
        names = {"__name__": name}
        with utils.fresh_inductor_cache(), config.patch(as_made):
            exec(made[name].raw, names)
        return names["call"](list(args))

    out, *saved = call("inductor-forward", x, y)
    want = product(x.requires_grad_(), y.requires_grad_())
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(call("inductor-backward", *saved, slope),
                               torch.autograd.grad(want, (x, y), slope))


def origin_lines(x):
    y = torch.sin(x)
    y = functional.silu(y) * 3
    return torch.nn.Softplus()(y)


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_lines_lead_back_to_python(target, graphs_only):
    made = ir.ladder(origin_lines, torch.ones(8), wrt=0, target=target)
    start = origin_lines.__code__.co_firstlineno
    for rung in made:
        assert len(rung.origins) in (0, len(rung.raw.splitlines()))
    for name, words in (
            ("fx", {r"\.sin": 1, r"\.silu": 2, r"\.softplus": 3}),
            ("joint", {"sin.default": 1, "cos.default": 1, "neg": 2,
                       "log1p": 3}),
            ("forward", {"sin.default": 1, "log1p": 3}),
            ("backward", {"cos.default": 1}),
            ("inductor-forward", {r"fused_\w*softplus\w*(\(|.run)": 3}),
            ("inductor-backward", {r"fused_\w*sin_backward|fused_\w*cos": 1})):
        rows = list(zip(made[name].raw.splitlines(), made[name].origins,
                        strict=True))
        for word, line in words.items():
            found = {at for row, at in rows if re.search(word, row)
                     and not row.startswith("#")}
            assert found == {start + line}, (name, word)
    aten = ir.ladder(origin_lines, torch.ones(8), target="h100")["aten"]
    assert set(aten.origins) == {0, start + 1, start + 2, start + 3}


def branches(x):
    x = torch.cos(x)
    y = torch.cond(x.sum() > 0,
                   lambda x: torch.cos(x) + 1,
                   lambda x: torch.sin(x), (x,))
    return torch.cos(y) @ x


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(
        lambda x: torch.sin(x) * 3, x,
        use_reentrant=False)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return torch.cos(x)

    @staticmethod
    def backward(context, slope):
        return slope * 6


def own(x):
    return Own.apply(torch.sin(x))


@pytest.mark.parametrize("fn, options, want", [
    (branches, {}, {"cos": [1, 3, 5], "sin": [4]}),
    (checkpointed, {"wrt": 0}, {"sin": [2], "\\*": [2]}),
    (own, {"wrt": 0}, {"sin": [1], "cos": [-7], "\\*": [-3]})],
    ids=["branches", "checkpoint", "autograd"])
def test_what_is_in_a_branch_or_a_body_has_its_own_line(
        fn, options, want, graphs_only):
    made = ir.ladder(fn, torch.ones(8, 8), target="h100", **options)
    start = fn.__code__.co_firstlineno
    for name in ("fx", "aten") if not options else ("fx",):
        rows = zip(made[name].raw.splitlines(), made[name].origins,
                   strict=True)
        calls = [(row.partition(" = ")[2], at) for row, at in rows]
        for op, lines in want.items():
            call = rf"torch\.(ops\.aten\.)?{op}\b|\w+ {op} \w+;"
            assert sorted(at - start for row, at in calls
                          if re.match(call, row)) == lines


def alike(x, chosen):
    y = torch.sin(x)
    w = y @ x
    z = torch.sin(w)
    x = torch.cond(
        chosen,
        lambda x: torch.sin(x) @ x,
        lambda x: torch.sin(x) + 1, (x,))
    return z @ x, y, w


@pytest.mark.parametrize("target", ["cpu", "h100"])
def test_each_call_of_a_kernel_has_its_own_line(target, graphs_only):
    rung = ir.ladder(alike, torch.ones(8, 8), torch.tensor(True),
                     target=target)["inductor"]
    start = alike.__code__.co_firstlineno
    calls, sources = {}, {}
    for row, at in zip(rung.raw.splitlines(), rung.origins, strict=True):
        if found := re.match(r" +((?:cpp|triton)_\w+)(?:\.run)?\(", row):
            calls.setdefault(found[1], set()).add(at - start)
        if found := re.match(r"(\w+) = async_compile", row):
            sources[found[1]] = at and at - start
    assert sorted(calls.values(), key=len) == [{7}, {1, 3, 6}]
    assert all({sources[name]} == (lines if len(lines) == 1 else {0})
               for name, lines in calls.items())


@pytest.mark.parametrize("target, name", [("cpu", "assembly"),
                                          ("h100", "ptx"), ("h100", "sass")])
def test_where_a_kernel_begins_leads_back_to_python(target, name):
    rung = trained(target)[name]
    rows = {row: at for row, at in zip(rung.raw.splitlines(), rung.origins,
                                       strict=True) if at}
    assert set(rows.values()) == {example.__code__.co_firstlineno + 1}
    ours = [k for k in trained(target).kernels if k.author == "compiler"]
    assert len(rows) == len(ours) > 1


def test_a_helper_in_another_file_counts_for_the_line_that_calls_it(
        graphs_only):
    names = {"torch": torch, "__name__": "__main__"}
    for file, text in (
            ("/tmp/ipykernel_1/11.py",
             "\n" * 40 + "def aid(x):\n    return torch.sin(x)"),
            ("/tmp/ipykernel_1/22.py",
             "def fn(x):\n    y = aid(x)\n    return y * 2")):
        exec(compile(text, file, "exec"), names)
    rung = ir.ladder(names["fn"], torch.ones(8), target="h100")["fx"]
    lines = dict(zip(rung.raw.splitlines(), rung.origins, strict=True))
    assert set(lines.values()) == {0, 2, 3}
    assert [line for row, line in lines.items() if "sin(" in row] == [2]


def test_the_bytecode_is_pythons(graphs_only):
    made = io.StringIO()
    dis.dis(example, file=made)
    assert learned()["bytecode"].raw == made.getvalue()
    bound = functools.partial(example, b=torch.ones(N, device="meta"))
    assert "BINARY_OP" in ir.ladder(
        bound, *arguments(torch.float32)[:2], wrt=0)["bytecode"].text
    module = ir.ladder(torch.nn.Linear(3, 2), torch.ones(2, 3), wrt=0)
    assert "linear" in module["bytecode"].text
    assert "bytecode" not in ir.ladder(torch.neg, torch.ones(2), wrt=0).names


def decorated(x):
    return x + 1


class Called:
    def __call__(self, x):
        return x + 1


@pytest.mark.parametrize("fn, name", [
    (functools.wraps(decorated)(lambda x: decorated(x)), "decorated"),
    (torch.compile(decorated), "decorated"), (Called(), "__call__")],
    ids=["decorated", "compiled", "object"])
def test_bytecode_and_python_are_of_one_function(fn, name, graphs_only):
    made = ir.ladder(fn, torch.ones(2), target="h100")
    assert f"def {name}" in made["python"].text
    assert "LOAD_FAST" in made["bytecode"].text
    assert "CALL" not in made["bytecode"].text  # as a wrapper would


def test_frozen_parameters_have_no_gradient_and_keep_nothing():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(),
                                torch.nn.Linear(8, 8))
    model[0].requires_grad_(False)
    x = torch.ones(4, 8)
    made = ir.ladder(model, x, wrt="params")
    assert made["backward"].text.count("aten.mm") == 1  # of the last weight
    assert made.memory["saved"] == 4 * 8 * 4  # the input of the last layer
    with pytest.raises(ValueError, match="does not compile"):
        ir.ladder(model[0], x, wrt="params")


def test_eager_is_compared_forward_only():
    for given in {"wrt": 0}, {"bogus": 3}:
        with pytest.raises(ValueError, match=f"takes no {[*given][0]}: it"):
            ir.compare_backends(torch.relu, torch.ones(2), backends="eager",
                                **given)


def printing(x):
    print(end="")
    return x + 1


def test_breaks_in_threads_take_turns():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: len(ir.breaks(
            printing, torch.ones(2))), range(6))]
    assert found == [1] * 6 and logging.root.manager.disable == 0


@pytest.mark.parametrize("fn", [
    example, lambda x, w, b: torch.nn.functional.layer_norm(
        x @ w, (N,), b) * torch.tanh(b)], ids=["relu", "layer norm"])
def test_the_printed_graphs_compute_values_and_gradients(fn, graphs_only):
    """Executed as printed, they agree with autograd, in float64."""
    made = learned(fn)
    torch.manual_seed(0)
    args = [torch.randn(a.shape, dtype=a.dtype, requires_grad=True)
            for a in arguments()]
    y, *saved = graph(made, "forward")(*[a.detach() for a in args])
    want = fn(*args)
    slope = torch.randn(want.shape, dtype=want.dtype)
    torch.testing.assert_close(y, want.detach())
    torch.testing.assert_close(
        graph(made, "backward")(*saved, slope),
        torch.autograd.grad(want, args, slope))


def test_what_is_saved(graphs_only):
    for dtype in (torch.float64, torch.bfloat16):
        memory = ir.ladder(example, *arguments(dtype), wrt="all").memory
        inputs = (M * K + K * N) * dtype.itemsize  # for the two products
        assert memory == {"saved": inputs + M * N,  # one bool each
                          "saved inputs": inputs}
    only = ir.ladder(example, *arguments(torch.bfloat16), wrt=2).memory
    assert only == {"saved": M * N, "saved inputs": 0}  # no product's slope


LINEAR = torch.nn.Linear(3, 2)


@pytest.mark.parametrize("fn, args", [
    (LINEAR, [torch.ones(7, 3)]), (LINEAR.forward, [torch.ones(7, 3)]),
    (functools.partial(LINEAR, torch.ones(7, 3)), [])],
    ids=["module", "method", "partial"])
def test_parameters_of_a_module(fn, args, graphs_only):
    made = ir.ladder(fn, *args, wrt="params")
    shapes = re.findall(r"(\w+): \"f32(\[.*?\])\[", made["backward"].text)
    returned = made["backward"].text.rsplit("return ", 1)[1].strip(" ()\n")
    named = dict(shapes)
    assert sorted(named.get(r, "") for r in returned.split(", ")) == [
        "", "[2, 3]", "[2]"]  # none for x
    assert made.memory == {"saved": 7 * 3 * 4, "saved inputs": 7 * 3 * 4}


def test_guards_hold_the_shapes_and_nothing_of_this_run(graphs_only):
    text = learned()["guards"].text
    for name, size, stride in (("x", [M, K], [K, 1]), ("w", [K, N], [N, 1]),
                               ("b", [N], [1])):
        assert re.search(
            rf"TENSOR_MATCH: check_tensor\(L\['{name}'\], .*torch\.float64, "
            rf".*size={re.escape(str(size))}, "
            rf"stride={re.escape(str(stride))}\)", text)
    assert not re.search(r"\d{9,}|0x[0-9a-f]{6,}|\.py\b|/tmp", text)
    again = ir.ladder(example, *arguments(), wrt="all", fresh=True)
    assert again["guards"].text == text
    assert "guards" in ir.ladder(example, *arguments(),
                                 target="cpu").names


@pytest.mark.parametrize("fn, codes, word", [
    (chatty, ['print("first")', 'print("then")'], "print"),
    (flip, ["if y.sum() > 0:"], "data-dependent branching"),
    (calls, ['print("inside")'], "print"),
    (item, ["return x * x.sum().item()"], "item()"),
    (torch.relu, [], ""),
    (lambda x: x + 1, [], ""),
], ids=["prints", "branch", "helper", "item", "builtin", "none"])
def test_breaks(fn, codes, word, capfd):
    found = ir.breaks(fn, torch.ones(3))
    assert list(found.code) == codes
    assert all(word in reason and "\n" not in reason
               for reason in found.reason)
    if codes:
        inner = helper if fn is calls else fn
        assert set(found.function) == {inner.__name__}
        assert 0 < found.index[0] - inner.__code__.co_firstlineno < 6
    assert capfd.readouterr().err == ""  # Dynamo's warnings


def test_breaks_leaves_the_readers_logging_as_it_was():
    logging.disable(logging.INFO)
    try:
        ir.breaks(chatty, torch.ones(3))
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)


def test_breaks_where_the_inside_of_torch_is_another(monkeypatch):
    monkeypatch.delattr(torch._dynamo.exc, "UserError")
    with pytest.raises(Missing, match="torch that this course knows"):
        ir.breaks(chatty, torch.ones(3))


@pytest.mark.parametrize("fn", [chatty, calls, twice, deep])
def test_one_row_for_each_print_that_runs(fn, capsys):
    found = ir.breaks(fn, torch.ones(3))
    assert len(found) == len(capsys.readouterr().out.splitlines())
    assert not found.reason.str.contains("Python runs").any()


def test_as_many_breaks_as_dynamo_has_graphs_less_one():
    counted = torch._dynamo.explain(twice)(torch.ones(3))
    assert len(ir.breaks(twice, torch.ones(3))) == counted.graph_break_count


@pytest.mark.parametrize("fn, left", [
    (loop, loop), (guarded, guarded), (generator, generator),
    (looping, loop)], ids=["loop", "try", "generator", "helper"])
def test_a_function_that_dynamo_gives_up_is_a_break_and_says_so(fn, left):
    row, = ir.breaks(fn, torch.ones(3)).itertuples()
    assert row.reason.endswith(f"; Python runs all of {left.__name__}")
    graphs = torch._dynamo.explain(left)(torch.ones(3)).graph_count
    assert graphs == 0


def test_a_branch_on_a_value_that_is_not_there():
    assert len(ir.breaks(flip, torch.ones(3, device="meta"))) == 1


def test_breaks_runs_the_function_once(capsys):
    ir.breaks(chatty, torch.ones(3))
    assert capsys.readouterr().out == "first\nthen\n"


@pytest.mark.parametrize("fn, line", [
    (flip, 2), (chatty, 1), (lambda x: x.item(), 0)])
def test_the_ladder_names_the_line_of_a_break(fn, line):
    line += fn.__code__.co_firstlineno
    for options in ({}, {"wrt": 0}):
        with pytest.raises(ValueError, match=(
                rf"\(line {line}, in {fn.__name__}\)")) as caught:
            ir.ladder(fn, torch.ones(3), **options)
        assert "\n" not in str(caught.value)


def fails(x):
    return x @ torch.ones(7, 7)


def breaks_then_fails(x):
    print("so far")
    return fails(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("fn", [fails, breaks_then_fails])
def test_what_fails_is_raised_also_behind_a_break(fn, device, capfd):
    with pytest.raises(ValueError, match=(
            rf"{fn.__name__}\(x: .*same reduction dim.*in fails\)")):
        ir.breaks(fn, torch.ones(3, device=device))
    assert capfd.readouterr().err == ""


def names_jax():
    return jax.numpy.ones(3)


def names_functional(n):
    return functional.one_hot(n)


@pytest.mark.parametrize("call, words", [
    (lambda: ir.ladder(example, *arguments(), wrt=3), "from 0 to 2"),
    (lambda: ir.ladder(example, *arguments(), donate=(0,)), "is for JAX"),
    (lambda: ir.ladder(lambda x: x + 1, torch.ones(2, dtype=torch.int32),
                       wrt=0), "floating point"),
    (lambda: ir.ladder(lambda x: x > 0, torch.ones(2), wrt=0),
     "no result is computed"),
    *[(functools.partial(ir.ladder, fn, torch.ones(2, 3), wrt="all"),
       "no result is computed") for fn in (
           lambda x: x, lambda x: x.view(-1), lambda x: (x[0], x.T))],
    (lambda: ir.breaks(fails), "missing 1 required positional argument: 'x'"),
    (lambda: ir.breaks(math.sin, jax.numpy.ones(3)), "JAX function"),
    (lambda: ir.breaks(names_jax), "JAX function"),
    (lambda: ir.ladder(names_functional, 3, target="tpu-v5e"),
     "not one that a torch function compiles for"),
], ids=["argument", "donate", "integer", "constant", "itself",
        "view", "views", "no tensor", "JAX", "names JAX",
        "names a part of torch"])
def test_what_does_not_fit_is_one_sentence(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
