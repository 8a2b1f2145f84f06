"""Notebook 3's exercises: right answers pass, mistakes teach."""

from inspect import signature

import pytest

from course_utils import (
    example,
    exercises,
    exercises_data,
    host,
    ir,
    kernels,
)

pytestmark = pytest.mark.usefixtures("no_progress")

M, K, N = 512, 2048, 2048  # of 3.7; a vector register holds 8 x 128
TILES = M * N // (8 * 128)
X, W, B, Y = 512 * 1024, 1024 * 2048, 2048, 512 * 2048
RIGHT = {  # by hand
    # mm, add, relu, in bf16
    "3.1": 2 * ((X + W + Y) + (Y + B + Y) + (Y + Y)),
    "3.3": 2 * 3 * 4,
    # What is donated comes back as a copy elsewhere.
    "3.5": 0,
    "3.6": 4 * 8 * (2 * 128),
    # One addition for each piece but the first, and one for the bias.
    "3.7": (TILES * (K // 128), TILES * (K // 256), TILES // 2),
    # dX = (dY where XW + b > 0) W^T, each operand once, in bf16.
    "3.9": 2 * (2 * Y + W + X),
    "3.10": ("all-gather", 2 * W),
}


@pytest.mark.skipif(not host.version("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("number", RIGHT)
def test_what_is_compiled_is_what_one_works_out_by_hand(number):
    assert exercises.check(number, RIGHT[number]).correct


@pytest.mark.skipif(not host.version("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("name", [
    "all-gather", "all_gather", "AllGather", "all gather", "ALLGATHER",
    "jax.lax.all_gather"])
def test_the_collective_may_be_spelt_as_any_project_spells_it(name):
    assert exercises.check("3.10", (name, 4194304)).correct


@pytest.mark.skipif(not host.version("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("number, answer, taught", [
    ("3.1", 2 * (X + W + B + Y), "fused kernel"),
    ("3.1", 15.73, "in MB"),
    ("3.2", "fusion_wrapper", "left alone"),
    ("3.2", "gemm_fusion_dot_general.1", "which pass made it"),
    ("3.2", "gemm-fusion", "which pass made it"),
    ("3.2", "triton", "which pass made it"),
    ("3.3", 48, "FLOPs"),
    ("3.3", 8, "sum of three"),
    ("3.3", 0, "still writes itself"),
    ("3.3", 27, "3x3's"),
    ("3.3", 12, "the right matrix"),
    ("3.4", 256, "not FLOPs"),
    ("3.4", 8192, "all of Y"),
    ("3.4", 64, "128 rows"),
    ("3.4", 16, "how often the loop"),
    ("3.4", 8, "stand in the code"),
    ("3.4", 2, "do the 128 rows"),
    ("3.5", 2097152, "look at temp"),
    ("3.6", 2600, "padding"),
    ("3.7", (16384, 8192, 1024), "no more results"),
    ("3.7", (8192, 4096, 512), "K = 1024"),
    ("3.7", (15360, 7168, 512), "then comes b"),
    ("3.9", 1048576, "also reads"),
    ("3.9", 7340032, "XW + b besides dY"),
    ("3.9", 8388608, "also writes"),
    ("3.9", 9437184 / 2, "two bytes"),
    ("3.9", 9.437, "in MB"),
    ("3.10", ("AllReduce", 2097152), "no sums are partial"),
    ("3.10", ("all-reduce", 4194304), "no sums are partial"),
    ("3.10", ("all-gather", 1048576), "starts with"),
    ("3.10", ("all_gather", 3145728), "what arrives"),
    ("3.10", ("all-gather", 7), "value 2: 7"),
    ("3.10", ("all-to-all", 4194304), "value 1: 'all-to-all'"),
    ("3.10", "all-gather", "two values"),
    ("3.10", ("all-gather", [1]), "two values"),
])
def test_a_typical_mistake_gets_its_sentence(number, answer, taught):
    verdict = exercises.check(number, answer)
    assert verdict.word == "Not yet"
    assert taught.lower() in verdict.text.lower()


@pytest.mark.parametrize("m, k, n, who", [
    (2, 3, 4, "XLA"), (3, 3, 3, "XLA"), (4, 4, 4, "Eigen")])
def test_who_writes_a_small_product_is_what_3_3_says(m, k, n, who):
    jax = pytest.importorskip("jax")
    if host.version("jax") != "0.10.2":
        pytest.skip("another XLA draws the line elsewhere")
    x, w = (jax.ShapeDtypeStruct(s, "float32") for s in ((m, k), (k, n)))
    assert ir.ladder(jax.numpy.matmul, x, w).kernels[0].who == who


@pytest.mark.parametrize("number", RIGHT)
def test_hints_do_not_give_the_answer_away(number):
    told = " ".join(exercises_data.EXERCISES[number].hints)
    right = RIGHT[number]
    for value in right if isinstance(right, tuple) else (right,):
        assert str(value) not in told
        assert isinstance(value, str) or f"{value:,}" not in told


@pytest.mark.skipif(not host.version("triton"), reason="needs Triton")
def test_3_4_is_what_stands_in_the_code_times_the_turns_of_the_loop():
    pytest.importorskip("torch")
    code = ir.ladder(kernels.matmul_bias_relu,
                     *kernels.linear_args(*example.metas()), target="h100")
    step = signature(kernels.matmul_bias_relu.fn).parameters["BLOCK_K"].default
    stand = code["sass"].text.count("HGMMA.64x128x16")
    assert exercises.check("3.4", stand * 1024 // step).correct


def shifted(x, w):
    return x @ w + 1


@pytest.mark.parametrize("answer, said", [
    (lambda x, w: sum(x[:, k:k + 1] * w[k] for k in range(64)), "no library"),
    (lambda x, w: x @ w, "calls YNNPACK"),
    (lambda x, w: (x[:, :, None] * w[None]).sum(1), "calls YNNPACK"),
    (shifted, "not x @ w"),
    (lambda x, w: x[0], "not x @ w"),
    (lambda x: x, "TypeError"),
    (27, "a function of x and w")])
def test_3_8_takes_any_product_that_calls_no_library(answer, said):
    pytest.importorskip("jax")
    if host.version("jax") != "0.10.2":
        pytest.skip("another XLA recognises other products")
    verdict = exercises.check("3.8", answer)
    assert verdict.correct == (said == "no library")
    assert verdict.correct or said in verdict.text
