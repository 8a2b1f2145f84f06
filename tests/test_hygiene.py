"""The rules that keep a notebook true, each one a function of a notebook.

A rule returns its complaints. Every rule is also fed a notebook that breaks
it and nothing else.
"""

import ast
import base64
import json
import re
import shutil
import statistics
import subprocess
from fnmatch import fnmatch

import nbformat
import pytest
from nbformat import v4

from course_utils import plot
from tools import execute
from tools.books import ROOT, absolute_paths, notebooks

IGNORE = "nbval-ignore-output"
VIEW = "application/vnd.jupyter.widget-view+json"
# Written so that this file does not match itself.
HOSTS = re.compile(
    r"pypi[.]org|pythonhosted[.]org|download[.]pytorch[.]org|"
    r"anaconda[.]org|deb[.]debian[.]org|registry[.]npmjs|"
    r"libtpu-release[s]|jax-release[s]")
AUTHORSHIP = re.compile(
    r"\b(?:sub)?agen[t]s?\b|\bclaud[e]\b|\bchatgp[t]\b|\bcopilo[t]\b|"
    r"\b(?:AI|LLM)[ -](?:assisted|generated|written)\b|"
    r"\b(?:this|earlier|previous|another) sessio[n]\b", re.I)
MACHINE = re.compile(r"(?<![\w.:/<])/(?:work|root|home/\w+|Users/\w+)(?=/\w)")


def cells(nb, kind):
    return [cell for cell in nb.cells if cell.cell_type == kind]


def prose(nb):
    """The markdown cells as one text."""
    return "\n\n".join(cell.source for cell in cells(nb, "markdown"))


def words(text):
    """How many words a reader reads: no code fences, no tags, no URLs."""
    text = re.sub(r"```.*?```|<[^>]+>|\]\([^)]*\)", " ", text, flags=re.S)
    return len([w for w in text.split() if re.search(r"\w", w)])


