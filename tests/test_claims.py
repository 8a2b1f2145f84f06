"""The claims of the notes: all there, each settled where it says."""

import ast
from collections import Counter

import pytest

from tools import pages
from tools.books import ROOT

CLAIMS = pages.claims()


def functions(file):
    """The tests of a file that pytest collects by name."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith("test_")}


def exists(check):
    """Whether the cell or test that ``check`` names is there."""
    kind, _, place = check.partition(":")
    if kind == "notebook":
        stem, _, cell = place.partition("#")
        path = ROOT / "notebooks" / f"{stem}.ipynb"
        return path.exists() and cell in pages.sections(path)
    file, _, name = place.partition("::")
    return (kind == "test" and file.startswith("tests/")
            and (ROOT / file).exists() and name in functions(file))


def test_all_137_claims_are_there_once_and_in_order():
    numbers = [claim.number for claim in CLAIMS]
    wanted = [str(n) for n in range(1, 137)]
    wanted.insert(wanted.index("74") + 1, "74b")
    assert numbers == wanted and len(numbers) == 137


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.number)
def test_a_claim_is_settled_where_it_says(claim):
    assert bool(claim.check) != bool(claim.why_unchecked)
    for check in filter(None, (claim.check, claim.also)):
        assert exists(check), f"{check} does not exist"
    assert claim.stage in range(1, len(pages.STAGES) + 1)
    assert claim.verdict in pages.VERDICTS
    assert claim.verdict == "right" or claim.correction
    assert "|" not in f"{claim.claim}{claim.correction}"  # it is a table


@pytest.mark.parametrize("check", [
    "", "notebook:03_ir_to_executable#no-such-cell", "notebook:09_x#setup",
    "test:tests/test_claims.py::test_no_such", "test:tests/absent.py::test_x",
    "test:tools/pages.py::claims", "cell:03_ir_to_executable#setup"])
def test_a_check_that_is_not_there_is_found(check):
    assert not exists(check)


def test_every_test_of_a_claim_is_named_by_one():
    named = {check for c in CLAIMS for check in (c.check, c.also)}
    folder = ROOT / "tests" / "claim_checks"
    made = {f"test:tests/claim_checks/{path.name}::{name}"
            for path in folder.glob("test_*.py")
            for name in functions(f"tests/claim_checks/{path.name}")}
    assert made and made <= named, made - named


def test_the_page_is_what_the_claims_make():
    assert pages.PAGE.read_text(encoding="utf-8") == pages.claims_page(), (
        "run: python -m tools.pages")


def test_the_page_counts_the_claims():
    text, tally = pages.claims_page(), Counter(c.verdict for c in CLAIMS)
    for verdict in ("imprecise", "wrong"):
        assert f"{tally[verdict]} are {verdict}" in text
        assert text.count(f"| **{verdict}** |") == tally[verdict]
    assert text.count("| right |") == tally["right"]
