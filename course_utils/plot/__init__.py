"""Draw the course's objects: one theme, one 16:9 picture each. Floor 4.

Every function returns a matplotlib Figure made without pyplot, so nothing is
drawn twice. Its repr is what a notebook test compares: a digest of all that
is drawn, and ``summary``, one sentence that says what the picture shows. Axes
hold the data's own units (bytes, seconds); only tick labels are scaled, in
powers of ten.
"""

from course_utils.plot.base import (
           DPI,
           OKABE_ITO,
           SIZE,
           amount,
           digest,
           new,
           png,
           themed,
)
from course_utils.plot.charts import backends, bars, buffers, lines
from course_utils.plot.chip import chip, hierarchy
from course_utils.plot.course import card, ladder, stage_map
from course_utils.plot.operations import products, shares
from course_utils.plot.programs import instructions, programs, timeline
from course_utils.plot.traffic import roofline, traffic

__all__ = ["DPI", "OKABE_ITO", "SIZE", "amount", "backends", "bars", "buffers",
           "card", "chip", "digest", "hierarchy", "instructions", "ladder",
           "lines", "new", "png", "products", "programs", "roofline", "shares",
           "stage_map", "themed", "timeline",
           "traffic"]