def headings(text):
    """(level, text) of each heading, outside code fences."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return [(len(marks), title.strip()) for marks, title in
            re.findall(r"^(#{1,6})\s+(.+)$", text, re.M)]


def lines(cell):
    return [line for line in cell.source.splitlines() if line.strip()]


def one_title(nb, path):
    titles = [title for level, title in headings(prose(nb)) if level == 1]
    return [] if len(titles) == 1 else [f"{len(titles)} H1: {titles}"]


def meaningful_ids(nb, path):
    ids = [cell.get("id", "") for cell in nb.cells]
    bad = [name for name in ids
           if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
           or not re.search("[a-z]{3}", name)
           or re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}.*)?", name)]
    return bad + [f"{name} twice" for name in set(ids) if ids.count(name) > 1]


def counts_in_order(nb, path):
    counts = [cell.execution_count for cell in cells(nb, "code")]
    wanted = [*range(1, len(counts) + 1)]
    return [] if counts == wanted else [f"execution counts {counts}"]


def quiet_outputs(nb, path):
    return [f"{cell.id}: {out.get('name', out.output_type)}"
            for cell in cells(nb, "code") for out in cell.outputs
            if out.output_type == "error" or out.get("name") == "stderr"]


def no_widget_state(nb, path):
    views = [cell.id for cell in cells(nb, "code") for out in cell.outputs
             if VIEW in out.get("data", {})]
    return views + ["metadata.widgets"] * ("widgets" in nb.metadata)


def no_absolute_path(nb, path):
    return sorted(set(absolute_paths(nb)))


def pictures_are_the_ones_named(nb, path):
    """The digest a picture carries is the one in the text beside it."""
    found = []
    for cell in cells(nb, "code"):
        for out in cell.outputs:
            data = out.get("data", {})
            named = re.match(r"<Picture ([0-9a-f]{8}): ",
                             data.get("text/plain", ""))
            if "image/png" in data and not (named and (
                    b"Description\0" + named[1].encode()
                    in base64.b64decode(data["image/png"]))):
                found.append(f"{cell.id}: not the picture of its text")
    return found


def narrow_code(nb, path):
    return [f"{cell.id}: {line}" for cell in cells(nb, "code")
            for line in cell.source.splitlines() if len(line) > 79]


def short_cells(nb, path):
    sizes = sorted(len(lines(cell)) for cell in cells(nb, "code"))
    if not sizes:
        return ["no code"]
    median = statistics.median(sizes)
    ninetieth = sizes[-(-9 * len(sizes) // 10) - 1]
    return ([f"median cell of {median} lines"] * (median > 6)
            + [f"90th percentile of {ninetieth} lines"] * (ninetieth > 20))


def read_in_time(nb, path):
    text = prose(nb)
    core = re.split(r"^#+\s+Going deeper", text, flags=re.M)[0]
    found, whole = [], words(text)
    if not 1000 <= whole <= 4000:
        found.append(f"{whole} words, not 1,000 to 4,000")
    if words(core) > 2000:
        found.append(f"core path of {words(core)} words, over 2,000")
    return found


def under_a_megabyte(nb, path):
    size = len(json.dumps(nb, ensure_ascii=False, indent=1).encode())
    return [] if size < 10**6 else [f"{size:,} bytes"]


def ignored_cells_assert(nb, path):
    code = cells(nb, "code")
    loose = [c for c in code if IGNORE in c.metadata.get("tags", [])
             or "NBVAL_" in c.source]
    found = [f"{cell.id} is ignored and asserts nothing" for cell in loose
             if not any(isinstance(node, ast.Assert)
                        for node in ast.walk(ast.parse(cell.source)))]
    if 4 * len(loose) > len(code):
        found.append(f"{len(loose)} of {len(code)} code cells are ignored")
    return found


def no_cell_skipped(nb, path):
    tags = {"nbval-skip", "raises-exception", "nbval-raises-exception"}
    return [cell.id for cell in nb.cells
            if tags & set(cell.metadata.get("tags", []))]


def few_claim_boxes(nb, path):
    boxes = re.findall(r"^>\s*\**You may have heard", prose(nb), re.M)
    return [f"{len(boxes)} boxes, over 6"] * (len(boxes) > 6)


def setup_first(nb, path):
    code = cells(nb, "code")
    if not code or "course_utils.start()" not in code[0].source:
        return ["the first code cell does not call course_utils.start()"]
    folded = code[0].metadata.get("jupyter", {}).get("source_hidden")
    return [] if folded else ["the setup cell is not folded"]


def own_badge(nb, path):
    named = re.findall(r"colab\.research\.google\.com/github/[^)\s]*"
                       r"/notebooks/([\w.-]+)", prose(nb))
    good = named and set(named) == {path.name}
    return [] if good else [f"Colab badge names {named}"]


def links_hold(nb, path):
    text = re.sub(r"```.*?```", "", prose(nb), flags=re.S)
    anchors = {re.sub(r"\s+", "-", title) for _, title in headings(text)}
    anchors |= set(re.findall(r"""<a\s+(?:id|name)=["']([^"']+)""", text))
    targets = re.findall(r"\]\(\s*([^)\s]+)", text)
    targets += re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    found = [f"picture {target} says nothing to those who cannot see it"
             for target in re.findall(r"!\[\s*\]\(([^)]*)\)", text)]
    for target in targets:
        if re.match(r"https?:|mailto:|attachment:|data:", target):
            continue
        name, _, anchor = target.partition("#")
        if name and not (path.parent / name).exists():
            found.append(f"{target} does not exist")
        if not name and anchor not in anchors:
            found.append(f"#{anchor} is no heading of this notebook")
    return found


RULES = (one_title, meaningful_ids, counts_in_order, quiet_outputs,
         no_widget_state, no_absolute_path, pictures_are_the_ones_named,
         narrow_code, short_cells, read_in_time, under_a_megabyte,
         ignored_cells_assert, no_cell_skipped, few_claim_boxes, setup_first,
         own_badge, links_hold)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_notebook(rule, path):
    assert rule(nbformat.read(path, as_version=4), path) == []


def good():
    """A notebook that keeps every rule."""
    badge = ("[![Open in Colab](https://colab.research.google.com/b.svg)]("
             "https://colab.research.google.com/github/o/r/blob/v/notebooks/"
             "03_x.ipynb)")
    text = [f"# Title\n\n{badge} [down](#Going-deeper)", "word " * 1900,
            "## Going deeper\n\n" + "word " * 200]
    code = ["import course_utils\ncourse_utils.start()", "1 + 1", "2", "3"]
    nb = v4.new_notebook(cells=[
        *(v4.new_markdown_cell(source, id=f"text-{n}")
          for n, source in enumerate(text)),
        *(v4.new_code_cell(source, id=f"code-{n}", execution_count=n + 1)
          for n, source in enumerate(code))])
    nb.cells[3].metadata.jupyter = {"source_hidden": True}
    nb.cells[3].outputs = [v4.new_output("stream", name="stdout", text="ok")]
    return nb


def say(text):
    """A break that adds prose to the first cell."""
    def add(nb):
        nb.cells[0].source += f"\n\n{text}"
    return add


def show(kind, **fields):
    """A break that adds an output to the last cell."""
    def add(nb):
        nb.cells[-1].outputs.append(v4.new_output(kind, **fields))
    return add


def picture(repr_of, pixels_of):
    """A break that stores a picture beside the repr of, maybe, another."""
    def add(nb):
        shown, said = (plot.card(3, text, "") for text in (pixels_of, repr_of))
        show("display_data", data={
            "image/png": base64.b64encode(
                plot.png(shown, plot.digest(shown))).decode(),
            "text/plain": repr(said)})(nb)
    return add


def put(cell, **fields):
    """A break that changes fields of one cell."""
    return lambda nb: nb.cells[cell].update(nbformat.from_dict(fields))


def tag(cell, name):
    return put(cell, metadata={"tags": [name]})


BREAKS = [
    (one_title, say("# Another title")),
    (meaningful_ids, put(2, id="3f9a01bc")),
    (meaningful_ids, put(2, id="text-1")),
    (counts_in_order, put(-1, execution_count=None)),
    (counts_in_order, put(-1, execution_count=9)),
    (quiet_outputs, show("stream", name="stderr", text="warning")),
    (quiet_outputs, show("error", ename="E", evalue="e", traceback=[])),
    (no_widget_state, show("display_data", data={VIEW: {"model_id": "a"}})),
    (no_widget_state, lambda nb: nb.metadata.update(widgets={})),
    (no_absolute_path, show("stream", text='File "/tmp/ann/x.py"')),
    *((no_absolute_path, put(-1, source=f'open("{path}")')) for path in (
        "/opt/x.txt", "/var/x", "/mnt/x/y", "C:\\Users\\ann")),
    (pictures_are_the_ones_named, picture("A", "B")),
    (pictures_are_the_ones_named, show("display_data", data={
        "image/png": "iVBORw0KGgo=", "text/plain": "<Figure 640x480>"})),
    (narrow_code, put(-1, source="x = 1  # " + "long " * 20)),
    (short_cells, put(-1, source="x = 1\n" * 21)),
    (read_in_time, put(1, source="word " * 4000)),
    (read_in_time, put(1, source="word " * 1999)),
    (read_in_time, put(1, source="few words")),
    (under_a_megabyte, show("stream", text="x" * 10**6)),
    (ignored_cells_assert, tag(-1, IGNORE)),
    (no_cell_skipped, tag(-1, "nbval-skip")),
    (few_claim_boxes, say("> **You may have heard** that.\n\n" * 7)),
    (setup_first, put(3, source="import jax")),
    (setup_first, put(3, metadata={})),
    (own_badge, lambda nb: nb.cells[0].update(source=nb.cells[
        0].source.replace("03_x", "04_x"))),
    (links_hold, say("[next](04_absent.ipynb)")),
    (links_hold, say("[up](#Nowhere)")),
    (links_hold, say("![a ladder](../figures/absent.png)")),
    (links_hold, say("![](https://example.com/a.png)")),
]


def broken_rules(nb):
    path = ROOT / "notebooks" / "03_x.ipynb"
    return [rule.__name__ for rule in RULES if rule(nb, path)]


def test_a_good_notebook_keeps_every_rule():
    assert broken_rules(good()) == []


@pytest.mark.parametrize("rule, damage", BREAKS, ids=lambda value: getattr(
    value, "__name__", ""))
def test_each_rule_catches_its_break(rule, damage):
    nb = good()
    damage(nb)
    assert rule.__name__ in broken_rules(nb)


def test_a_picture_beside_its_own_repr_is_good():
    nb = good()
    picture("A", "A")(nb)
    assert broken_rules(nb) == []


def test_what_make_notebooks_refuses_is_what_the_rules_refuse():
    for rule, damage in BREAKS:
        nb = good()
        damage(nb)
        if rule in (quiet_outputs, no_absolute_path) and nb.cells[-1].outputs:
            assert execute.unfit(nb), damage
    assert execute.unfit(good()) == []


def test_every_rule_has_a_break():
    assert {rule for rule, _ in BREAKS} == set(RULES)


def test_too_many_ignored_cells_are_caught():
    nb = good()
    for cell in nb.cells[-2:]:
        cell.source = "assert 1 + 1 == 2"
        cell.metadata.tags = [IGNORE]
    assert broken_rules(nb) == ["ignored_cells_assert"]


def repository_files(root=ROOT):
    """(name, text) of what a clone holds, or will hold once committed."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root,
            capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):  # no git, or no clone
        ignored = [".git", *(root / ".gitignore").read_text().split()]
        whole = (path.relative_to(root) for path in root.rglob("*"))
        listed = [path for path in whole if not any(
            fnmatch(part, pattern.rstrip("/"))
            for part in path.parts for pattern in ignored)]
    for name in filter(None, listed):
        try:
            yield str(name), (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError, FileNotFoundError):
            continue


@pytest.mark.parametrize("git", ["a clone", "no clone", "no git at all"])
def test_every_file_is_looked_at(git, tmp_path, monkeypatch):
    names = {"Makefile", ".ci/run", "LICENSE", ".gitignore", "a b.py",
             "\u00fcber \u4e00.md", "deep/er/x.ipynb"}
    for name in names | {".venv/lib/x.py", "a/__pycache__/x.pyc", "site/a"}:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    (tmp_path / ".gitignore").write_text(".venv/\n__pycache__/\nsite/\n")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if git == "a clone":
        if not shutil.which("git"):
            pytest.skip("no git here")
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    elif git == "no git at all":
        monkeypatch.setenv("PATH", str(tmp_path))
    assert {name for name, _ in repository_files(tmp_path)} == names


def test_this_repositorys_files_are_looked_at():
    names = {name for name, _ in repository_files()}
    assert {"Makefile", "LICENSE", ".ci/run", "tests/test_hygiene.py",
            "course_utils/chips.toml"} <= names
    assert not any(name.startswith(".venv") for name in names)


@pytest.mark.parametrize("pattern, sample", [
    (HOSTS, "pip install -i https://{}/simple x".format("pypi" + ".org")),
    (AUTHORSHIP, "written by an {}".format("ag" + "ent")),
    (MACHINE, 'open("/{}/ann/course/x")'.format("home")),
], ids=["package hosts", "authorship", "machine paths"])
def test_no_file_says(pattern, sample):
    assert pattern.search(sample)
    found = [f"{name}: {hit.group()}" for name, text in repository_files()
             for hit in pattern.finditer(text)]
    assert found == []


def test_a_page_folds_what_the_notebook_folds(tmp_path):
    nb = good()
    nb.cells[3].source = "#@title Setup\nimport course_utils"
    page = execute.to_html(nb, tmp_path)
    text = re.sub("<[^>]+>", "", page)
    assert "#@title Setup" in text and "import course_utils" not in text
    assert "import course_utils" in nb.cells[3].source
    assert "<script" not in page
