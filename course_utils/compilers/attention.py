"""The attention kernel that torch would choose on a chip that is not here.

Asked for tensors without data, torch takes ATen's plain formula, which a GPU
would not run. Order and conditions are those of torch 2.13's sdp_utils.cpp,
how each kernel is called is attention.cpp's. Floor 1.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dispatch.python import enable_python_dispatcher

_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def fused(major: int) -> Iterator[None]:
    """In it attention is what torch runs on NVIDIA's SM ``major``."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    ours = {key: functools.partial(_attention, major)}
    with mock.patch.dict(op.py_kernels, ours), enable_python_dispatcher():
        op._dispatch_cache.clear()
        yield
    op._dispatch_cache.clear()


def choice(major: int, q: Any, k: Any, v: Any, mask: Any = None,
           dropout: float = 0.0, causal: bool = False, gqa: bool = False,
           ) -> str:
    """"cudnn", "flash", "efficient" or "math", for q, k, v in 4 dimensions.

    cuDNN goes first on SM 9 and 10, and has the version that torch 2.13
    brings; an older torch begins with flash.
    """
    size, wide = q.shape[-1], v.shape[-1]
    rows, keys = q.shape[-2], k.shape[-2]
    heads = {t.shape[-3] for t in (q, k, v) if t.dim() == 4}
    half = q.dtype in _HALF[:1 + (major >= 8)]
    if not (q.dim() == k.dim() == v.dim() == 4 and k.shape[-1] == size
            and q.dtype == k.dtype == v.dtype and len(q) == len(k) == len(v)
            and rows and keys and (gqa or len(heads) == 1)
            and all(t.stride(-1) == 1 for t in (q, k, v))
            and (mask is None or mask.stride(-1) == 1)):
        return "math"

    widest = {9: 256, 10: 192 if (size, wide) == (192, 128) else 128}
    if (torch.__version__ >= "2.13" and half and keys > 1
            and max(size, wide) <= widest.get(major, 0)
            and size % 8 == wide % 8 == 0
            and (mask is None or not mask.requires_grad
                 and mask.dim() in (2, 4))
            and dropout * 16 % 1 == 0 and (rows > 1 or not dropout)):
        return "cudnn"

    if (major >= 8 and half and mask is None and size == wide <= 256
            and k.shape[-3] == v.shape[-3]
            and not (causal and rows != keys)):
        return "flash"

    align = 8 if half else 4 if major >= 8 else 1
    if ((half or q.dtype == torch.float32) and len(heads) == 1
            and size % align == wide % align == 0
            and (major < 8 or not any(
                t.storage_offset() % align for t in (q, k, v)))):
        return "efficient"
    return "math"


def _attention(major: int, q: Any, k: Any, v: Any, mask: Any = None,
               dropout: float = 0.0, causal: bool = False, *,
               scale: float | None = None, enable_gqa: bool = False) -> Any:
    aten, size = torch.ops.aten, q.shape[-1]
    kind = choice(major, q, k, v, mask, dropout, causal, enable_gqa)
    if kind == "math":
        return aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout, causal, scale=scale,
            enable_gqa=enable_gqa)[0]
    if kind == "flash":  # it would take the scale of the padded size
        return aten._scaled_dot_product_flash_attention(
            *(_padded(t, 8) for t in (q, k, v)), dropout, causal, False,
            scale=size ** -0.5 if scale is None else scale)[0][..., :size]
    learns = torch.is_grad_enabled() and any(
        t.requires_grad for t in (q, k, v))
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -math.inf).to(q.dtype)
    if kind == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, mask, learns, dropout, causal, False, scale=scale)[0]
    if mask is not None:
        mask = _padded(mask, 16)[..., :mask.shape[-1]].expand(
            *q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, learns, dropout, causal, scale=scale)[0]


def _padded(tensor: Any, to: int) -> Any:
    """``tensor``, its last dimension a multiple of ``to``."""
    short = -tensor.shape[-1] % to
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
