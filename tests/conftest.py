"""What every test run shares: no device probing, and who may skip."""

import os
from pathlib import Path

import pytest

from tools.books import in_ci

HAS_GPU = Path("/dev/nvidiactl").exists()
os.environ.setdefault("MPLBACKEND", "Agg")
if not HAS_GPU:  # the CUDA plugin and libtpu would probe, and say so
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are skipped; in CI they are not chosen."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if HAS_GPU or not gpu:
        return
    if in_ci():
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]
    for item in gpu:
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Nothing compiled before is found."""
    monkeypatch.setenv("COURSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_progress(tmp_path, monkeypatch):
    """Nobody has answered an exercise or seen a hint."""
    from course_utils import exercises

    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress"))
    monkeypatch.setattr(exercises, "_memory", {})
    monkeypatch.setattr(exercises, "_shown", {})
