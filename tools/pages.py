"""Write docs/claims.md from tests/data/claims.toml: ``python -m tools.pages``.

Also what tests of docs/ share: where a check stands, and the anchors of a
notebook's headings.
"""

import functools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import nbformat

from course_utils.plot.course import STAGES
from tools.books import ROOT

PAGE = ROOT / "docs" / "claims.md"
DATA = ROOT / "tests" / "data" / "claims.toml"
VERDICTS = ("right", "imprecise", "wrong", "open")
PREFACE = """# What the notes said, claim by claim

<!-- Made by `python -m tools.pages` from tests/data/claims.toml. -->

This course grew from a Korean study group's notes on its second week: from \
a model in Python to the inside of a chip. They were written to be discussed, \
so we took them at their word, sentence by sentence, and looked for something \
that could say yes or no: an output, a number, an instruction in machine code.

Of {claims} claims {right} are right, many with a condition that is worth \
knowing; {imprecise} are imprecise; {wrong} are wrong; {open} are questions, \
headings or left open. {checked} of them are settled by a cell of a notebook \
or by a test that runs with every other; for the rest the table says why \
not. Several slips are not the notes' own: they stand in the sources too, and \
that is how they travel.
"""


@dataclass(frozen=True)
class Claim:
    """One sentence of the notes.

    ``check`` is "" where nothing settles it; ``also`` a test besides a cell.
    """

    number: str
    stage: int
    claim: str
    verdict: str
    check: str
    correction: str = ""
    also: str = ""
    why_unchecked: str = ""


def claims() -> list[Claim]:
    """The claims, in the order of the notes."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return [Claim(**entry) for entry in data["claims"]]


def anchor(heading: str) -> str:
    """The id JupyterLab gives a heading, as a link writes it."""
    plain = re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
    return re.sub(r"\s+", "-", plain).translate({40: "%28", 41: "%29"})


@functools.cache
def sections(path: Path) -> dict[str, str]:
    """The heading that each cell of a notebook stands under.

    An exercise's heading names the exercise, and not what comes after it.
    """
    found, heading = {}, ""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```", "", cell.source, flags=re.S)
            heading = ([heading] + re.findall(
                r"^#+\s+(?!Exercise \d)(.+)$", text, re.M))[-1]
        found[cell.id] = heading.strip()
    return found


def headings(path: Path) -> list[str]:
    """Every heading of a notebook or Markdown page, in order."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n\n".join(cell.source for cell in nbformat.reads(
            text, as_version=4).cells if cell.cell_type == "markdown")
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return [h.strip() for h in re.findall(r"^#+\s+(.+)$", text, re.M)]


def link(check: str) -> str:
    """A Markdown link to the cell or test that ``check`` names."""
    kind, _, place = check.partition(":")
    if kind == "test":
        file, _, name = place.partition("::")
        return f"[`{name}`](../{file})"
    stem, _, cell = place.partition("#")
    heading = sections(ROOT / "notebooks" / f"{stem}.ipynb")[cell]
    return (f"[{int(stem[:2])}. {heading}](../notebooks/{stem}.ipynb"
            f"#{anchor(heading)}), cell `{cell}`")


def row(claim: Claim) -> str:
    checks = filter(None, (claim.check, claim.also))
    where = (", ".join(map(link, checks))
             or f"unchecked: {claim.why_unchecked}")
    verdict = (claim.verdict if claim.verdict == "right"
               else f"**{claim.verdict}**")
    cells = (claim.number, claim.claim, verdict, claim.correction, where)
    return f"| {' | '.join(cells)} |"


def claims_page() -> str:
    """docs/claims.md as it should be."""
    every = claims()
    tally = Counter(claim.verdict for claim in every)
    parts = [PREFACE.format(
        claims=len(every), checked=sum(bool(c.check) for c in every),
        **{verdict: tally[verdict] for verdict in VERDICTS})]
    for n, stage in enumerate(STAGES, start=1):
        parts.append("\n".join([
            f"## Stage {n}: {stage.name}", "",
            "| | the notes say | verdict | what holds | settled by |",
            "|---|---|---|---|---|",
            *(row(claim) for claim in every if claim.stage == n), ""]))
    return "\n".join(parts)


def main() -> None:
    PAGE.write_text(claims_page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
