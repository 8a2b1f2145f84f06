"""The exercises of notebook 5: from kernel to chip."""

from __future__ import annotations

from course_utils.exercises_data.register import DOUBLE, exercise


@exercise(
    "5.1",
    hints=("One SM does 128 multiply-adds a cycle: how many FLOPs a second?",
           "Divide the peak by lanes x 2 x clock, and round."),
    why="30.3e12 / (128 x 2 x 2.04e9) is 58.0. The die has 60; two are "
        "switched off, and pages that say 60 describe the die.",
    wrong=((lambda right: 60, "That is the die. What does the peak need?"),
           (lambda right: 2 * right,
            "A multiply-add is two FLOPs, in one lane and cycle."),
           (lambda right: right / 2,
            "Half of it: is a multiply-add counted twice over?")),
)
def l4_sms() -> int:
    """How many SMs has the L4, by its peak of fp32?"""
    from course_utils import chips

    l4 = chips.get("l4")
    return round(l4.peak("fp32") / (l4.fp32_lanes_per_sm * 2 * l4.clock_hz))


@exercise(
    "5.2",
    hints=("With B rows: 2 x B x 1024 x 2048 FLOPs of product, and B x 2048 "
           "each for bias and ReLU. The bytes are X, W, b and Y, once each.",
           "Divide, and look for the first B that reaches the ridge: a loop "
           "in Python is quick."),
    why="For a W without bounds the ridge itself, 296 rows, would do. Here "
        "X and Y cost bytes too, which W's reuse must pay for.",
    wrong=(*((lambda right, ridge=ridge: ridge,
              "That is the rule of thumb: it leaves out the bytes of X and Y, "
              "which are not small here.") for ridge in (295, 296)),
           (lambda right: right - 1, "One row short of the ridge."),
           (lambda right: 512, "Nearly: the example was just below it.")),
)
def ridge_rows() -> int:
    """From how many rows of X on is the fused kernel bound by arithmetic on
    an H100 (bf16)? W is [1024, 2048], each tensor passes HBM once."""
    from course_utils import chips

    k, n, ridge = 1024, 2048, chips.get("h100").ridge("bf16")
    rows = 1
    while rows * n * (2 * k + 2) < ridge * 2 * (
            rows * k + k * n + n + rows * n):
        rows += 1
    return rows


@exercise(
    "5.3",
    hints=("With GROUP=2 programs fill columns of two tiles: (0, 0), (1, 0), "
           "(0, 1), (1, 1), ... Which tiles do the first nine make?",
           "They lie in two rows and five columns of tiles. A row needs nine "
           "blocks of X, a column nine of W."),
    why="Two rows of X and five columns of W, nine blocks each: better than "
        "one row and nine columns, worse than three and three.",
    wrong=((lambda right: 54, "That is GROUP=3, a square of 3 x 3 tiles."),
           (lambda right: 90, "That is one row of nine tiles, GROUP=1."),
           (lambda right: 7, "Those are rows and columns; each has nine."),
           (lambda right: 162,
            "That is every load; a block that was loaded before is in L2.")),
)
def grouped_blocks() -> int:
    """How many different blocks do the first nine programs load with
    GROUP=2, where X, W and Y are 9x9 blocks each?"""
    tiles, group = 9, 2
    made = [(pid % group, pid // group) for pid in range(9)]
    rows, columns = (len(set(axis)) for axis in zip(*made, strict=True))
    return (rows + columns) * tiles


@exercise(
    "5.4",
    hints=("A block of 128 threads is 4 warps, one for each subpartition.",
           "Four blocks put 4 warps on each subpartition, which has 16,384 "
           "registers for 4 x 32 threads."),
    why="16,384 registers for four warps of 32 threads: 128 each. Our kernel "
        "takes more, so two of its blocks fit, and holds a larger tile.",
    wrong=(DOUBLE,
           (lambda right: 512, "That is for one block, and no thread may have "
                               "more than 255."),
           (lambda right: 255, "The most a thread may have; two blocks fit."),
           (lambda right: right / 4,
            "That is a full SM, 64 warps; 16 warps are four blocks.")),
)
def registers_for_four() -> int:
    """How many registers may a thread use at most, so that four blocks of
    128 threads fit on one SM of an H100 (shared memory aside)?"""
    from course_utils import memory

    return max(registers for registers in range(1, 256) if memory.occupancy(
        "h100", threads=128, registers=registers, shared=0).blocks >= 4)
