"""Execute the notebooks: ``run`` for readable HTML, ``store`` for outputs."""

import copy
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tools.books import (
    ROOT,
    absolute_paths,
    clean_env,
    not_reference,
    notebooks,
)
from tools.stamp import stamp

VIEW = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python",
                   "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python",
                      "name": "python"}}


def code_cells(nb: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def normalise(nb: nbformat.NotebookNode) -> None:
    """Leave in ``nb`` what a second run would write again, in place."""
    kept = {key: nb.metadata[key] for key in ("accelerator", "colab")
            if key in nb.metadata}
    nb.metadata = nbformat.from_dict(METADATA | kept)
    for count, cell in enumerate(code_cells(nb), start=1):
        cell.metadata.pop("execution", None)
        cell.execution_count = count
        for output in cell.outputs:
            output.get("data", {}).pop(VIEW, None)
            if "execution_count" in output:
                output.execution_count = count


def unfit(nb: nbformat.NotebookNode) -> list[str]:
    """Why these outputs must not be stored."""
    found = []
    for cell in code_cells(nb):
        for out in cell.outputs:
            if out.get("name") == "stderr" or out.output_type == "error":
                text = out.get("text") or out.get("evalue")
                found.append(f"cell {cell.id} wrote to stderr: {text[:200]}")
            found += [f"cell {cell.id} shows the path {path}"
                      for path in absolute_paths(out)]
    return found


def to_html(nb: nbformat.NotebookNode, folder: Path) -> str:
    """One page that opens with no network: no script, pictures inside.

    A cell that is folded in Jupyter shows its first line.
    """
    from nbconvert import HTMLExporter

    nb = copy.deepcopy(nb)
    for cell in code_cells(nb):
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.source = cell.source.partition("\n")[0]
    page, _ = HTMLExporter(template_name="lab", embed_images=True) \
        .from_notebook_node(nb, {"metadata": {"path": str(folder)}})
    page = re.sub(r"(?si)<script\b.*?</script\s*>", "", page)
    page = re.sub(r'<img\b[^>]*?alt="([^"]*)"[^>]*src="https?:[^>]*>',
                  r"\1", page)  # the Colab badge
    return re.sub(r'(href="[\w-]+)\.ipynb', r"\1.html", page)


def run_one(path: Path, store: bool) -> bool:
    """Execute one notebook in a new kernel, print one line; True if well."""
    nb, start = nbformat.read(path, as_version=4), time.monotonic()
    problems = []
    try:
        if store:
            stamp(nb, path.name)
        NotebookClient(
            nb, timeout=600, kernel_name="python3", record_timing=False,
            coalesce_streams=True, store_widget_state=False,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": str(path.parent)}}).execute()
        problems = unfit(nb) if store else []
    except (CellExecutionError, DeadKernelError, TimeoutError,
            ValueError) as error:
        problems = [str(error)]
    seconds = time.monotonic() - start
    normalise(nb)
    if store and not problems:
        nbformat.write(nb, path)
    elif not store:
        (ROOT / "site").mkdir(exist_ok=True)
        (ROOT / "site" / f"{path.stem}.html").write_text(
            to_html(nb, path.parent), encoding="utf-8")
    print(f"{path.stem:24} {seconds:6.1f} s  {'FAILED' if problems else 'ok'}",
          *problems, sep="\n  ", flush=True)
    return not problems


def chosen(names: list[str]) -> list[Path]:
    """The notebooks of these names, or all; SystemExit for a wrong name."""
    books = {path.stem: path for path in notebooks()}
    stems = [Path(name).stem for name in names] or [*books]
    if not stems or not books.keys() >= {*stems}:
        sys.exit(f"ARGS={' '.join(names)}: the notebooks are "
                 f"{', '.join(books) or 'not there'}; name one of them, or "
                 "leave ARGS out for all.")
    return [books[stem] for stem in stems]


def main() -> int:
    store = sys.argv[1] == "store"
    if store and (why := not_reference()):
        sys.exit("Outputs are stored only where they are compared (CPython"
                 f" 3.11, x86-64 Linux, the pins), and {why}.")
    books = chosen(sys.argv[2:])
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        if store:
            env = clean_env(Path(folder))
            os.environ.clear()
            os.environ.update(env)
        done = [run_one(path, store) for path in books]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
