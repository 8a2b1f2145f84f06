"""Setup cell and badge are one; a file by `make colab` runs on its own."""

import base64
import functools
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO

import nbformat
import pytest
from nbformat import v4
from packaging.requirements import Requirement

from tests.test_environment import PROJECT
from tests.test_host import python, site_without
from tools import colab, colab_check, stamp
from tools.books import ROOT, notebooks, pins

NAME = "07_x.ipynb"
ASKED = """
import subprocess
subprocess.run = lambda command, **_: print("pip", *command[-2:]) or (
    type("Done", (), {"returncode": 1}))
"""
START = "import course_utils\nhost = course_utils.start()"
# Where the package comes from, without starting jax and torch.
SAY = "import course_utils\nprint(course_utils.__file__)\n" + (
    "from course_utils import chips\nprint(chips.get('h100').sm_count)")


def book():
    """The smallest notebook that can be stamped, its addresses old."""
    return v4.new_notebook(cells=[
        v4.new_markdown_cell(
            "# T\n\n[![Open in Colab](https://a/b.svg)](https://a/x.ipynb) "
            "[g](../docs/glossary.md#fusion) ![p](../figures/p.png) [u](#T) "
            "[n](02_ops_to_ir.ipynb) [o](https://openxla.org/x)", id="title"),
        v4.new_code_cell("old", id="setup", metadata={"tags": ["old"]}),
        v4.new_code_cell("1 + 1", id="one", execution_count=2, outputs=[
            v4.new_output("stream", text="2")])])


@functools.cache
def carried():
    """The setup cell of a notebook that carries the package."""
    return colab.carrying(book(), NAME, colab.package()).cells[1].source


def run(source, folder, **environ):
    """Run a setup cell as one finds it: no network, no installed copy."""
    cell = source.split(START)[0] + SAY
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-S", "-"], cwd=folder, env=env | environ,
        input=ASKED + cell, text=True, capture_output=True)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_setup_and_badge_are_the_templates(path):
    nb = nbformat.read(path, as_version=4)
    again = stamp.stamp(nbformat.from_dict(nb), path.name)
    assert [cell.source for cell in nb.cells if cell.id == "setup"] == [
        stamp.SETUP]
    assert again == nb == nbformat.read(path, as_version=4)
    assert stamp.badge(path.name) in nb.cells[0].source


def test_stamping_writes_both_and_nothing_else():
    nb, old = stamp.stamp(book(), NAME), book()
    assert nb.cells[1].source == stamp.SETUP
    assert nb.cells[1].metadata == stamp.METADATA
    assert stamp.badge(NAME) in nb.cells[0].source
    assert "https://a/" not in nb.cells[0].source
    assert nb.cells[0].source.partition(" [g]")[2] == (
        old.cells[0].source.partition(" [g]")[2])
    assert nb.cells[2] == old.cells[2] | {"id": nb.cells[2].id}
    nb.cells[1].id = "start"
    with pytest.raises(ValueError, match="one cell with the id setup"):
        stamp.stamp(nb, NAME)


def test_a_file_is_stamped_once(tmp_path):
    path = tmp_path / NAME
    nbformat.write(book(), path)
    assert stamp.stamp_file(path) and not stamp.stamp_file(path)


def test_the_address_is_kept_in_one_place():
    """And a stamp is short enough to read, even where it is folded."""
    owner = stamp.REPOSITORY.rsplit("/", 2)[1]
    assert stamp.SETUP.count(stamp.REPOSITORY) == 1
    assert max(map(len, carried().splitlines())) <= 79
    said = [path.name for folder in ("tools", "course_utils", "tests")
            for path in (ROOT / folder).rglob("*.py")
            if f"github.com/{owner}" in path.read_text(encoding="utf-8")]
    assert said == []


def test_the_package_is_whole_and_the_same_each_time():
    data = colab.package()
    assert data == colab.package()
    with zipfile.ZipFile(BytesIO(data)) as file:
        inside = {name: file.read(name) for name in file.namelist()}
    there = {path.relative_to(ROOT).as_posix(): path.read_bytes()
             for path in (ROOT / "course_utils").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts
             and not path.name.startswith(".")}  # an editor's own
    assert inside == there
    assert "course_utils/recorded/index.json" in there


