"""Claims about Triton programs, settled by running kernels here."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from course_utils import kernels  # noqa: E402

WHO = """
@triton.jit
def who(out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.program_id(0), mask=i < n)
"""
COUNT = """
@triton.jit
def count(out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out + i, 1, mask=i < n)
"""


def ones(n):
    return torch.full((n,), -1, dtype=torch.int32, device=kernels.device())


def test_256_elements_in_blocks_of_64_are_four_programs():  # 79, 80, 82-84
    who = kernels.launch(kernels.from_source(WHO), triton.cdiv(256, 64),
                         ones(256), 256, B=64)
    assert who.grid == (4,)
    pid = who.result.tolist()
    assert [(pid.index(p), 255 - pid[::-1].index(p)) for p in range(4)] == [
        (0, 63), (64, 127), (128, 191), (192, 255)]


@pytest.mark.parametrize("n, block", [(256, 64), (250, 64), (1, 16)])
def test_programs_share_no_element_and_leave_none(n, block):  # 83
    count = kernels.launch(kernels.from_source(COUNT), triton.cdiv(n, block),
                           torch.zeros_like(ones(n)), n, B=block)
    assert count.result.tolist() == [1] * n


def test_the_tutorials_98432_elements_agree_to_the_last_bit():  # 76, 88, 92
    torch.manual_seed(0)
    n, block = 98432, 1024
    x, y = torch.rand(2, n, device=kernels.device())
    made = kernels.launch(kernels.vector_add, lambda meta: (triton.cdiv(
        meta["n_elements"], meta["BLOCK_SIZE"]),), x, y, torch.empty_like(x),
        n)
    assert made.grid == (97,) and n - 96 * block == 128  # live lanes, last
    assert (made.result - (x + y)).abs().max() == 0
