"""Notebooks that carry the package: one file runs alone, without a network.

`make colab` writes site/colab/NN_x.ipynb, for Colab's *Upload notebook* or
an empty folder anywhere. The setup cell checks the package it finds in
itself against a SHA-256, and prefers an installed or cloned one.
"""

import base64
import hashlib
import io
import re
import sys
import zipfile
from pathlib import Path

import nbformat

from tools.books import ROOT
from tools.execute import chosen, normalise
from tools.stamp import EMPTY, REPOSITORY, stamp

SITE = ROOT / "site" / "colab"
_SUFFIXES = {".py", ".toml", ".json", ".gz"}
_LINK = re.compile(r"""  # code first, so that no link is found in it
    (?P<code>^```.*?^```
        | (?<!`)(?P<ticks>`++)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`))
    | (?P<mark>!?)\[(?P<text>[^\]]*)\]\((?!\w+:|[#])(?P<path>[^)\s]+)\)
    """, re.S | re.M | re.X)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date that a zip file can hold


def package(root: Path = ROOT / "course_utils") -> bytes:
    """A zip of the package: the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for path in sorted(root.rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                name = path.relative_to(root.parent).as_posix()
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system, entry.external_attr = 3, 0o644 << 16
                file.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED,
                              9)
    return buffer.getvalue()


def packed(data: bytes) -> str:
    """The lines of the setup cell that hold ``data`` and its hash."""
    text = base64.b64encode(data).decode()
    lines = "\n".join(text[at:at + 76] for at in range(0, len(text), 76))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'PACKED = """\n{lines}\n"""\nSHA256 = "{digest}"'


def online(text: str, folder: str = "notebooks") -> str:
    """Markdown whose links into the repository hold outside it; what is
    written as code stays."""
    def absolute(match: re.Match) -> str:
        if match["code"]:
            return match[0]
        path = (Path("/", folder) / match["path"]).as_posix()
        parts: list[str] = []
        for part in path.split("/"):
            if part == "..":
                parts.pop()
            elif part:
                parts.append(part)
        kind = "raw" if match["mark"] else "blob"
        return (f"{match['mark']}[{match['text']}]({REPOSITORY}/{kind}/main/"
                f"{'/'.join(parts)})")

    return _LINK.sub(absolute, text)


def carrying(nb: nbformat.NotebookNode, name: str, data: bytes,
             ) -> nbformat.NotebookNode:
    """``nb`` without outputs and with the package inside, in place."""
    for cell in stamp(nb, name).cells:
        if cell.cell_type == "markdown":
            cell.source = online(cell.source)
            continue
        cell.outputs, cell.execution_count = [], None
        if cell.id == "setup":
            cell.source = cell.source.replace(EMPTY, packed(data))
    return nb


def main() -> int:
    data = package()
    SITE.mkdir(parents=True, exist_ok=True)
    for path in chosen(sys.argv[1:]):
        nb = nbformat.read(path, as_version=4)
        normalise(nb)
        nb = carrying(nb, path.name, data)
        nbformat.write(nb, SITE / path.name)
        size = (SITE / path.name).stat().st_size
        print(f"site/colab/{path.name:30} {size / 1e6:.1f} MB")
    print(f"each holds the package, {len(data) / 1e6:.1f} MB as a zip")
    return 0


if __name__ == "__main__":
    sys.exit(main())
