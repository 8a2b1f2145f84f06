"""Record what the notebooks compile for absent chips.

Machines without triton, libtpu or the CUDA plugin show these recordings;
each says when and with which tools it was made.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from course_utils.compilers.recorded import FOLDER
from tools.books import clean_env, not_reference, notebooks
from tools.execute import run_one


def main() -> int:
    if why := not_reference():
        sys.exit(f"Recordings are made in the reference environment, and "
                 f"{why}.")
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        os.environ.update(clean_env(Path(folder)), COURSE_RECORD="1")
        done = [run_one(path, store=False) for path in notebooks()]
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{len(list(FOLDER.iterdir())) - 1} recordings, {size / 1e6:.1f} MB")
    return 0 if done and all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
