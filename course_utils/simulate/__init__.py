"""Small, exact models to see with; what they give is simulated. Floor 3."""

from course_utils.simulate.queue import Call, Queue, queue
from course_utils.simulate.systolic import Systolic, systolic

__all__ = ["Call", "Queue", "Systolic", "queue", "systolic"]
