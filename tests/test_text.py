"""A compiler's text on a page: all of it, whatever is marked in it."""

import html
import itertools
import re

import pytest

from course_utils.compilers import rung, text

MODULE = """\
HloModule f, entry={(f32[2]{0})}  // "first" <b>

ENTRY %main.1 (x: bf16[2,3]) -> f32[2] {
\t%a = f32[2] add(%b, %c), metadata={op_name="jit(f)/\\"odd\\" <img>"}
  ROOT %r = f32[] constant(1.5e-7) /* é ∑ */
}
"""


@pytest.mark.parametrize("wanted", [
    None, "", ".*", "x*", "add|", "^", "$", r"\b", "(?=add)", "(?i)ADD",
    r"(ROOT )?%\S+ = \S+ (add|constant)\(", "(?P<op>add)", "<b>|é"])
@pytest.mark.parametrize("language", ["hlo", "ptx", "python", "cpp", "text"])
def test_what_is_marked_changes_no_letter(wanted, language):
    """A pattern that finds an empty word marks nothing, and is no trap."""
    words = [word for _, word in itertools.islice(
        text._words(MODULE, wanted), len(MODULE))]
    assert "".join(words) == MODULE and all(words)
    page = text.html(MODULE, language, wanted)
    assert html.unescape(re.sub("<[^>]*>", "", page)) == MODULE


def test_only_what_is_looked_for_stands_out():
    page = text.html(MODULE, "hlo", r"add\(|ROOT")
    marked = re.findall(r'<span[^>]*background-color[^>]*>([^<]*)<', page)
    assert marked == ["add(", "ROOT"]


@pytest.mark.parametrize("file", [
    "/tmp/ipykernel_77/123.py", "/var/folders/x/ipykernel_7/5.py",
    "<ipython-input-3-0a1b2c>"])
def test_any_cell_is_at_home_in_one_place(file):
    scope = {}
    exec(compile("def f(x):\n    return x\n", file, "exec"), scope)
    assert rung.file_of(scope["f"]) == file
    assert rung.home_of(scope["f"]) == "<cell>"
    assert rung.home_of(test_any_cell_is_at_home_in_one_place) == __file__
