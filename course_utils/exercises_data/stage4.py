"""The exercises of notebook 4: from dispatch to kernel execution."""

from __future__ import annotations

import textwrap
from typing import Any

from course_utils.exercises_data.register import exercise


@exercise(
    "4.1",
    rel_tol=0.01,  # the page's times have three digits
    hints=("A 1000 x 1000 product is 1000**3 multiply-adds of two FLOPs.",
           "FLOPs by seconds by 1e9: once with 269e-6 s, once with 4.92e-3."),
    why="The first clock stopped at the return: 7,435 GFLOP/s is no speed of "
        "that CPU, which did 407. A rate too good for the machine says that "
        "somebody forgot to wait.",
    wrong=((lambda right: (right[0] / 2, right[1] / 2),
            "A multiply-add is two FLOPs."),
           (lambda right: (right[1], right[0]),
            "The other way round: first the clock that did not wait."),
           (lambda right: (right[0] * 1e9, right[1] * 1e9),
            "That is in FLOP/s; the question asks for GFLOP/s."),
           (lambda right: (right[0], right[1] * 4.92 / 51.2),
            "51.2 ms is CPU time, of all threads; the wall clock says 4.92."),
           (lambda right: (right[0] / 1e3, right[1] / 1e3),
            "That is in TFLOP/s; the question asks for GFLOP/s.")),
)
def claimed_rates() -> tuple[float, float]:
    """Which GFLOP/s does each of the two clocks of JAX's page give for the
    1000 x 1000 product, the one that did not wait and the one that did?"""
    import numpy as np

    from course_utils import flops

    x = np.empty((1000, 1000), np.float32)
    work = flops.count(lambda a, b: a @ b, x, x).matmul
    return work / 269e-6 / 1e9, work / 4.92e-3 / 1e9


@exercise(
    "4.2",
    hints=("Reading the loss makes the host wait for the device. How long is "
           "one step then?",
           "Waiting: 100 x (40 + 60). Otherwise the device is busy all the "
           "time, after the first call: 40 + 100 x 60."),
    why="With the wait nothing overlaps: 10,000 us. Without it the host is "
        "always ahead and only its first 40 us show: 6,040. The reading "
        "itself cost nothing; the waiting did.",
    wrong=((lambda right: right + 40,
            "Nearly: the device cannot start before the first call is made."),
           (lambda right: 10_000, "That is one run; compare it with the run "
            "that reads once."),
           (lambda right: 6_040, "That is the run that reads once; how much "
            "longer is the other?"),
           (lambda right: 6_000, "With nothing read, the host's 40 us are "
            "hidden behind the device's 60, all but the first.")),
)
def cost_of_reading() -> int:
    """The host needs 40 us to issue a training step, the device 60 us to run
    it. How many us longer do 100 steps take if the loss is read after every
    step, not only at the end?"""
    from course_utils import simulate

    return (simulate.queue(40, 60, 100, sync_every=1).total_us
            - simulate.queue(40, 60, 100).total_us)


@exercise(
    "4.3",
    hints=("The grid is 100,000 / 1,024, rounded up.",
           "All programs but the last have 1,024 live lanes."),
    why="98 programs have 100,352 lanes, 352 more than there are elements: "
        "the mask turns these off in the last one.",
    wrong=((lambda right: (right[0] - 1, right[1]),
            "97 programs cover 99,328 elements; the rest needs one more."),
           (lambda right: (right[0], 1024 - right[1]),
            "Those are the lanes that are masked off."),
           (lambda right: (right[0], 1024),
            "98 x 1,024 is more than 100,000: not all of the last block can "
            "be live."),
           (lambda right: (right[0] - 1, 1024),
            "97 programs cover 99,328 elements; the rest needs one more.")),
)
def programs_and_lanes() -> tuple[int, int]:
    """How many programs add vectors of 100,000 elements in blocks of 1,024,
    and how many lanes are live in the last program?"""
    import math

    programs = math.ceil(100_000 / 1_024)
    return programs, 100_000 - (programs - 1) * 1_024


_EVERY_FOURTH = """
@triton.jit
def kernel(x_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    {}
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, 2 * x, mask=mask)
"""


def _interleaved(answer: Any, _: Any) -> str:
    """"" if the lines give program p the elements p, p + 4, p + 8, ..."""
    import torch

    from course_utils import kernels

    if not isinstance(answer, str) or "offsets" not in answer:
        return 'this asks for a line of the kernel: "offsets = ...".'
    kernel = kernels.from_source(_EVERY_FOURTH.format(
        textwrap.dedent(answer).strip().replace("\n", "\n    ")))
    x = torch.arange(250.0, device=kernels.device())
    done = kernels.launch(kernel, 4, x, torch.zeros_like(x), 250,
                          BLOCK_SIZE=64, trace=True)
    shares = [sorted(at for a in done.trace.of(pid) if a.kind == "store"
                     for at in a.offsets.tolist()) for pid in range(4)]
    if shares == [[*range(250)[p * 64:p * 64 + 64]] for p in range(4)]:
        return ("that is the kernel as it was: each program takes "
                "neighbours. Four apart is asked for.")
    for pid, mine in enumerate(shares):
        if mine != [*range(pid, 250, 4)]:
            got = f"{', '.join(map(str, mine[:3]))}, ..." if mine else "none"
            return (f"program {pid} stores to the elements {got}; asked for "
                    f"are {pid}, {pid + 4}, {pid + 8}, ...")
    return ""


@exercise(
    "4.4",
    hints=("Program 0 takes 0, 4, 8, ...: tl.arange(0, BLOCK_SIZE) with a "
           "factor.",
           "Program p starts at p, and each lane is four further on."),
    why="Every element is taken once, and the mask works as before. Compiled "
        "for the H100 it is another matter: neighbouring lanes no longer hold "
        "neighbouring elements, so loads of 128 bits become loads of 32.",
    judge=_interleaved,
)
def every_fourth() -> str:
    """A line `offsets = ...` by which, in a grid of four programs, program p
    takes the elements p, p + 4, p + 8, ..."""
    line = "offsets = pid + 4 * tl.arange(0, BLOCK_SIZE)"
    if fault := _interleaved(line, line):
        raise AssertionError(fault)
    return line
