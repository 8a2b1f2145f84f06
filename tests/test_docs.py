"""docs/: links hold, the glossary and the notebooks point at each other."""

import re

import pytest

from tools import pages
from tools.books import ROOT, notebooks

DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
TO_GLOSSARY = re.compile(r"\]\(\.\./docs/glossary\.md#([^)\s]+)\)")


def slug(heading):
    """The anchor GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(path):
    """What may stand behind # in a link to a page or notebook."""
    own = pages.anchor if path.suffix == ".ipynb" else slug
    return {own(heading) for heading in pages.headings(path)}


def faults(text, folder=DOCS):
    """Links of a page that lead nowhere, and cells that stand elsewhere."""
    found = []
    for target in LINK.findall(text):
        name, _, anchor = target.partition("#")
        path = (folder / name).resolve()
        if re.match(r"https?:|mailto:", target):
            continue
        if not path.is_relative_to(ROOT) or not path.exists():
            found.append(f"{target} does not exist")
        elif anchor and anchor not in anchors(path):
            found.append(f"{target}: no such heading")
    for stem, anchor, cell in re.findall(
            r"notebooks/(\w+)\.ipynb#([^)\s]+)\), cell `([^`]+)`", text):
        stands = pages.sections(ROOT / "notebooks" / f"{stem}.ipynb")
        if pages.anchor(stands.get(cell, "")) != anchor:
            found.append(f"{stem}: cell {cell} is not under {anchor}")
    return found


def entries(text):
    """The glossary as {term: its text}."""
    parts = re.split(r"^### (.+)$", text, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


GLOSSARY = entries((DOCS / "glossary.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")),
                         ids=lambda path: path.name)
def test_links_of_a_page_hold(path):
    assert faults(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", [
    "[a](absent.md)", "[a](../notebooks/09_x.ipynb)", "[a](glossary.md#no-x)",
    "[a](../notebooks/03_ir_to_executable.ipynb#Nowhere)",
    "[a](../notebooks/03_ir_to_executable.ipynb#Going-deeper), cell `card`"])
def test_a_broken_link_is_found(text):
    assert faults(text)


@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_terms_of_a_notebook_are_in_the_glossary(path):
    linked = TO_GLOSSARY.findall(path.read_text(encoding="utf-8"))
    assert set(linked) <= {slug(term) for term in GLOSSARY}


def test_the_glossary_is_in_alphabetical_order_and_without_doubles():
    terms = [term.lower() for term in GLOSSARY]
    assert terms == sorted(set(terms)) and len(terms) >= 60


@pytest.mark.parametrize("term", GLOSSARY)
def test_a_term_is_defined_and_names_where_it_appears(term):
    definition, _, rest = GLOSSARY[term].strip().partition("\n\n")
    first = re.sub(r"^\([^)]+\) ", "", definition)  # the Korean term
    assert re.match(r"[^a-z\s]", first) and first.endswith(".")
    place = re.search(r"\((\.\./notebooks/\w+\.ipynb|drawings\.md)#", rest)
    raw = (DOCS / place[1]).read_text(encoding="utf-8")
    whole = re.sub('"image/png": ".*"', "", raw).lower()
    absent = [word for word in term.lower().split() if word not in whole]
    assert not absent, f"{place[1]} never says {absent}"


def rows(text):
    """The rows of the tables of a page, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return [row for row in split if not re.fullmatch("-+", row[0])][1:]


COMPONENTS = rows((DOCS / "components.md").read_text(encoding="utf-8"))


def test_components_are_many_and_each_once():
    names = [row[0] for row in COMPONENTS]
    assert len(names) == len(set(names)) and len(names) >= 45


@pytest.mark.parametrize("row", COMPONENTS, ids=lambda row: row[0])
def test_a_component_has_a_cell_or_is_marked_missing(row):
    _, stages, shown = row
    assert re.fullmatch("[1-5](-5)?(, [1-5])*", stages)
    has_cell = re.search(r"\.ipynb#[^)]+\), cell `[\w-]+`", shown)
    assert bool(has_cell) != shown.startswith("**missing**")
