"""Whatever is missing: what can come still comes, the rest says why not."""

import os
import re
import shutil

import pytest

from tests.test_host import python, site_without

JAX = """
import course_utils; course_utils.start()
import jax, jax.numpy as jnp
from course_utils import Missing, ir
x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
def double(x): return x + x
"""
TORCH = """
import course_utils; course_utils.start()
import torch
from course_utils import Missing, ir
x = torch.empty(64, 64, device="meta")
def double(x): return x + x
"""
REFUSED = """
try:
    ir.ladder(double, x, target={target!r})
    print("no error")
except Missing as missing:
    print(missing)
print(ir.targets().loc[{target!r}, {front!r}])
"""


def hidden(tmp_path, *names):
    return {"PYTHONPATH": site_without(tmp_path, names),
            "COURSE_CACHE": str(tmp_path / "cache")}


@pytest.mark.parametrize("names, target, said", [
    (("libtpu",), "tpu-v5e", "libtpu is missing"),
    (("jax_plugins", "jax_cuda13_plugin", "jax_cuda13_pjrt",
      "jax_cuda12_plugin", "jax_cuda12_pjrt"), "h100", "CUDA plugin")])
def test_jax_without_a_compiler(names, target, said, tmp_path):
    out, err = python(JAX + REFUSED.format(target=target, front="JAX") + """
table = ir.compare_backends(double, x)
row = table[table.author == "missing"].iloc[0]
print(row.who); print(len(table))""", "-S", **hidden(tmp_path, *names))
    refused, state, who, rows = out.splitlines()
    assert said in refused and "pip install" in refused
    assert said in state and said in who
    assert int(rows) >= 3  # the other back ends still came


def test_h100_without_triton_ends_at_ptx(tmp_path):
    out, _ = python(JAX + """
made = ir.ladder(double, x, target="h100")
print(made.names[-2:], repr(made.machine_code)); print(made["sass"])""",
                    "-S", **hidden(tmp_path, "triton"))
    assert out.startswith("('ptx', 'sass') ''")
    assert "triton is missing" in out


def test_torch_without_triton_keeps_its_graphs(tmp_path):
    out, _ = python(TORCH + REFUSED.format(target="h100", front="torch"),
                    "-S", **hidden(tmp_path, "triton"))
    assert out.count("triton is missing") == 2


@pytest.mark.parametrize("code, absent", [
    (JAX, ("objdump",)), (TORCH, ("objdump",)),
    (TORCH, ("g++", "c++", "clang++", "gcc", "cc"))])
def test_cpu_without_a_tool_says_which(code, absent, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in ("objdump", "g++", "gcc", "c++", "as", "ld", "sh"):
            found = shutil.which(tool, path=folder)
            if found and tool not in absent and not (tools / tool).exists():
                (tools / tool).symlink_to(found)
    out, _ = python(code + """
made = ir.ladder(double, x)
print(made.names); print(made["assembly"]); print(repr(made.machine_code))
""", PATH=str(tools), CXX="", COURSE_CACHE=str(tmp_path / "cache"))
    names, *reason, machine = out.strip().splitlines()
    assert "'assembly'" in names and machine == "''"
    assert "is missing" in " ".join(reason)


def test_either_framework_alone(tmp_path):
    out, _ = python(TORCH + "print(ir.ladder(double, x).names)", "-S",
                    **hidden(tmp_path, "jax", "jaxlib", "jax_plugins"))
    assert "'fx'" in out
    (tmp_path / "other").mkdir()
    out, _ = python(JAX + "print(ir.ladder(double, x).names)", "-S",
                    **hidden(tmp_path / "other", "torch"))
    assert "'assembly'" in out


def test_a_recording_stands_in_and_says_so(tmp_path):
    code = JAX + """
from course_utils.compilers import recorded
from pathlib import Path
recorded.FOLDER = Path({folder!r})
made = ir.ladder(double, x, target="tpu-v5e")
print(made); print(made["bundles"].text.count("vadd"))
print(made.kernels)"""
    source = tmp_path / "double.py"  # a function has source in a file only
    source.write_text("def double(x):\n    return x + x\n")
    code = code.replace("def double(x): return x + x\n",
                        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
                        "from double import double\n")
    folder = str(tmp_path / "recorded")
    made, _ = python(code.format(folder=folder),
                     COURSE_RECORD="1")
    assert "recorded" not in made.splitlines()[1]
    shown, _ = python(code.format(folder=folder),
                      "-S", **hidden(tmp_path, "libtpu"))
    assert "make record" in shown and "libtpu" in shown
    assert made.splitlines()[-2:] == shown.splitlines()[-2:]
    assert int(made.splitlines()[-2]) > 0
    other = code.replace("from double import double",
                         "from double import double as d\n"
                         "def double(x): return x - x\n")
    with pytest.raises(AssertionError, match="libtpu is missing"):
        python(other.format(folder=folder), "-S",
               **hidden(tmp_path, "libtpu"))


def test_the_courses_kernels_are_recorded(tmp_path):
    """Without triton the notebooks' hand-written kernel still shows."""
    out, _ = python("""
import course_utils; course_utils.start()
import torch
from course_utils import ir, kernels
args = [torch.empty(s, dtype=torch.bfloat16, device="meta")
        for s in ((512, 1024), (1024, 2048), (2048,), (512, 2048))]
for target, code in (("h100", "HGMMA"), ("mi300x", "v_mfma")):
    made = ir.ladder(kernels.matmul_bias_relu, *kernels.linear_args(*args),
                     target=target)
    print("make record" in made.recorded, code in made.machine_code)
""", "-S", **hidden(tmp_path, "triton"))
    assert out.split() == ["True"] * 4


def test_recordings_are_by_the_pinned_tools():
    from course_utils.compilers import recorded
    from tools.books import absolute_paths, pins

    versions = {pin.name: str(pin.specifier).removeprefix("==")
                for pin in pins()}
    names = [path.name.partition(".")[0]
             for path in recorded.FOLDER.glob("*.json.gz")]
    assert names and recorded.targets()
    for name in names:
        made, whence = recorded.find(name)
        assert recorded.COMMAND in whence
        used = re.findall(
            r"(libtpu|jaxlib|triton|torch) (\d+\.[\d.]*\d)", whence)
        assert used and all(versions[tool] == v for tool, v in used)
        assert made.kernels and all(rung.text for rung in made.rungs)
        assert not any(absolute_paths(rung.raw) for rung in made.rungs)
