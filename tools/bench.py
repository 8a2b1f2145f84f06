"""Speed of counter and ladder, as ratios in one run: `make bench`.

Each row is timed against a yardstick on the same machine in the same minute;
only those of large models and warm calls are seconds, with generous limits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

LLAMA = {"layers": 126, "d": 16384, "heads": 128, "kv": 8, "ff": 53248,
         "vocab": 128256}  # Llama 3 405B, as models.toml has it
GPT2 = {"layers": 12, "d": 768, "heads": 12, "kv": 12, "ff": 3072,
        "vocab": 50257}


def torch_decoder(sizes: dict[str, int]) -> Any:
    """A gated decoder on meta tensors, one torch.nn.Module."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    d, head = sizes["d"], sizes["d"] // sizes["heads"]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            def linear(n, m):
                return nn.Linear(n, m, bias=False)
            self.q, self.o = linear(d, d), linear(d, d)
            self.k = linear(d, sizes["kv"] * head)
            self.v = linear(d, sizes["kv"] * head)
            self.gate, self.up = linear(d, sizes["ff"]), linear(
                d, sizes["ff"])
            self.down = linear(sizes["ff"], d)
            self.first, self.second = nn.RMSNorm(d), nn.RMSNorm(d)

        def forward(self, x):
            h = self.first(x)
            q, k, v = (part(h).unflatten(-1, (-1, head)).transpose(1, 2)
                       for part in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            h = self.second(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    with torch.device("meta"):
        return nn.Sequential(nn.Embedding(sizes["vocab"], d), *(
            Layer() for _ in range(sizes["layers"])), nn.Linear(
                d, sizes["vocab"], bias=False)).to(torch.bfloat16)


def jax_decoder(sizes: dict[str, int]) -> tuple[Callable, tuple]:
    """A decoder's layers, scanned, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    d, head = sizes["d"], sizes["d"] // sizes["heads"]

    def layer(x, w):
        def heads(a, n):
            return a.reshape(*a.shape[:2], n, head)
        q = heads(x @ w["q"], sizes["heads"])
        k, v = (heads(x @ w[name], sizes["kv"]) for name in ("k", "v"))
        x = x + jax.nn.dot_product_attention(q, k, v).reshape(
            x.shape) @ w["o"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w[
            "down"], None

    def decoder(x, weights):
        return jax.lax.scan(layer, x, weights)[0]

    shapes = {"q": (d, d), "o": (d, d), "k": (d, sizes["kv"] * head),
              "v": (d, sizes["kv"] * head), "gate": (d, sizes["ff"]),
              "up": (d, sizes["ff"]), "down": (sizes["ff"], d)}
    def spec(shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return decoder, (spec((1, 1024, d)), {
        name: spec((sizes["layers"], *shape))
        for name, shape in shapes.items()})


def rows() -> list[tuple[str, float, float, str]]:
    """(what, figure, limit, unit) of each measurement."""
    import course_utils

    course_utils.start()
    import jax
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from course_utils import flops, timing

    gpt2 = torch_decoder(GPT2)
    tokens = torch.zeros(1, 1024, dtype=torch.long, device="meta")

    def theirs():
        with FlopCounterMode(display=False):
            gpt2(tokens).sum().backward()

    found = [("GPT-2-small step: ours / FlopCounterMode",
              timing.best(lambda: flops.count(gpt2, tokens, wrt="params"))
              / timing.best(theirs), 1.0, "x")]

    decoder, args = jax_decoder(GPT2)

    def bare():
        jax.clear_caches()
        jax.make_jaxpr(decoder)(*args)

    def counted():
        jax.clear_caches()
        flops.count(decoder, *args)

    found.append(("scanned decoder: ours / bare jax.make_jaxpr",
                  timing.best(counted) / timing.best(bare), 1.5, "x"))
    # Processor time, which other work on the machine leaves alone: counting
    # is one thread, so it is what a machine to itself would wait.
    llama = torch_decoder(LLAMA)
    found.append(("Llama 3 405B, forward and backward, torch", timing.watch(
        lambda: flops.count(llama, tokens, wrt="params")).cpu, 3.0, "s"))
    decoder, args = jax_decoder(LLAMA)

    def whole():
        jax.clear_caches()
        flops.count(decoder, *args, wrt="all")

    found.append(("Llama 3 405B, forward and backward, JAX",
                  timing.watch(whole).cpu, 3.0, "s"))
    return found


def bare_compile() -> int:
    """What every rung of a ladder on the CPU takes, by jax's public calls.

    Runs in a worker, as a ladder's compiler does.
    """
    import subprocess
    import tempfile
    from pathlib import Path

    import jax

    decoder, args = jax_decoder(GPT2)
    traced = jax.jit(decoder).trace(*args)
    lowered = traced.lower()
    texts = [str(traced.jaxpr), lowered.as_text(),
             lowered.as_text(dialect="hlo")]
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile({"xla_dump_to": folder,
                                    "xla_dump_hlo_pass_re": ".*"})
        texts += [compiled.as_text(), *(
            file.read_text() for file in Path(folder).glob("*.[tl][xl]*"))]
        for file in Path(folder).glob("*.o"):
            texts.append(subprocess.run(
                ["objdump", "-d", "--no-show-raw-insn", file],
                capture_output=True, text=True, check=True).stdout)
    return sum(map(len, texts))


def ladder_rows() -> list[tuple[str, float, float, str]]:
    """A ladder on the CPU: cold beside the bare calls, and warm."""
    import jax

    from course_utils import ir, timing
    from course_utils.compilers import worker, xla

    decoder, args = jax_decoder(GPT2)

    def bare():
        worker.stop()
        worker.call("xla", "tools.bench:bare_compile",
                    environment=xla._environment("cpu"))

    def cold():
        worker.stop()
        jax.clear_caches()
        ir.ladder(decoder, *args, fresh=True)

    def seconds(run: Callable) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    # In turn, as other work on the machine disturbs whole minutes.
    ours, theirs = zip(*((seconds(cold), seconds(bare)) for _ in range(5)),
                       strict=True)
    return [("cold ladder, CPU: ours / the bare calls",
             min(ours) / min(theirs), 1.3, "x"),
            ("warm ladder, CPU",
             timing.best(ir.ladder, decoder, *args), 1.0, "s")]


def main() -> int:
    bad = False
    for what, figure, limit, unit in [*rows(), *ladder_rows()]:
        bad |= figure > limit
        print(f"{what:46} {figure:6.2f} {unit}, at most {limit} {unit}"
              f"{'' if figure <= limit else '  TOO SLOW'}", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
