"""host: start() works whatever is missing, and says what is."""

import os
import pickle
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from course_utils import host

ROOT = Path(host.__file__).parents[1]
OURS = ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY",
        "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
SHOW = "import course_utils; print(course_utils.start())"


def python(code, *flags, **environ):
    """Run code in a fresh process; its stdout and stderr."""
    env = {k: v for k, v in os.environ.items() if k not in OURS} | environ
    done = subprocess.run([sys.executable, *flags, "-c", code], text=True,
                          cwd=ROOT, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def site_without(folder, names):
    """A folder with all installed packages but these, their metadata too."""
    for site in {sysconfig.get_path(k) for k in ("purelib", "platlib")}:
        for entry in Path(site).iterdir():
            name = entry.name.partition("-")[0].lower()
            link = folder / entry.name
            if name not in names and not link.exists():
                link.symlink_to(entry)
    return str(folder)


def row(table, name):
    return next(line[16:] for line in table.splitlines()
                if line.startswith(name))


def test_start_shows_one_short_table_and_nothing_on_stderr():
    out, err = python(SHOW)
    assert err == ""
    assert row(out, "python") == platform.python_version()
    assert row(out, "jax.devices()").startswith("[")
    assert len(out.splitlines()) <= 14
    jax = host.version("jax")
    if jax:
        assert row(out, "jax ") == jax


@pytest.mark.parametrize("label, names", [
    ("jax ", ["jax", "jaxlib"]),
    ("torch", ["torch"]),
    ("triton", ["triton"]),
    ("libtpu", ["libtpu"]),
    ("jax CUDA plugin", ["jax_plugins", *(
        f"jax_cuda{n}_{part}" for n in (12, 13)
        for part in ("plugin", "pjrt"))]),
])
def test_start_works_and_says_what_is_missing(label, names, tmp_path):
    out, err = python(SHOW, "-S", PYTHONPATH=site_without(tmp_path, names))
    assert err == ""
    assert row(out, label).startswith("none: pip install")
    if label == "jax ":
        assert "jax is missing" in row(out, "jax.devices()")
    else:
        assert row(out, "jax.devices()").startswith("[")


def test_start_works_without_any_command(tmp_path):
    out, err = python(SHOW, PATH=str(tmp_path), CXX="")
    assert err == ""
    assert row(out, "C++ compiler") == "none: install g++"
    assert row(out, "objdump") == "none: install binutils"
    assert row(out, "GPU").startswith("none: all runs on the CPU")


def test_start_sets_what_the_reader_has_not():
    show = f"; import os; print([os.environ.get(k) for k in {OURS!r}])"
    code = "import course_utils; course_utils.start()" + show
    out, _ = python(code)
    platforms, log, skip, preallocate, unchecked = eval(out)
    assert (platforms, unchecked) in (("cpu", "1"), ("cuda,cpu", None))
    assert (log, skip, preallocate) == ("3", "1", "false")
    out, _ = python(code, JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="0")
    assert eval(out)[:2] == ["cpu", "0"]


def in_process(monkeypatch, tpu, gpu):
    for name in OURS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(host, "_has_tpu", lambda: tpu)
    monkeypatch.setattr(host, "_has_gpu", lambda: gpu)
    assert host._set_environment() is True
    return os.environ.get("JAX_PLATFORMS"), os.environ.get(OURS[2])


@pytest.mark.parametrize("tpu, gpu, expected", [
    (False, False, ("cpu", "1")), (False, True, ("cuda,cpu", "1")),
    (True, False, (None, None)), (True, True, (None, None))])
def test_platform_by_device(monkeypatch, tpu, gpu, expected):
    assert in_process(monkeypatch, tpu, gpu) == expected
    assert host._set_environment() is False  # a second call sets nothing


def test_a_driver_without_cudnn_is_no_gpu(monkeypatch):
    import ctypes
    loaded = []

    class Driver:
        def __init__(self, name):
            loaded.append(name)
            if "cudnn" in name and self.cudnn is None:
                raise OSError(name)

        def cuInit(self, flags):
            return 0

        def cuDeviceGetCount(self, count):
            count._obj.value = 1
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(host, "_present", lambda *names: "0.10.2")
    Driver.cudnn = None
    assert host._has_gpu() is False
    Driver.cudnn = "9"
    assert host._has_gpu() is True
    monkeypatch.setattr(host, "_present", lambda *names: None)
    assert host._has_gpu() is False
    assert "libcuda.so.1" in loaded


def test_other_versions_than_the_pages_are_said(monkeypatch):
    from tools.books import pins

    monkeypatch.setattr(host, "_present", {
        "jax": "0.10.2", "torch": "2.13.0+cpu"}.get)
    assert host._other_versions() == ""
    monkeypatch.setattr(host, "_present", {"torch": "2.13.0"}.get)
    assert host._other_versions() == ""  # jax is missing, which is said
    monkeypatch.setattr(host, "_present", {"jax": "0.7.2"}.get)
    assert "jax 0.10.2 and torch 2.13.0" in host._other_versions()
    pinned = {pin.name: str(pin.specifier) for pin in pins()}
    assert all(pinned[name] == f"=={version}"
               for name, version in host.WRITTEN_WITH.items())


def test_jax_imported_too_early_is_said_once():
    pytest.importorskip("jax")
    out, _ = python("import jax; import course_utils; "
                    "print(course_utils.start()); print('again');"
                    "print(course_utils.start())", JAX_PLATFORMS="cpu")
    first, again = out.split("again")
    assert "jax was imported before start()" in row(first, "note")
    assert "note" not in again
    assert "note" not in python(SHOW)[0]


def test_start_is_quick():
    out, _ = python("import time; from time import perf_counter as now; "
                    "a = now(); import course_utils; course_utils.start(); "
                    "b = now(); import sys; print(b - a, 'torch' in "
                    "sys.modules)")
    seconds, torch = out.split()
    assert torch == "False"
    assert float(seconds) < 10  # about 1 s; a shared machine may be slow


def test_import_is_light_and_quick():
    heavy = ("jax", "torch", "triton", "matplotlib", "pandas", "ipywidgets",
             "numpy")
    code = ("from time import perf_counter as wall, process_time as cpu; "
            "a, c = wall(), cpu(); import course_utils; "
            "b, d = wall(), cpu(); import sys; "
            f"print(min(b - a, d - c), "
            f"[m for m in {heavy!r} if m in sys.modules])")
    runs = [python(code)[0].split(" ", 1) for _ in range(5)]
    assert {heavy.strip() for _, heavy in runs} == {"[]"}
    # CPU time where it is less: a busy machine makes the wall's time longer.
    assert min(float(seconds) for seconds, _ in runs) < 0.1


def test_host_shows_itself():
    here = host.Host("3.11.7", "Linux x86_64", "0.10.2", None, None, None,
                     None, "/usr/bin/g++", None, "H100", "[<CpuDevice>]",
                     "local")
    assert str(here) == repr(here) and len(here.rows()) == 12
    assert "&lt;CpuDevice&gt;" in here._repr_html_()
    assert ("torch", "none: pip install torch, where it has a wheel") in (
        here.rows())
    with pytest.raises(AttributeError):
        here.gpu = "H200"
    assert pickle.loads(pickle.dumps(here)) == here


def test_missing_is_a_sentence_and_travels():
    lack = host.Missing("triton", "the kernels are Triton's", "Run: pip")
    assert str(lack) == ("triton is missing: the kernels are Triton's. "
                         "Run: pip")
    again = pickle.loads(pickle.dumps(lack))
    assert (again.what, again.why, again.fix) == (lack.what, lack.why,
                                                  lack.fix)
    with pytest.raises(host.Missing, match="pip install no_such_module"):
        host.need("no_such_module.part", "this test wants it")
    assert host.need("json.decoder", "a test").__name__ == "json.decoder"


def test_version():
    from importlib.metadata import version
    assert host.version("pytest") == version("pytest")
    assert host.version("no-such-distribution") is None


def test_tools(monkeypatch, tmp_path):
    for name in ("objdump", "g++"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert host.tool("objdump") == str(tmp_path / "objdump")
    assert host.compiler() == str(tmp_path / "g++")
    (tmp_path / "g++").unlink()
    assert host.compiler() is None


@pytest.mark.parametrize("environ, place", [
    ({}, "local"), ({"CI": "true"}, "CI"), ({"CI": "false"}, "local"),
    ({"CI": "1", "COLAB_RELEASE_TAG": "x"}, "Colab")])
def test_place(monkeypatch, environ, place):
    for name in ("CI", "COLAB_RELEASE_TAG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for name in ("_devices", "_gpu_name", "_set_environment"):
        monkeypatch.setattr(host, name, lambda: "")
    assert host.start().place == place


@pytest.mark.parametrize("error, said", [
    (RuntimeError(), "none: RuntimeError"), (OSError("\n"), "none: OSError"),
    (ValueError("\n one \n two"), "none: one ")])
def test_a_back_end_that_fails_is_one_line_whatever_it_says(
        monkeypatch, error, said):
    def fail():
        raise error

    monkeypatch.setattr(host, "need", lambda *_: type(
        "jax", (), {"devices": staticmethod(fail)}))
    assert host._devices() == said
