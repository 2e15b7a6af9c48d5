# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Small kernels for the emulated driver and a real one, as PTX text.

A real driver compiles the PTX text. The emulated driver has its own code for each name
(``src/kernels.c``), and computes the same results on the host. A launch may have any number of
blocks and threads in one dimension.

===========================================  ======================================================
``emucuda_spin_ns(u64 ns)``                  occupies its stream for that many nanoseconds
``emucuda_fill_u64(u64* p, u64 n, u64 v)``   ``p[i] = v``
``emucuda_iota_u32(u32* p, u64 n, u32 v)``   ``p[i] = v + i``, modulo 2**32
``emucuda_add_u32(u32* p, u64 n, u32 v)``    ``p[i] += v``, modulo 2**32
``emucuda_sum_u32(u64* out, u32* p, u64 n)``  ``*out += p[0] + ... + p[n - 1]``
``emucuda_illegal_address()``                fails its context with CUDA_ERROR_ILLEGAL_ADDRESS
===========================================  ======================================================

With cuda-core::

    from cuda.core import LaunchConfig, ObjectCode, launch
    add = ObjectCode.from_ptx(PTX.encode()).get_kernel("emucuda_add_u32")
    launch(stream, LaunchConfig(grid=256, block=256), add, buffer, numpy.uint64(n), numpy.uint32(1))
"""

from __future__ import annotations

# At the label LOOP, %d3 is the index of the thread's next element. %d4 is the number of threads,
# which is the step from one element of a thread to the next.
_LOOP = """
  .reg .pred %q;
  .reg .b32 %r<8>;
  .reg .b64 %d<10>;
  mov.u32 %r0, %ctaid.x;
  mov.u32 %r1, %ntid.x;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %nctaid.x;
  mul.wide.u32 %d3, %r0, %r1;
  cvt.u64.u32 %d4, %r2;
  add.u64 %d3, %d3, %d4;
  mul.wide.u32 %d4, %r3, %r1;
  ld.param.u64 %d1, [n];
  ld.param.u64 %d0, [p];
  cvta.to.global.u64 %d0, %d0;{setup}
LOOP:
  setp.ge.u64 %q, %d3, %d1;
  @%q bra END;
  shl.b64 %d5, %d3, {shift};
  add.u64 %d5, %d5, %d0;{body}
  add.u64 %d3, %d3, %d4;
  bra LOOP;
END:{finish}
  ret;
"""


def _kernel(name: str, params: str, text: str) -> str:
    return f".visible .entry {name}({params})\n{{{text}}}\n"


def _loop(name: str, params: str, *, shift: int, setup: str, body: str, finish: str = "") -> str:
    text = _LOOP.format(shift=shift, setup=setup, body=body, finish=finish)
    return _kernel(name, params, text)


#: The text of the module. Pass it to ``ObjectCode.from_ptx`` or ``cuModuleLoadData`` (with a NUL at
#: the end).
PTX = (
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    + _kernel(
        "emucuda_spin_ns",
        ".param .u64 ns",
        """
  .reg .pred %q;
  .reg .b64 %d<4>;
  ld.param.u64 %d0, [ns];
  mov.u64 %d1, %globaltimer;
LOOP:
  mov.u64 %d2, %globaltimer;
  sub.u64 %d3, %d2, %d1;
  setp.lt.u64 %q, %d3, %d0;
  @%q bra LOOP;
  ret;
""",
    )
    + _loop(
        "emucuda_fill_u64",
        ".param .u64 p, .param .u64 n, .param .u64 value",
        shift=3,
        setup="\n  ld.param.u64 %d2, [value];",
        body="\n  st.global.u64 [%d5], %d2;",
    )
    + _loop(
        "emucuda_iota_u32",
        ".param .u64 p, .param .u64 n, .param .u32 first",
        shift=2,
        setup="\n  ld.param.u32 %r4, [first];",
        body="\n  cvt.u32.u64 %r5, %d3;\n  add.u32 %r5, %r5, %r4;\n  st.global.u32 [%d5], %r5;",
    )
    + _loop(
        "emucuda_add_u32",
        ".param .u64 p, .param .u64 n, .param .u32 value",
        shift=2,
        setup="\n  ld.param.u32 %r4, [value];",
        body="\n  ld.global.u32 %r5, [%d5];\n  add.u32 %r5, %r5, %r4;\n  st.global.u32 [%d5], %r5;",
    )
    + _loop(
        "emucuda_sum_u32",
        ".param .u64 out, .param .u64 p, .param .u64 n",
        shift=2,
        setup="\n  ld.param.u64 %d2, [out];\n  cvta.to.global.u64 %d2, %d2;\n  mov.u64 %d6, 0;",
        body="\n  ld.global.u32 %r5, [%d5];\n  cvt.u64.u32 %d7, %r5;\n  add.u64 %d6, %d6, %d7;",
        finish="\n  red.global.add.u64 [%d2], %d6;",
    )
    + _kernel(
        "emucuda_illegal_address",
        "",
        """
  .reg .b64 %d<2>;
  mov.u64 %d0, 0x10;
  st.global.u64 [%d0], %d0;
  ret;
""",
    )
)
