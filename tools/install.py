"""Make .venv and install the pinned set; seconds where that is done.

Runs on whatever Python the machine has first, also one too old for the
course, so its syntax stays that of Python 3.7. Settings (environment):
PYTHON, the interpreter to build on; TORCH_INDEX, an index of torch builds.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
STAMP = ROOT / ".venv" / "installed"
SUPPORTED = ((3, 11), (3, 12), (3, 13))
NO_NETWORK = re.compile("name resolution|NameResolution|new connection|"
                        "unreachable|[Tt]imeout|timed out|ProxyError|getaddr")


def version_of(command: str) -> tuple:
    """(major, minor) of a Python command; () where it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([command, "-c", code], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL)
        return tuple(int(part) for part in done.stdout.split())
    except (OSError, ValueError):
        return ()


def find_python(named: str = "") -> str:
    """The command of a supported Python: the one named, or the first found.

    3.11 goes first: there outputs are compared exactly.
    """
    for command in [named] if named else [
            "python3.11", "python3", "python3.12", "python3.13"]:
        if version_of(command) in SUPPORTED:
            return command
    command = named or "python3"
    version, what = version_of(command), "does not run"
    if version:
        age = "old" if version < SUPPORTED[0] else "new"
        what = "is Python {}.{}, too {}".format(*version, age)
    sys.exit(f"{command} {what}: the course needs Python 3.11 to 3.13;"
             " install one and name it with PYTHON=/path/to/python3.12")


def make_venv(named: str) -> bool:
    """Whether a .venv had to be made, anew where it is of another Python."""
    have = version_of(str(PYTHON))
    if have in SUPPORTED and (
            not named or version_of(find_python(named)) == have):
        return False
    python = find_python(named)
    made = subprocess.run(
        [python, "-m", "venv", "--clear", str(ROOT / ".venv")],
        stdout=subprocess.DEVNULL)
    if made.returncode:
        sys.exit(f"{python} cannot make a virtual environment; on Debian and"
                 f" Ubuntu: apt-get install {Path(python).name}-venv")
    return True


def check_disk(free_bytes: int, need_gb: int) -> None:
    if free_bytes < need_gb * 10**9:
        sys.exit(f"The disk is too full: {free_bytes / 1e9:.1f} GB are free"
                 f" and the install needs about {need_gb} GB; make room, then"
                 " run the same command again.")


def explain(log: str) -> str:
    """One sentence for a pip that failed, from what it wrote."""
    if "No space left on device" in log:
        return ("The disk is full: make room (pip also unpacks in TMPDIR),"
                " then run the same command again.")
    if NO_NETWORK.search(log):
        return ("No package index answers: the first install needs a network"
                " (or pip's proxy settings); run the same command again"
                " where there is one.")
    errors = [line for line in log.splitlines() if line.startswith("ERROR")]
    return "pip failed: " + (errors or log.splitlines() or ["no word"])[-1]


def pip(*args: str) -> None:
    """Run pip in .venv; show what it fetches, keep the rest for a failure."""
    child = subprocess.Popen(
        [str(PYTHON), "-m", "pip", "install", "--retries", "2", "--no-input",
         "--progress-bar", "off", "--disable-pip-version-check", *args],
        cwd=str(ROOT), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        errors="replace")
    log = []
    for line in child.stdout:
        log.append(line)
        if re.match(r"\s*(Downloading|Installing)", line):
            print(line.strip()[:79], flush=True)
    if child.wait():
        sys.exit(explain("".join(log)))


def main() -> None:
    pins = (ROOT / "requirements.txt").read_text()
    asked = f"{ROOT}\n{pins}\n{(ROOT / 'pyproject.toml').read_text()}"
    state = hashlib.sha256(asked.encode()).hexdigest()
    new, index = make_venv(os.getenv("PYTHON") or ""), os.getenv("TORCH_INDEX")
    if not new and STAMP.exists() and STAMP.read_text() == state:
        return
    if new:  # torch's default build for Linux brings CUDA
        check_disk(shutil.disk_usage(str(ROOT)).free, 4 if index else 6)
    print("Installing into .venv; the first time takes minutes.", flush=True)
    if index:  # first and alone, so that pip does not prefer the CUDA build
        pip("--no-deps", "--index-url", index,
            re.search(r"^torch==\S+", pins, re.M).group())
    pip("-r", "requirements.txt")
    pip("--no-deps", "--no-build-isolation", "-e", ".")
    # matplotlib lists the fonts once, and says so on stderr: do it here.
    subprocess.run([str(PYTHON), "-c", "import matplotlib.font_manager"],
                   stderr=subprocess.DEVNULL)
    STAMP.write_text(state)


if __name__ == "__main__":
    main()
