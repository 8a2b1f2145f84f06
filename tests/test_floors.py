"""The package is a house of floors: a part knows only what lies below."""

import ast
from pathlib import Path

import course_utils

HOUSE = Path(course_utils.__file__).parent
FLOORS = {
    "host": 0, "chips": 0, "timing": 0, "_whole": 0, "_front": 0,
    "compilers": 1, "flops": 1, "transformer": 1,
    "ir": 2, "kernels": 2, "_triton_kernels": 2,
    "memory": 3, "simulate": 3, "example": 4, "plot": 4,
    "explore": 5, "exercises": 5, "exercises_data": 5}
# (part, another of its own floor that it uses)
BESIDE = {("timing", "host"), ("timing", "_front"), ("timing", "_whole"),
          ("chips", "host"), ("kernels", "_triton_kernels"),
          ("exercises", "exercises_data")}


def imports():
    """(part, part that it imports) for each import, wherever it stands."""
    for path in HOUSE.rglob("*.py"):
        own = path.relative_to(HOUSE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}"
                         for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                first, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if first == "course_utils" and own != "__init__":
                    yield own, other


def test_every_part_has_its_floor():
    parts = {path.stem for path in HOUSE.iterdir()
             if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert parts - {"__init__"} == FLOORS.keys()


def test_a_part_imports_only_what_lies_below():
    seen = {(own, other) for own, other in imports() if own != other}
    assert len(seen) > 20 and ("ir", "compilers") in seen
    wrong = {(own, other) for own, other in seen
             if other in FLOORS and FLOORS[other] >= FLOORS[own]}
    assert wrong <= BESIDE, wrong - BESIDE
