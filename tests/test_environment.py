"""requirements.txt, pyproject.toml and environment.yml say one thing."""

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import execute, install, lab, test
from tools.books import (
    ROOT,
    clean_env,
    in_ci,
    not_reference,
    notebooks,
    pins,
    unmet_pins,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = {
    "Linux x86-64": ("linux", "Linux", "x86_64", "posix"),
    "Linux aarch64": ("linux", "Linux", "aarch64", "posix"),
    "macOS arm64": ("darwin", "Darwin", "arm64", "posix"),
    "Windows": ("win32", "Windows", "AMD64", "nt"),
}
# Where the packages that are not everywhere have wheels, for the pinned
# versions: asked of the index with pip's --dry-run --platform.
CUDA = {"triton", "jax-cuda13-plugin", "jax-cuda13-pjrt"}
WHEELS = {"Linux x86-64": CUDA | {"libtpu"}, "Linux aarch64": CUDA,
          "macOS arm64": set(), "Windows": set()}
# Imported only where it is there already.
BROUGHT_BY_COLAB = {"google"}


def environment(platform: str, python: str = "3.11") -> dict[str, str]:
    """The marker environment of one platform, whatever runs this test."""
    keys = ("sys_platform", "platform_system", "platform_machine", "os_name")
    return dict(zip(keys, PLATFORMS[platform], strict=True)) | {
        "python_version": python, "python_full_version": f"{python}.0",
        "implementation_name": "cpython", "extra": "",
        "platform_python_implementation": "CPython"}


def floors(project: dict) -> list[Requirement]:
    """Every dependency of the package, extras included."""
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for e in extras for line in e)]
    return [Requirement(line) for line in lines]


def pinned(lines: list[Requirement], env: dict) -> dict[str, str]:
    """Name to exact version of the pins that apply in ``env``."""
    return {canonicalize_name(pin.name): str(pin.specifier).lstrip("=")
            for pin in lines if not pin.marker or pin.marker.evaluate(env)}