def test_the_file_carries_it_and_no_outputs():
    data = colab.package()
    nb = colab.carrying(book(), NAME, data)
    text, digest = re.search(r'PACKED = """\n(.*?)"""\nSHA256 = "(\w+)"$',
                             nb.cells[1].source, re.S | re.M).groups()
    assert base64.b64decode(text) == data
    assert hashlib.sha256(text.replace("\n", "").encode()).hexdigest() == (
        digest)
    assert nb.cells[1].source.replace(
        f'PACKED = """\n{text}"""\nSHA256 = "{digest}"', stamp.EMPTY) == (
        stamp.SETUP)
    assert nb.cells[2].outputs == [] and nb.cells[2].execution_count is None
    here = stamp.REPOSITORY
    links = re.findall(r"\]\(([^)]*)\)", nb.cells[0].source)[2:]
    assert links == [
        f"{here}/blob/main/docs/glossary.md#fusion",
        f"{here}/raw/main/figures/p.png", "#T",
        f"{here}/blob/main/notebooks/02_ops_to_ir.ipynb",
        "https://openxla.org/x"]


@pytest.mark.parametrize("code", [
    "`f[i](x)`", "``f`[i](x)``", "`a\nf[i](x)`",
    "```python\nf[i](x)\n\n`[p](q)\n```", "text\n\n```\n![p](q.png)\n```\n"])
def test_code_in_markdown_stays_and_links_around_it_hold(code):
    link = "[`ir.ladder`](../docs/a.md)"
    there = f"[`ir.ladder`]({stamp.REPOSITORY}/blob/main/docs/a.md)"
    assert colab.online(code) == code
    assert colab.online(f"{link} one ` tick\n\n{code}\n\n{link} `") == (
        f"{there} one ` tick\n\n{code}\n\n{there} `")


def test_alone_in_an_empty_folder_it_finds_what_it_carries(tmp_path):
    done = run(carried(), tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    where, cores = done.stdout.split()
    assert where.startswith(str(tmp_path)) and cores == "132"


def test_a_clone_or_an_installed_copy_goes_first(tmp_path):
    clone, site = tmp_path / "clone", tmp_path / "site"
    for root in (clone, site):
        with zipfile.ZipFile(BytesIO(colab.package())) as file:
            file.extractall(root)
    (clone / "notebooks").mkdir()
    done = run(carried(), clone / "notebooks")
    assert os.path.realpath(done.stdout.split()[0]).startswith(str(clone))
    done = run(carried(), clone / "notebooks", PYTHONPATH=str(site))
    assert done.stdout.split()[0].startswith(str(site))


def test_a_folder_that_has_only_the_name_is_no_package(tmp_path):
    """Not beside the notebook, and not where a clone would be."""
    here = tmp_path / "notebooks"
    for folder in (here / "course_utils", tmp_path / "course_utils"):
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    done = run(carried(), here, TMPDIR=str(tmp_path), PYTHONPATH=str(here))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "132"
    done = run(stamp.SETUP, here, PYTHONPATH=str(here))
    assert done.stdout.startswith("pip --no-deps git+")


@pytest.mark.parametrize("damage", [
    lambda cell: cell.replace("\nUEsD", "\nUEsE", 1),
    lambda cell: re.sub(r"\n[^\n]{76}\n", "\n", cell, count=1),
    lambda cell: re.sub(r'SHA256 = "\w', 'SHA256 = "x', cell)])
def test_a_damaged_file_is_refused_in_one_sentence(damage, tmp_path):
    cell = damage(carried())
    assert cell != carried()
    done = run(cell, tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode and done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "AssertionError: The package inside this notebook is damaged: get "
        "the file again.")


def test_a_notebook_that_carries_nothing_asks_pip(tmp_path):
    done = run(stamp.SETUP, tmp_path)
    assert done.stdout == f"pip --no-deps git+{stamp.REPOSITORY}\n"
    assert done.stderr.splitlines()[-1].startswith(
        "AssertionError: course_utils is not here, and pip cannot bring it")


def test_colabs_versions_satisfy_the_floors():
    """Floors of what it runs; in its GPU image also those of triton."""
    have = {pin.name: str(pin.specifier).removeprefix("==")
            for pin in pins(colab_check.PINS.read_text())}
    extra = PROJECT["optional-dependencies"]["compilers"]
    floors = [Requirement(line) for line in PROJECT["dependencies"] + [
        line for line in extra if line.startswith("triton")]]
    assert {need.name for need in floors} <= {*have}
    assert [str(need) for need in floors
            if not need.specifier.contains(have[need.name])] == []
    assert {*colab_check.GPU_ONLY} <= {*have}


def test_without_triton_the_cards_say_the_same(tmp_path):
    """From recordings, to the byte: Colab's CPU image has no triton."""
    code = ("import course_utils; course_utils.start()\n"
            "from course_utils import example\n"
            "for n in (3, 4, 5): print(example.artefact(n))\n"
            "print(example.launch().where)")
    here, _ = python(code)
    without, _ = python(
        code, "-S", PYTHONPATH=site_without(tmp_path, ["triton"]))
    *cards, where = without.splitlines()
    assert where == "recorded" and cards == here.splitlines()[:-1]
