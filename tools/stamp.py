"""Write the setup cell and the Colab badge into the notebooks.

Both come from here, and the repository's address from ``[project.urls]`` of
pyproject.toml, so a change of either is one edit and `make stamp`.
"""

import re
import tomllib
from pathlib import Path

import nbformat

from tools.books import ROOT, notebooks

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "project"]["urls"]["Repository"]
EMPTY = 'PACKED, SHA256 = "", ""  # the package, in files by `make colab`'
SETUP = f'''#@title Setup: finds course_utils, or brings it
import base64
import hashlib
import importlib.util
import io
import pathlib
import subprocess
import sys
import tempfile
import zipfile

{EMPTY}

spec = importlib.util.find_spec("course_utils")
if spec and spec.origin:
    pass  # it is installed, and no folder that has only its name
elif pathlib.Path("../course_utils/__init__.py").is_file():  # a clone
    sys.path.insert(0, "..")
elif PACKED:
    text, folder = "".join(PACKED.split()), tempfile.mkdtemp()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256, (
        "The package inside this notebook is damaged: get the file again.")
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(text))) as file:
        file.extractall(folder)
    sys.path.insert(0, folder)
else:
    source = (
        "git+{REPOSITORY}")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet",
                           "--no-deps", source])
    assert not done.returncode, (
        "course_utils is not here, and pip cannot bring it (see above): "
        "open the notebook in a clone, or upload one that carries it.")

import course_utils
host = course_utils.start()
assert host.jax and host.torch, "this notebook needs jax and torch"
host'''
METADATA = {"cellView": "form", "jupyter": {"source_hidden": True},
            "tags": ["nbval-ignore-output"]}
_BADGE = re.compile(r"\[!\[Open In Colab\]\([^)]*\)\]\([^)]*\)", re.I)


def badge(name: str) -> str:
    """Markdown that opens the notebook called ``name`` in Colab."""
    at = "https://colab.research.google.com/"
    where = REPOSITORY.removeprefix("https://github.com/")
    return (f"[![Open In Colab]({at}assets/colab-badge.svg)]"
            f"({at}github/{where}/blob/main/notebooks/{name})")


def stamp(nb: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """``nb`` with the setup cell and badge of the course, changed in place.

    The setup cell is the one called "setup"; the badge replaces the one in
    the first cell. ValueError where either is not there.
    """
    setup = [cell for cell in nb.cells if cell.get("id") == "setup"]
    if len(setup) != 1 or not _BADGE.search(nb.cells[0].source):
        raise ValueError(f"{name} needs one cell with the id setup, and a "
                         "Colab badge in its first cell.")
    setup[0].source, setup[0].metadata = SETUP, nbformat.from_dict(METADATA)
    nb.cells[0].source = _BADGE.sub(lambda _: badge(name),
                                    nb.cells[0].source)
    return nb


def stamp_file(path: Path) -> bool:
    """Stamp the notebook at ``path``; whether that changed it."""
    before = path.read_text(encoding="utf-8")
    nb = nbformat.reads(before, as_version=4)
    after = nbformat.writes(stamp(nb, path.name)) + "\n"
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


if __name__ == "__main__":
    for book in notebooks():
        print(f"{book.stem:24}",
              "stamped" if stamp_file(book) else "as it was")
