"""Run site/colab in a rebuilt Colab: its GPU image, then its CPU image.

.colab/ gets the versions of tools/colab.txt on Python 3.13, which must be
installed (PYTHON names it). Each file runs alone in an empty folder, caches
empty, proxies leading nowhere. Takes minutes, so it is no part of CI. The
images' hardware is not imitated: no GPU is here, only its packages.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import colab
from tools.books import ROOT, clean_env
from tools.execute import chosen
from tools.install import version_of

VENV, PINS = ROOT / ".colab", ROOT / "tools" / "colab.txt"
GPU_ONLY = ("triton", "jax-cuda12-plugin", "jax-cuda12-pjrt")
NOWHERE = {name: "http://127.0.0.1:9" for name in (
    "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
RUN = """
import sys, time, nbformat
from nbclient import NotebookClient
nb, start = nbformat.read(sys.argv[1], as_version=4), time.monotonic()
NotebookClient(nb, timeout=600, kernel_name="python3",
               store_widget_state=False).execute()
host = next(cell for cell in nb.cells if cell.id == "setup").outputs[-1]
assert "Colab" in host.data["text/plain"]
print(f"{sys.argv[1]:28} {time.monotonic() - start:6.1f} s  ok", flush=True)
"""


def pip(*args: str) -> None:
    subprocess.run([VENV / "bin" / "python", "-m", "pip", *args, "--quiet",
                    "--disable-pip-version-check"], check=True)


def run(path: Path) -> bool:
    """Whether one file runs to its end where nothing but it is."""
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        env = clean_env(Path(folder, "caches")) | NOWHERE | {
            "COLAB_RELEASE_TAG": "rebuilt", "HOME": folder}
        Path(folder, "content").mkdir()
        Path(folder, "content", path.name).write_bytes(path.read_bytes())
        done = subprocess.run(
            [VENV / "bin" / "python", "-Xfrozen_modules=off", "-c", RUN,
             path.name], env=env, cwd=Path(folder, "content"), text=True,
            stderr=subprocess.PIPE)
    if done.returncode:
        print(f"{path.name:28} FAILED\n{done.stderr[-3000:]}", flush=True)
    return not done.returncode


def main() -> int:
    if version_of(str(VENV / "bin" / "python")) != (3, 13):
        python = os.getenv("PYTHON") or "python3.13"
        if version_of(python) != (3, 13):
            sys.exit(f"{python} is not Python 3.13, which Colab has: install "
                     "it, or name it with PYTHON=/path/to/python3.13")
        subprocess.run([python, "-m", "venv", "--clear", VENV], check=True)
    colab.main()
    done = []
    for image in ("GPU", "CPU"):
        print(f"== Colab's {image} image", flush=True)
        if image == "GPU":
            if index := os.getenv("TORCH_INDEX"):  # a CPU build will do
                pip("install", "--no-deps", "--index-url", index,
                    re.search(r"^torch==\S+", PINS.read_text(), re.M)[0])
            pip("install", "-r", str(PINS))
        else:
            pip("uninstall", "--yes", *GPU_ONLY)
        done += [run(colab.SITE / path.name)
                 for path in chosen(sys.argv[1:])]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
