"""Every test: units, then the notebooks, then the browser; one verdict.

Words after the command go to the units' pytest, as in ARGS="-k chips".
"""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

from tools.books import ROOT, clean_env, in_ci, not_reference, notebooks


@dataclass(frozen=True)
class Stage:
    """What one pytest run did; ``steps`` are the browser's."""

    name: str
    exit_code: int
    ran: int = 0
    failed: int = 0
    skipped: int = 0
    steps: int = 0


def read(name: str, exit_code: int, report: Path) -> Stage:
    """A Stage from pytest's JUnit file; a run that wrote none has failed."""
    if not report.exists():
        return Stage(name, exit_code or 1)
    suite = xml.parse(report).getroot().find("testsuite")
    tests, skipped, failures, errors = (int(suite.get(key)) for key in (
        "tests", "skipped", "failures", "errors"))
    steps = sum(int(entry.get("value")) for entry in suite.iter("property")
                if entry.get("name") == "browser_steps")
    return Stage(name, exit_code, tests - skipped, failures + errors,
                 skipped, steps)


def run(name: str, args: list[str], scratch: Path, caches: str) -> Stage:
    """One pytest run in a process of its own."""
    print(f"\n== {name}", flush=True)
    report = scratch / f"{name}.xml"
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-ra", "--durations=5",
         f"--junitxml={report}", *args],
        cwd=ROOT, env=clean_env(scratch / caches)).returncode
    return read(name, code, report)


def verdict(stages: list[Stage], ci: bool, how: str) -> tuple[int, str]:
    """Exit code and closing line.

    In CI a skip is a failure, as is a part of which nothing ran and a
    comparison that was not exact.
    """
    units, cells, browser = stages
    failed, skipped = (sum(getattr(stage, key) for stage in stages)
                       for key in ("failed", "skipped"))
    bad = [stage.name for stage in stages if stage.exit_code]
    if ci:
        bad += ["in CI nothing may be skipped"] * bool(skipped)
        bad += ["in CI outputs must be compared exactly"] * (how != "strict")
        bad += [f"no {what} ran" for what, count in (
            ("notebook cell", cells.ran), ("unit", units.ran),
            ("browser step", browser.steps)) if not count]
    return int(bool(bad)), (
        f"{'FAILED (' + ', '.join(bad) + ')' if bad else 'Passed'}:"
        f" {cells.ran} notebook cells ({how}), {units.ran} units and"
        f" {browser.steps} browser steps ran; {failed} failed,"
        f" {skipped} skipped")


def main() -> int:
    start, why_lax = time.monotonic(), not_reference()
    if why_lax:
        print(f"Notebook outputs are not compared exactly: {why_lax}.")
    how = "lax" if why_lax else "strict"
    nbval = ["--nbval-lax" if why_lax else "--nbval", "--nbval-current-env",
             "--nbval-cell-timeout=300", "-p", "no:cacheprovider"]
    books = [str(path) for path in notebooks()] or ["notebooks"]
    units = ["tests", "--ignore=tests/browser", *sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        scratch = Path(folder)
        stages = [run("units", units, scratch, "one"),
                  run("notebooks", [*nbval, *books], scratch, "two"),
                  # whose compiled code the browser's run may use again
                  run("browser", ["tests/browser"], scratch, "two")]
    code, line = verdict(stages, in_ci(), how)
    print(f"\n{line} in {time.monotonic() - start:.0f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