def disagreements(lines: list[Requirement], project: dict) -> list[str]:
    """Pins that are not exact or come twice; floors no pin satisfies."""
    found = [f"{pin} is not one exact version" for pin in lines
             if not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    names = [canonicalize_name(pin.name) for pin in lines]
    found += [f"{name} is pinned twice"
              for name in sorted({n for n in names if names.count(n) > 1})]
    for platform in PLATFORMS:
        env = environment(platform)
        have = pinned(lines, env)
        for need in floors(project):
            if need.marker and not need.marker.evaluate(env):
                continue
            version = have.get(canonicalize_name(need.name))
            if version is None or not need.specifier.contains(version):
                found.append(f"{platform}: {need} has pin {version}")
    return found


def conda_problems(conda: dict) -> list[str]:
    """environment.yml brings Python 3.11 and pip, and pip the pins."""
    plain = [item for item in conda["dependencies"] if isinstance(item, str)]
    through_pip = [item["pip"] for item in conda["dependencies"]
                   if isinstance(item, dict)]
    found = [] if plain == ["python=3.11", "pip"] else [f"conda: {plain}"]
    if through_pip != [["-r requirements.txt", "-e ."]]:
        found.append(f"pip: {through_pip}")
    if "defaults" in conda["channels"]:
        found.append("channel defaults")
    return found


def imports(source: str) -> set[str]:
    """Top-level names a Python source imports; magics left out."""
    code = re.sub(r"^\s*[%!].*$", "pass", source, flags=re.M)
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


def undeclared(names: set[str], project: dict) -> list[str]:
    """Imported names that no declared distribution brings."""
    declared = {canonicalize_name(need.name) for need in floors(project)}
    brings = metadata.packages_distributions()
    own = {"course_utils", "tools", "tests", "conftest"}
    return sorted(
        name for name in names - own - BROUGHT_BY_COLAB
        - set(sys.stdlib_module_names)
        if not declared & {canonicalize_name(dist)
                           for dist in brings.get(name, [name])})


def test_pins_satisfy_every_floor():
    assert disagreements(pins(), PROJECT) == []


@pytest.mark.parametrize("old, new, complaint", [
    ("numpy==2", "numpy==1.2", "numpy>=2.1 has pin 1.2"),
    ("jax==", "jax>=", "not one exact version"),
    ("torch==", "Numpy==2.4.6\ntorch==", "numpy is pinned twice"),
    ("nbval==", "nbvalx==", "nbval>=0.11 has pin None"),
])
def test_broken_pins_are_found(old, new, complaint):
    text = (ROOT / "requirements.txt").read_text()
    broken = pins(re.sub(rf"^{old}", new, text, flags=re.M))
    assert complaint in " ".join(disagreements(broken, PROJECT))


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_markers_follow_the_wheels(platform, python):
    have = pinned(pins(), environment(platform, python))
    everywhere = CUDA | {"libtpu"}
    assert everywhere & set(have) == WHEELS[platform]
    assert {"jax", "jaxlib", "torch", "numpy", "nbval"} <= set(have)
    assert ("pywinpty" in have) == (platform == "Windows")
    assert ("appnope" in have) == (platform == "macOS arm64")


def test_pythons_agree():
    assert [f"{major}.{minor}" for major, minor in install.SUPPORTED] == [
        *PYTHONS]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_conda_installs_the_pins():
    assert conda_problems(CONDA) == []
    broken = {"channels": ["defaults"], "dependencies": [
        "python=3.12", "pip", "numpy", {"pip": ["-r requirements.txt"]}]}
    assert len(conda_problems(broken)) == 3


def test_every_import_is_declared():
    files = [path for folder in ("course_utils", "tools", "tests")
             for path in (ROOT / folder).rglob("*.py")]
    sources = [path.read_text(encoding="utf-8") for path in files]
    sources += [cell.source for path in notebooks()
                for cell in nbformat.read(path, as_version=4).cells
                if cell.cell_type == "code"]
    names = set().union(*map(imports, sources))
    assert {"yaml", "nbformat"} <= names
    assert undeclared(names, PROJECT) == []


def test_an_undeclared_import_is_found():
    names = imports("%matplotlib inline\nimport os, seaborn.x\n"
                    "def f():\n    from sklearn.svm import SVC")
    assert undeclared(names, PROJECT) == ["seaborn", "sklearn"]


def test_installed_versions_are_the_pins():
    """In the .venv that make built, all of them; elsewhere those there."""
    unmet = unmet_pins()
    if ROOT / ".venv" != Path(sys.prefix):
        unmet = [line for line in unmet if "(here: nothing)" not in line]
    assert unmet == []


def test_reference_is_refused_with_a_reason(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "not CPython 3.11 on x86-64 Linux" in not_reference()


@pytest.mark.parametrize("version, word", [((3, 9), "old"), ((3, 14), "new")])
def test_wrong_python_is_one_line(monkeypatch, version, word):
    monkeypatch.setattr(install, "version_of", lambda command: version)
    with pytest.raises(SystemExit) as stop:
        install.find_python("python3")
    assert f"too {word}" in str(stop.value) and "\n" not in str(stop.value)


@pytest.mark.parametrize("here, found", [
    ({"python3": (3, 14), "python3.12": (3, 12)}, "python3.12"),
    ({"python3": (3, 13), "python3.11": (3, 11)}, "python3.11"),
    ({"python3": (3, 13), "python3.12": (3, 12)}, "python3")])
def test_another_python_is_found(monkeypatch, here, found):
    monkeypatch.setattr(install, "version_of", lambda c: here.get(c, ()))
    assert install.find_python() == found
    with pytest.raises(SystemExit, match="typo does not run"):
        install.find_python("typo")


@pytest.mark.parametrize("named, have, made_with", [
    ("", (3, 12), None), ("python3.12", (3, 12), None),
    ("python3.12", (3, 11), "python3.12"), ("", (), "python3.11"),
    ("", (3, 9), "python3.11")])
def test_the_venv_is_of_the_python_that_is_asked_for(
        monkeypatch, named, have, made_with):
    versions = {str(install.PYTHON): have, "python3.11": (3, 11),
                "python3.12": (3, 12)}
    ran = []
    monkeypatch.setattr(install, "version_of", lambda c: versions.get(c, ()))
    monkeypatch.setattr(install.subprocess, "run", lambda command, **_: (
        ran.append(command), subprocess.CompletedProcess(command, 0))[1])
    assert install.make_venv(named) is bool(made_with)
    assert ran == ([[made_with, "-m", "venv", "--clear", str(
        install.PYTHON.parents[1])]] if made_with else [])


def test_a_venv_that_is_new_is_filled_whatever_the_stamp(monkeypatch):
    done = []
    monkeypatch.setattr(install, "make_venv", lambda named: True)
    monkeypatch.setattr(install, "check_disk", lambda *_: done.append("disk"))
    monkeypatch.setattr(install, "pip", lambda *args: sys.exit(args[-1]))
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    with pytest.raises(SystemExit, match="requirements.txt"):
        install.main()
    assert done == ["disk"]


def test_full_disk_and_no_network_are_named():
    with pytest.raises(SystemExit, match="2.0 GB are free"):
        install.check_disk(2 * 10**9, 6)
    install.check_disk(7 * 10**9, 6)
    assert "disk is full" in install.explain("No space left on device")
    # what pip itself says where nothing answers
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--retries", "1",
         "--isolated", "--no-deps", "--index-url", "http://127.0.0.1:9/",
         "nothing"], capture_output=True, text=True,
        env=os.environ | {"PIP_CONFIG_FILE": os.devnull})
    assert done.returncode
    assert "needs a network" in install.explain(done.stdout + done.stderr)


