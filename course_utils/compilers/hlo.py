"""Optimized HLO read back: which kernels there are, what each fuses and moves.

jaxlib's objects for HLO give names and operands but neither shapes nor the
order of the schedule; the text gives both. Floor 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from course_utils.compilers.rung import Buffer, Kernel
from course_utils.compilers.text import closing, dropped

_BITS = {"pred": 8, "token": 0}
_SHAPE = re.compile(r"\b(pred|token|bf16|[a-z]+\d+(?:e\d+m\d+\w*)?)"
                    r"\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%?([\w.-]+) = (.*)$")
_OPCODE = re.compile(r"(?<![\w%.-])([a-z][a-z0-9-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|"
    r"true_computation|false_computation)=\{?(%[\w.-]+(?:, %[\w.-]+)*)")

# No work of their own: views, tuples, and inputs.
_NOTHING = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element",
            "after-all", "partition-id", "replica-id", "opt-barrier"}
# A TPU fetches ahead, some whole arrays and some in slices, put together by
# _JOINED; what is fetched counts where it is used.
_FETCHES = {"copy-start", "copy-done", "slice-start", "slice-done"}
_JOINED = "ConcatBitcast"
_THROUGH = _FETCHES | {"bitcast", "opt-barrier"}
# Custom calls of the TPU back end that name, join or split buffers.
_BOOKKEEPING = {"AllocateBuffer", "X64Combine", "X64SplitLow", "X64SplitHigh",
                _JOINED}
# Inside a fusion these shape or name values; they compute nothing.
_SILENT = _NOTHING | {"broadcast", "reshape", "fusion", "copy", "slice",
                      "concatenate", "iota"}
_TAKE = ("slice", "dynamic-slice", "gather")  # they read what they give
_COLLECTIVES = ("all-", "reduce-scatter", "collective-")
_LIBRARIES = ("cuBLAS", "cuDNN", "cuSOLVER", "oneDNN", "LAPACK", "DUCC", "FFT")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO: its result, operands, called computations, and text."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    line: str


Computations = dict[str, list[Instruction]]


def shape_bytes(shape: str) -> int:
    """Bytes of a shape such as ``bf16[512,2048]{1,0}``, or a tuple of them."""
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        digits = re.search(r"\d+", dtype)  # f8e4m3fn is 8
        bits = int(digits[0]) if digits else _BITS[dtype]
        sizes = [int(re.sub(r"\D", "", d)) for d in dims.split(",") if d]
        total += -(-prod(sizes) * bits // 8)  # whole bytes
    return total


def parse(text: str) -> tuple[Computations, str]:
    """Every computation's instructions in order, and the entry's name."""
    computations: Computations = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = head.group(2)
            computations[current] = []
            entry = current if head.group(1) else entry
        elif current and (found := _INSTRUCTION.match(line)):
            computations[current].append(_instruction(*found.groups()))
    return computations, entry


def _instruction(name: str, rest: str) -> Instruction:
    opcode = _OPCODE.search(rest)
    arguments = rest[opcode.end():closing(rest, opcode.end() - 1)]
    called = [name for group in _CALLED.findall(rest)
              for name in re.findall(r"%([\w.-]+)", group)]
    return Instruction(name, opcode.group(1), rest[:opcode.start()].strip(),
                       tuple(re.findall(r"%([\w.-]+)", arguments)),
                       tuple(called), rest)


def kernels(text: str, generated: set[str] | None = None
            ) -> tuple[Kernel, ...]:
    """The kernels of an optimized HLO module, in the order of its schedule.

    ``generated`` names the symbols a CPU back end emitted code for: a product
    that is not among them is a library call. Bodies of loops stand once.
    """
    computations, entry = parse(text)
    return tuple(_walk(entry, computations, generated))


_ALLOCATION = re.compile(r"^allocation (\d+): size \d+, (.*):$")
_VALUE = re.compile(r"^ value: <\d+ (\S+) @\d+> "
                    r"\(size=(\d+),offset=(\d+)\): (\S+)")
_LIFE = re.compile(r"^ +(\S+?)(?:\{\})?:(\d+)-(\d+)$", re.M)


def buffers(assignment: str, live_range: str) -> tuple[Buffer, ...]:
    """XLA's buffer assignment joined with its live ranges."""
    lives = {name: (int(first), int(last))
             for name, first, last in _LIFE.findall(live_range)}
    found = []
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            allocation, about = int(head.group(1)), head.group(2)
            kind = ("output" if "live-out" in about else
                    "parameter" if "parameter" in about else "temp")
        elif value := _VALUE.match(line):
            name, size, offset, shape = value.groups()
            if name in lives:
                found.append(Buffer(name, shape, int(size), kind, allocation,
                                    int(offset), *lives[name]))
    return tuple(sorted(found, key=lambda b: (b.allocation, b.first)))


def library_calls(text: str, kernels: tuple[Kernel, ...]) -> str:
    """The lines of ``text`` that hand work to a library, and to which."""
    lines = dict(match.groups() for match in map(
        _INSTRUCTION.match, text.splitlines()) if match)
    return "\n".join(
        f"// {kernel.who}\n{kernel.name} = "
        f"{dropped(lines[kernel.name], ', metadata=')}"
        for kernel in kernels if kernel.author == "library")


