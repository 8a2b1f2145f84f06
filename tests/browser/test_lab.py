"""A reader's hour in JupyterLab, by headless Chromium: open, run, touch.

Opens each notebook, runs all of it, moves a slider and waits for the kernel's
answer in the page, answers its first exercise wrong and then right.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tools.books import ROOT, notebooks

CHROMIUM = os.getenv("CHROMIUM") or next(
    filter(None, map(shutil.which, (
        "chromium", "chromium-browser", "google-chrome"))), "")
FLAGS = ["--no-sandbox",             # root in a container
         "--disable-dev-shm-usage",  # /dev/shm is small in containers
         "--disable-gpu"]
needs_chromium = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium here (Debian: apt-get install chromium)")

CURRENT = "window.jupyterapp.shell.currentWidget"
IDLE = f"""() => {CURRENT}?.context?.isReady && {CURRENT}.context
    .sessionContext?.session?.kernel?.status === 'idle'"""
CELLS = f"""() => [...{CURRENT}.content.model.cells]
    .filter(cell => cell.type === 'code')
    .map(cell => ({{id: cell.sharedModel.id, count: cell.executionCount,
                    outputs: cell.outputs.toJSON()}}))"""
# What the page shows around a slider, without the slider's own position.
AROUND = r"""slider => slider.closest('.jp-OutputArea').innerHTML.replace(
    /<div[^>]*noUi[^>]*>|<div class="widget-readout[^]*?<\/div>/g, '')"""
RUN_ONE = f"""async ([id, source]) => {{
    const book = {CURRENT}.content;
    const cells = [...book.model.cells];
    const at = cells.findIndex(cell => cell.sharedModel.id === id);
    if (at < 0) return false;
    cells[at].sharedModel.setSource(source);
    book.activeCellIndex = at;
    book.deselectAll();
    await window.jupyterapp.commands.execute('notebook:run-cell');
    return true;
}}"""


@contextmanager
def lab_server(root: Path, own: Path):
    """JupyterLab on loopback, with no setting of this user; its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    settings = {  # no news pop-up over the page, no cell left out of it
        "apputils-extension/notification":
            '{"fetchNews": "false", "checkForUpdates": false}',
        "notebook-extension/tracker": '{"windowingMode": "none"}'}
    for name, text in settings.items():
        file = own / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data",
               "JUPYTERLAB_SETTINGS_DIR": "settings", "IPYTHONDIR": "ipython",
               "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
               "COURSE_PROGRESS": "progress"}
    env = os.environ | {key: str(own / name) for key, name in folders.items()}
    log = own / "lab.log"
    with open(log, "wb") as sink:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser",
             "--allow-root", "--ServerApp.ip=127.0.0.1",
             f"--ServerApp.port={port}", "--ServerApp.port_retries=0",
             f"--IdentityProvider.token={token}",
             f"--ServerApp.root_dir={root}",
             "--LabApp.expose_app_in_browser=True"],
            stdout=sink, stderr=subprocess.STDOUT, env=env,
            start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                url = f"http://127.0.0.1:{port}/api/status?token={token}"
                urllib.request.urlopen(url, timeout=1)
                break
            except OSError:
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.25)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?reset&token={token}"
    finally:
        server.send_signal(signal.SIGTERM)  # it ends its kernels, too
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)  # the group made above


def plain(outputs: list[dict]) -> str:
    """What the outputs of a cell say, as plain text."""
    said = [out.get("text") or out.get("data", {}).get("text/plain", "")
            for out in outputs]
    return "\n".join("".join(text) for text in said)


class Reader:
    """Someone at the page; ``steps`` lists what was done and held."""

    def __init__(self, page):
        self.page, self.steps = page, []

    def open(self, url: str) -> None:
        self.page.goto(url, wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function("() => !!window.jupyterapp")
        self.page.wait_for_function(IDLE)
        self.steps.append("open")

    def run_all(self) -> None:
        self.page.evaluate("() => window.jupyterapp.commands.execute("
                           "'notebook:run-all-cells')")
        cells = self.page.evaluate(CELLS)
        assert cells
        errors = [(cell["id"], out["evalue"]) for cell in cells
                  for out in cell["outputs"] if out["output_type"] == "error"]
        assert errors == []
        assert [cell["id"] for cell in cells if cell["count"] is None] == []
        self.steps.append("run all")

    def move_slider(self) -> None:
        """Drag the first slider; the page must then show something else."""
        slider = self.page.locator(".jp-OutputArea .widget-slider").first
        slider.evaluate("slider => slider.scrollIntoView({block: 'center'})")
        handle = slider.locator(".noUi-handle").first
        area = slider.element_handle()
        before, value = area.evaluate(AROUND), handle.get_attribute(
            "aria-valuenow")
        knob = handle.bounding_box()
        track = slider.locator(".noUi-target").bounding_box()
        x, y = (knob[at] + knob[size] / 2
                for at, size in (("x", "width"), ("y", "height")))
        right = track["x"] + track["width"] - 1
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(right if right - x > 10 else track["x"] + 1, y,
                             steps=8)
        self.page.mouse.up()
        self.page.wait_for_function(
            f"([slider, before]) => ({AROUND})(slider) !== before",
            arg=[area, before])
        assert handle.get_attribute("aria-valuenow") != value
        self.steps.append("slider")

    def answer(self, cell: str, source: str, verdict: str) -> None:
        """Put ``source`` into a cell, run it, read the verdict below."""
        assert self.page.evaluate(RUN_ONE, [cell, source]), f"no cell {cell}"
        self.page.wait_for_function(IDLE)
        outputs = next(found["outputs"] for found in self.page.evaluate(CELLS)
                       if found["id"] == cell)
        assert plain(outputs).startswith(verdict), outputs
        self.steps.append(f"answer: {verdict}")


@contextmanager
def reader(notebook: Path, own: Path):
    """A Reader before a copy of ``notebook``, its neighbours in reach."""
    from playwright.sync_api import sync_playwright

    with lab_server(notebook.parent, own) as url, sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=CHROMIUM, headless=True, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        try:
            someone = Reader(page)
            someone.open(url.format(notebook.name))
            yield someone
        except BaseException:
            page.screenshot(path=str(own / "failed.png"))
            raise
        finally:
            browser.close()


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The course where a save cannot change the original."""
    course = tmp_path_factory.mktemp("course")
    for name in ("notebooks", "figures", "docs"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, course / name)
    return course / "notebooks"


@needs_chromium
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_the_notebook_answers(path, copied, tmp_path,
                              record_testsuite_property):
    from course_utils.exercises_data import EXERCISES

    first = f"{int(path.name[:2])}.1"
    cell = f"exercise-{first.replace('.', '-')}-answer"
    with reader(copied / path.name, tmp_path / "own") as someone:
        someone.run_all()
        if "explore.show(" in path.read_text(encoding="utf-8"):
            someone.move_slider()
        for value, verdict in ((-1, "Not yet"),
                               (EXERCISES[first].solve(), "Correct")):
            someone.answer(cell, "from course_utils import exercises\n"
                           f'exercises.check("{first}", {value!r})', verdict)
    record_testsuite_property("browser_steps", len(someone.steps))
    assert len(someone.steps) >= 4


@needs_chromium
def test_the_reader_sees_what_is_wrong(tmp_path):
    """On a notebook with a dead slider and a failing cell it must fail."""
    book = tmp_path / "small.ipynb"
    sources = {"ask": "from ipywidgets import SelectionSlider, interact",
               "dead": "display(SelectionSlider(options=range(6)))",
               "live": "interact(lambda n: print(n * n), n=SelectionSlider("
                       "options=range(6), continuous_update=False))"}
    nbformat.write(v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "language": "python",
                                 "display_name": "Python 3"}},
        cells=[v4.new_code_cell(text, id=name)
               for name, text in sources.items()]), book)
    with reader(book, tmp_path / "own") as someone:
        someone.run_all()
        someone.page.set_default_timeout(3_000)
        with pytest.raises(Exception, match="Timeout"):
            someone.move_slider()
        someone.page.set_default_timeout(30_000)
        someone.answer("dead", "print('Not ' + 'yet')", "Not yet")
        someone.move_slider()
        with pytest.raises(AssertionError):
            someone.answer("ask", "1 / 0", "Correct")
        with pytest.raises(AssertionError, match="no cell"):
            someone.answer("absent", "1", "Correct")
        with pytest.raises(AssertionError, match="division"):
            someone.run_all()
