"""The course's Triton kernels. Imported by ``kernels`` when first used."""

import triton
import triton.language as tl


@triton.jit
def vector_add(x_ptr, y_ptr, output_ptr, n_elements,
               BLOCK_SIZE: tl.constexpr = 1024):
    """output = x + y, BLOCK_SIZE elements a program."""
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


@triton.jit
def matmul_bias_relu(x_ptr, w_ptr, b_ptr, y_ptr, M, N, K,
                     stride_xm, stride_xk, stride_wk, stride_wn,
                     stride_b, stride_ym, stride_yn,
                     BLOCK_M: tl.constexpr = 128,
                     BLOCK_N: tl.constexpr = 128,
                     BLOCK_K: tl.constexpr = 64,
                     GROUP: tl.constexpr = 8):
    """y = relu(x @ w + b): x (M, K), w (K, N), b (N,), y (M, N).

    One program makes one BLOCK_M x BLOCK_N tile of y, accumulated in fp32.
    Programs walk down GROUP tiles before they step right, so that those
    running at the same time share columns of w in the L2 cache.
    """
    pid = tl.program_id(axis=0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first_m, GROUP)  # the last group may be lower
    within = pid % (GROUP * tiles_n)
    m = (first_m + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + m[:, None] * stride_xm + k[None, :] * stride_xk
    w_ptrs = w_ptr + k[:, None] * stride_wk + n[None, :] * stride_wn
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = k < K - start
        x = tl.load(x_ptrs, mask=(m[:, None] < M) & inside[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inside[:, None] & (n[None, :] < N), other=0.0)
        accumulator = tl.dot(x, w, accumulator)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk

    b = tl.load(b_ptr + n * stride_b, mask=n < N, other=0.0)
    y = tl.maximum(accumulator + b[None, :], 0.0)
    tl.store(y_ptr + m[:, None] * stride_ym + n[None, :] * stride_yn,
             y.to(y_ptr.dtype.element_ty),
             mask=(m[:, None] < M) & (n[None, :] < N))