def _walk(name: str, computations: Computations,
          generated: set[str] | None) -> list[Kernel]:
    found: list[Kernel] = []
    ops = {op.name: op for op in computations[name]}
    results = {op.operands[0]: op.shape for op in ops.values()
               if op.opcode.endswith("-done")}
    for op in ops.values():
        if op.opcode in ("while", "call", "conditional"):
            for called in op.called:
                found += _walk(called, computations, generated)
        elif not (op.opcode in _NOTHING | _FETCHES
                  or op.opcode.endswith("-done")
                  or _target(op) in _BOOKKEEPING):
            # What starts has operands and counters in its shape besides.
            whole = replace(op, shape=results.get(op.name, op.shape))
            found.append(_kernel(whole, ops, computations, generated))
    return found


def _kernel(op: Instruction, ops: dict[str, Instruction],
            computations: Computations, generated: set[str] | None) -> Kernel:
    author, who = _writer(op, generated)
    taken: dict[str, int] = {}  # of each value, once
    for name in dict.fromkeys(op.operands):
        part = _taken(name, [op], computations)
        if part is None and name in ops:  # all of it, itself perhaps a slice
            part = shape_bytes(ops[name].shape)
        source = _source(name, ops)
        taken[source] = taken.get(source, 0) + (part or 0)
    read = sum(min(part, shape_bytes(ops[name].shape))
               for name, part in taken.items() if name in ops)
    return Kernel(op.name, author, who, _ops(op, computations), read,
                  _written(op, ops, computations))


def _source(name: str, ops: dict[str, Instruction]) -> str:
    """The value behind copies and views of it."""
    while name in ops and (ops[name].opcode in _THROUGH
                           or _target(ops[name]) == _JOINED):
        name = ops[name].operands[0]
    return name


def _taken(name: str, body: list[Instruction], computations: Computations,
           ) -> int | None:
    """Bytes that the operations of ``body`` take of the value ``name``.

    None where one of them takes all of it.
    """
    parts: list[int | None] = []
    for op in body:
        for number, operand in enumerate(op.operands):
            if operand != name:
                continue
            if op.opcode == "fusion":
                inner = computations[op.called[0]]
                parameter = next(i.name for i in inner if re.match(
                    rf".* parameter\({number}\)", i.line))
                parts.append(_taken(parameter, inner, computations))
            elif op.opcode == "bitcast" and op != body[-1]:
                parts.append(_taken(op.name, body, computations))
            elif number == 0 and op.opcode in _TAKE:
                parts.append(shape_bytes(op.shape))
            else:
                parts.append(0 if number == 0 and _update(op) else None)
    return None if None in parts else sum(parts)


def _update(op: Instruction) -> str:
    """The operand that ``op`` writes into its first one, "" for most.

    In place: copies come before, if they must. A scatter into several arrays
    at once counts as any other operation.
    """
    if op.opcode == "dynamic-update-slice":
        return op.operands[1]
    return op.operands[2] if (
        op.opcode == "scatter" and len(op.operands) == 3) else ""


def _written(op: Instruction, ops: dict[str, Instruction],
             computations: Computations) -> int:
    """Bytes of the results; of a buffer updated in place, of the update."""
    body = computations[op.called[0]] if op.opcode == "fusion" else [op]
    inner = {i.name: i for i in body}
    known, root = {**ops, **inner}, body[-1]

    def put(name: str) -> int:
        base, update = name, 0
        while base in inner and (inner[base].opcode == "bitcast"
                                 or _update(inner[base])):
            if put_in := _update(inner[base]):
                update += shape_bytes(known[put_in].shape)
            base = inner[base].operands[0]
        given = base not in inner or inner[base].opcode == "parameter"
        if update and given and _taken(base, body, computations) is not None:
            return update
        # cuBLAS is handed a scratch buffer beside its result: not a result.
        return shape_bytes(re.sub(r", s8\[\d+\]\{0\}\)$", "",
                                  known[name].shape))

    return sum(map(put, root.operands if root.opcode == "tuple"
                   else (root.name,)))


def _ops(op: Instruction, computations: Computations) -> tuple[str, ...]:
    """Opcodes of what a kernel computes, those of nested fusions among them.

    A fusion that only moves data is called by what it does last.
    """
    if op.opcode == "custom-call":
        return (_target(op),)
    if op.opcode != "fusion":
        return (op.opcode.removesuffix("-start"),)
    names, moves = [], ["copy"]
    todo = list(op.called)
    while todo:
        for inner in computations.get(todo.pop(0), []):
            if inner.opcode == "fusion":
                todo += inner.called
            elif inner.opcode not in _SILENT:
                names.append(inner.opcode)
            elif inner.opcode not in _NOTHING:
                moves.append(inner.opcode)
    return tuple(names) or (moves[-1],)


def _writer(op: Instruction, generated: set[str] | None) -> tuple[str, str]:
    """Who wrote this kernel's code: ("compiler" or "library", its name)."""
    if op.opcode.startswith(_COLLECTIVES):
        return "compiler", "XLA (collective)"
    if op.opcode == "custom-call":
        name = _target(op)
        if "tpu_custom_call" in name or "mosaic" in name.lower():
            return "compiler", "Mosaic"
        return "library", _library(name)
    if "__ynn_fusion" in op.line:
        return "library", "YNNPACK"
    if "__triton" in op.line:
        return "compiler", "XLA (Triton)"
    if op.opcode == "fft" and "T(" not in op.shape:  # no TPU tiles: a library
        return "library", "DUCC" if generated is not None else "cuFFT"
    if (op.opcode in ("dot", "convolution") and generated is not None
            and not generated & {op.name, f"{op.name}_kernel"}):
        return "library", "Eigen"
    return "compiler", "XLA"


def _target(op: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', op.line)
    return found.group(1) if found else "custom-call"


def _library(target: str) -> str:
    return next((name for name in _LIBRARIES
                 if name.lower() in target.lower()), target)
