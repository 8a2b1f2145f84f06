"""The notebooks, the pins, and whether outputs are compared exactly here."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
CACHES = ("COURSE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
          "COURSE_PROGRESS", "IPYTHONDIR", "JUPYTER_CONFIG_DIR",
          "JUPYTER_DATA_DIR")
# What a user may have set for these changes outputs.
SETTINGS = ("COURSE_", "JAX_", "XLA_", "TRITON_", "TORCH", "PYTORCH_",
            "LIBTPU_", "TPU_", "TF_", "MPLBACKEND", "MATPLOTLIBRC")
ABSOLUTE = re.compile(
    r"(?<![\w.:/<])/(?:home|root|tmp|usr|opt|work|var|mnt|Users)/\w+|"
    r"\b[A-Z]:\\\w+")


def notebooks() -> list[Path]:
    """The course's notebooks, in order."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def pins(text: str = "") -> list[Requirement]:
    """The lines of ``text``, or of requirements.txt."""
    text = text or (ROOT / "requirements.txt").read_text()
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def unmet_pins() -> list[str]:
    """What is installed otherwise than pinned, or not at all."""
    unmet, have = [], {}
    for dist in metadata.distributions():  # of two, the first is imported:
        # setuptools, once imported, has copies of others at the path's end
        name = dist.name.lower().replace("_", "-").replace(".", "-")
        have.setdefault(name, dist.version)
    for pin in pins():
        version = have.get(pin.name, "nothing")
        # "2.13.0+cpu" is another build of the pinned "2.13.0"
        if ((not pin.marker or pin.marker.evaluate())
                and f"=={version.partition('+')[0]}" != str(pin.specifier)):
            unmet.append(f"{pin} (here: {version})")
    return unmet


def not_reference() -> str:
    """Why outputs are not compared exactly here; "" where they are."""
    here = " ".join((platform.python_implementation(), platform.system(),
                     platform.machine(), platform.python_version()))
    if not here.startswith("CPython Linux x86_64 3.11."):
        return f"this is {here}, not CPython 3.11 on x86-64 Linux"
    if Path("/dev/nvidiactl").exists():
        return "this machine has an NVIDIA GPU, and the outputs say so"
    unmet = unmet_pins()
    return f"not the pinned versions: {', '.join(unmet)}" if unmet else ""


def clean_env(scratch: Path) -> dict[str, str]:
    """os.environ with every cache empty and no setting of a user's own."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(SETTINGS)}
    return kept | {name: str(scratch / name) for name in CACHES}


def in_ci() -> bool:
    return os.getenv("CI", "").lower() not in ("", "0", "false")


def absolute_paths(value: object) -> list[str]:
    """The machine's own paths in the strings of a notebook or an output."""
    if isinstance(value, str):
        return ABSOLUTE.findall(value)
    if isinstance(value, dict):
        value = [part for kind, part in value.items()
                 if not kind.startswith("image/")]
    if not isinstance(value, list):
        return []
    return [path for part in value for path in absolute_paths(part)]
