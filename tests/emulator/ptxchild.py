# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs PTX in the children of ``conftest.Target``."""

#: Statements that define functions in a target. ``launch(text, name, grid, block, *arguments)``
#: copies the arrays in ``arguments`` to the device, launches the kernel, and copies the arrays
#: back. The other functions use ``launch`` to check instructions.
LAUNCH = r'''
import numpy as np

def loaded(text):
    return ok(D.cuModuleLoadData(text.encode()))

def launch(text, name, grid, block, *arguments, shared=0):
    module = loaded(text)
    values, arrays = [], []
    for a in arguments:
        if isinstance(a, np.ndarray):
            p = ok(D.cuMemAlloc(max(a.nbytes, 1)))
            ok(D.cuMemcpyHtoD(p, np.ascontiguousarray(a).ctypes.data, a.nbytes))
            arrays.append((a, p))
            values.append(np.array([int(p)], np.uint64))
        else:
            values.append(np.array([a]))
    pointers = np.array([v.ctypes.data for v in values], np.uint64)
    try:
        kernel = ok(D.cuModuleGetFunction(module, name.encode()))
        grid, block = ((*x, 1, 1)[:3] if isinstance(x, tuple) else (x, 1, 1) for x in (grid, block))
        ok(D.cuLaunchKernel(kernel, *grid, *block, shared, 0, pointers.ctypes.data, 0))
        ok(D.cuCtxSynchronize())
        for a, p in arrays:
            if a.flags.writeable:
                ok(D.cuMemcpyDtoH(a.ctypes.data, p, a.nbytes))
    finally:
        for a, p in arrays:
            D.cuMemFree(p)
        D.cuModuleUnload(module)

HEAD = ".version 8.3\n.target sm_80\n.address_size 64\n"

def elementwise(instructions, result, *operands):
    """Text of a kernel in which each thread computes one value of the first array from the others.

    The operands' values are in %a, %b, %c, the result in %d; both have PTX types like "f32".
    """
    register = lambda t: "b" + t[1:] if t[0] != "b" or t[1] != "f" else "b16"
    size = lambda t: int(register(t)[1:]) // 8
    names = "abc"[: len(operands)]
    lines = [f".reg .{register(result)} %d;", ".reg .pred %p, %q;"]
    lines += [f".reg .{register(t)} %{n};" for n, t in zip(names, operands)]
    lines += [".reg .b32 %i, %x, %y;", ".reg .b64 %t, %u, %v;", "mov.u32 %x, %ctaid.x;"]
    lines += ["mov.u32 %y, %ntid.x;", "mov.u32 %i, %tid.x;", "mad.lo.u32 %i, %x, %y, %i;"]
    for k, (n, t) in enumerate(zip(names, operands), 1):
        lines += [f"ld.param.u64 %t, [p{k}];", f"mad.wide.u32 %u, %i, {size(t)}, %t;",
                  f"ld.global.{register(t)} %{n}, [%u];"]
    lines += [instructions, "ld.param.u64 %t, [p0];", f"mad.wide.u32 %u, %i, {size(result)}, %t;",
              f"st.global.{register(result)} [%u], %d;", "ret;"]
    params = ", ".join(f".param .u64 p{k}" for k in range(len(operands) + 1))
    return HEAD + f".visible .entry k({params}) {{\n" + "\n".join(lines) + "\n}\n"

DTYPES = {"u8": "u1", "u16": "u2", "s16": "i2", "u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8",
          "f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8"}

def values(kind, n=256, seed=0):
    """Return values of a type: ordinary ones, and those at its edges."""
    r = np.random.default_rng(seed)
    t = np.dtype(DTYPES[kind])
    if kind == "bf16":
        return (values("f32", n, seed).view(np.uint32) >> 16).astype(np.uint16)
    if t.kind == "f":
        edges = [0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.finfo(t).max,
                 np.finfo(t).tiny, np.finfo(t).smallest_subnormal]
        made = r.normal(0, 100, n) * 2.0 ** r.integers(-12, 6, n)
        made[: len(edges)] = edges
        r.shuffle(made)
        with np.errstate(over="ignore"):
            return made.astype(t)
    edges = [0, 1, 2, 3, np.iinfo(t).max, np.iinfo(t).min, np.iinfo(t).max - 1]
    made = r.integers(np.iinfo(t).min, np.iinfo(t).max, n, dtype=t, endpoint=True)
    made[: len(edges)] = edges
    return made

def same(a, b):
    """Whether the bits are equal, or both are not numbers."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "f":
        nans = np.isnan(a) & np.isnan(b)
        a, b = np.where(nans, 0, a).astype(a.dtype), np.where(nans, 0, b).astype(b.dtype)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()

def check(instructions, result, expected, *operands):
    """Return what is wrong with the instructions; None if nothing."""
    inputs = [values(t, seed=k) for k, t in enumerate(operands)]
    out = np.zeros(256, DTYPES[result])
    launch(elementwise(instructions, result, *operands), "k", 4, 64, out, *inputs)
    with np.errstate(all="ignore"):
        wanted = np.asarray(expected(*inputs)).astype(DTYPES[result])
    if same(out, wanted):
        return None
    wrong = np.flatnonzero([not same(x, y) for x, y in zip(out, wanted)])[:3]
    return [(*(x[k].item() for x in inputs), out[k].item(), wanted[k].item()) for k in wrong]
'''
