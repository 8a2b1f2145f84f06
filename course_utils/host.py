"""Where am I: versions, GPU, compiler, Colab, CI. Floor 0."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_TPU_PCI_IDS = {"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f",
                "0x0076"}  # jax 0.10.2, jax/_src/hardware_utils.py
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
WRITTEN_WITH = {"jax": "0.10.2", "torch": "2.13.0"}  # as requirements.txt
_LABELS = {"cuda_plugin": "jax CUDA plugin", "compiler": "C++ compiler",
           "gpu": "GPU", "devices": "jax.devices()"}
_FIXES = {"cuda_plugin": f"pip install {_PLUGINS[0]}, where it has a wheel",
          "compiler": "install g++", "objdump": "install binutils",
          "gpu": "all runs on the CPU, Triton kernels in the interpreter"}


class Missing(RuntimeError):
    """Something this machine does not have, and how to bring it.

    ``what`` is missing ("triton"), ``why`` says what needs it, ``fix`` is the
    one command or sentence that helps.
    """

    def __init__(self, what: str, why: str, fix: str) -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(f"{what} is missing: {why}. {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Missing, (self.what, self.why, self.fix)


@dataclass(frozen=True, repr=False)
class Host:
    """What this machine has; None where it has none. Shows as one table.

    ``compiler`` and ``objdump`` are paths, ``devices`` is what
    ``jax.devices()`` says, ``note`` a warning or ""; the rest are versions.
    """

    python: str
    platform: str
    jax: str | None
    torch: str | None
    triton: str | None
    libtpu: str | None
    cuda_plugin: str | None
    compiler: str | None
    objdump: str | None
    gpu: str | None
    devices: str
    place: str
    note: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """(name, what is here, or what its absence means) for each row."""
        # A path is the machine's own affair; the page shows the tool's name.
        return [(_LABELS.get(key, key), value.rpartition(os.sep)[2] if value
                 else "none: " + _FIXES.get(
                     key, f"pip install {key}, where it has a wheel"))
                for key, value in vars(self).items() if value != ""]

    def __str__(self) -> str:
        return "\n".join(f"{name:16}{value}" for name, value in self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = (f"<tr><td>{escape(name)}<td style='text-align:left'>"
                f"{escape(value)}" for name, value in self.rows())
        return f"<table>{''.join(rows)}</table>"


def start() -> Host:
    """Prepare this process for jax and torch and say what is here.

    Call it before importing either. What the reader has set stays, and a
    machine with TPUs keeps JAX's own choice of device.
    """
    late = _set_environment() and "jax" in sys.modules
    colab = "google.colab" in sys.modules or "COLAB_RELEASE_TAG" in os.environ
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return Host(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        jax=_present("jax"), torch=_present("torch"),
        triton=_present("triton"), libtpu=_present("libtpu"),
        cuda_plugin=_present(*_PLUGINS), compiler=compiler(),
        objdump=tool("objdump"), gpu=_gpu_name(), devices=_devices(),
        place="Colab" if colab else "CI" if ci else "local",
        note="jax was imported before start(): restart the kernel and run "
             "this cell first" if late else _other_versions())


def _other_versions() -> str:
    """What a reader must know whose compilers are not the pages' own."""
    if all(_present(name) is None or _present(name).startswith(tested)
           for name, tested in WRITTEN_WITH.items()):
        return ""
    tools = " and ".join(map(" ".join, WRITTEN_WITH.items()))
    return (f"the text was written with {tools}; other versions name and cut "
            "some things differently, so a cell here may differ from it")


def version(distribution: str) -> str | None:
    """The installed version of a distribution ("jax"), or None."""
    from importlib import metadata
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def compiler() -> str | None:
    """Path of a C++ compiler: $CXX, else g++, clang++ or c++."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((path for n in names if n and (path := tool(n))), None)


def tool(name: str) -> str | None:
    """Path of a command ("objdump"), or None."""
    return shutil.which(name)


def need(module: str, why: str, fix: str = "") -> Any:
    """Import a module that may be absent; raise ``Missing`` if it is."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise Missing(name, why, fix or f"Run: pip install {name}") from error


def _set_environment() -> bool:
    """Set what the reader has not; say whether anything was set."""
    wanted = {"TF_CPP_MIN_LOG_LEVEL": "3",  # XLA's C++ log, else on stderr
              "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch shares it
    if not _has_tpu():
        wanted["TPU_SKIP_MDS_QUERY"] = "1"  # else libtpu asks the network
        if "JAX_PLATFORMS" not in os.environ:
            wanted["JAX_PLATFORMS"] = "cuda,cpu" if _has_gpu() else "cpu"
        if not _has_gpu():  # else jax before 0.9 shows how its plugin fails
            wanted["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    unset = {k: v for k, v in wanted.items() if k not in os.environ}
    os.environ.update(unset)
    return bool(unset)


def _has_tpu() -> bool:
    """Whether JAX would find a TPU: the same look at the PCI bus."""
    return any(
        vendor.read_text().strip() == "0x1ae0"
        and vendor.with_name("device").read_text().strip() in _TPU_PCI_IDS
        for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"))


def _has_gpu() -> bool:
    """Whether plugin, cuDNN, driver and a device are there and load.

    JAX told to use CUDA without one of them fails instead of using the CPU.
    """
    import ctypes
    wheels = (Path(p) / "nvidia/cudnn/lib/libcudnn.so.9" for p in sys.path)
    cudnn = next((str(p) for p in wheels if p.exists()), "libcudnn.so.9")
    count = ctypes.c_int(0)
    try:
        ctypes.CDLL(cudnn)
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceGetCount(ctypes.byref(count))
    except OSError:
        return False
    return count.value > 0 and _present(*_PLUGINS) is not None


def _gpu_name() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True,
                               timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return ", ".join(names.splitlines()) or None


def _devices() -> str:
    try:
        return str(need("jax", "it lists the devices").devices())
    except Exception as error:  # a back end that does not start is a fact
        said = str(error).strip() or type(error).__name__
        return f"none: {said.splitlines()[0]}"


def _present(*distributions: str) -> str | None:
    """The version of the first that can be imported, or None."""
    for name in distributions:
        try:
            if importlib.util.find_spec(name.replace("-", "_")):
                return version(name) or "of unknown version"
        except ImportError:  # an import hook that refuses it
            pass
    return None
