"""The exercises, one module a notebook; ``register`` says how to add one."""

from course_utils.exercises_data import (  # noqa: F401  they register here
    stage1,
    stage2,
    stage3,
    stage4,
    stage5,
)
from course_utils.exercises_data.register import (
    DOUBLE,
    ELEMENTS,
    EXERCISES,
    MEBI,
    MEGA,
    Exercise,
    exercise,
)

__all__ = ["DOUBLE", "ELEMENTS", "EXERCISES", "MEBI", "MEGA", "Exercise",
           "exercise"]