@pytest.mark.parametrize("text", ["abc", "-1", "0", "65536", "1e3", "8888.0",
                                  "\u0663", "9" * 5000])
def test_a_wrong_port_is_one_line(text):
    with pytest.raises(SystemExit) as stop:
        lab.wanted_port(text)
    assert str(stop.value).startswith(f"PORT={text}: a port is")
    assert "\n" not in str(stop.value)


def test_a_right_port_is_taken():
    assert [lab.wanted_port(p) for p in ("1", "8888", "65535")] == [
        1, 8888, 65535]


def test_notebooks_are_chosen_by_name(monkeypatch):
    first = notebooks()[0]
    assert execute.chosen([]) == notebooks()
    for name in (first.stem, first.name, f"notebooks/{first.name}"):
        assert execute.chosen([name]) == [first]
    for names in (["typo"], [first.stem, "typo"]):
        with pytest.raises(SystemExit) as stop:
            execute.chosen(names)
        assert first.stem in str(stop.value) and "typo" in str(stop.value)
        assert "\n" not in str(stop.value)
    monkeypatch.setattr(execute, "notebooks", list)
    with pytest.raises(SystemExit, match="the notebooks are not there"):
        execute.chosen([])


def test_no_setting_of_a_user_reaches_the_outputs(monkeypatch, tmp_path):
    for name in ("COURSE_STATIC", "COURSE_CACHE", "JAX_ENABLE_X64",
                 "JAX_DISABLE_JIT", "TRITON_INTERPRET", "XLA_FLAGS",
                 "TORCH_LOGS", "TORCHINDUCTOR_MAX_AUTOTUNE", "MPLBACKEND",
                 "PYTORCH_JIT", "LIBTPU_INIT_ARGS", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("HTTPS_PROXY", "kept")
    env = clean_env(tmp_path)
    assert "mine" not in env.values()
    assert env["HTTPS_PROXY"] == "kept" and "PATH" in env
    assert env["COURSE_CACHE"] == str(tmp_path / "COURSE_CACHE")


def test_a_taken_port_gives_the_next():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert lab.free_port(port) > port


def test_the_verdict_counts_and_fails(tmp_path):
    report, probe = tmp_path / "units.xml", tmp_path / "test_probe.py"
    probe.write_text("import pytest\ndef test_a(): pass\n"
                     "def test_b(): pytest.skip('why')\n")
    subprocess.run([sys.executable, "-m", "pytest", "-q", str(probe),
                    f"--junitxml={report}"], capture_output=True)
    units = test.read("units", 0, report)
    assert units == test.Stage("units", 0, ran=1, skipped=1)
    none = test.read("browser", 0, tmp_path / "absent.xml")
    stages = [units, units, test.Stage("browser", 0, ran=1, steps=6)]
    assert test.verdict(stages, False, "lax") == (
        0, "Passed: 1 notebook cells (lax), 1 units and 6 browser steps ran;"
        " 0 failed, 2 skipped")
    assert test.verdict([units, units, none], False, "lax")[0] == 1


@pytest.mark.parametrize("change, says", [
    ({}, "Passed"),
    ({"how": "lax"}, "in CI outputs must be compared exactly"),
    ({"cells": 0}, "no notebook cell ran"), ({"units": 0}, "no unit ran"),
    ({"steps": 0}, "no browser step ran"),
    ({"skipped": 1}, "in CI nothing may be skipped"),
    ({"exit": 1}, "units")])
def test_ci_passes_only_where_all_was_compared(change, says):
    did = {"units": 9, "cells": 9, "steps": 5, "skipped": 0, "exit": 0,
           "how": "strict"} | change
    stages = [test.Stage("units", did["exit"], ran=did["units"],
                         skipped=did["skipped"]),
              test.Stage("notebooks", 0, ran=did["cells"]),
              test.Stage("browser", 0, ran=2, steps=did["steps"])]
    code, line = test.verdict(stages, True, did["how"])
    assert says in line and code == (says != "Passed")
    if not change.keys() & {"exit"}:
        assert test.verdict(stages, False, did["how"])[0] == 0


@pytest.mark.parametrize("value, is_ci", [
    (None, False), ("", False), ("0", False), ("False", False),
    ("true", True), ("1", True)])
def test_in_ci(monkeypatch, value, is_ci):
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    assert in_ci() is is_ci
