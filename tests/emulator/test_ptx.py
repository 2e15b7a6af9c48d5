# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels in PTX compute what NumPy computes, bit for bit."""

import pytest

from tests.emulator.conftest import Emulated
from tests.emulator.ptxchild import LAUNCH


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """Return ``evaluate(expression)``, which evaluates a Python expression in a child process.

    The expression can use the functions of ``LAUNCH``. All calls use the same child.
    """
    machine = Emulated("1x1GiB,context=32MiB", tmp_path_factory.mktemp("ptx") / "machine")
    child = machine.target()
    child.do("context()")
    child.do(LAUNCH)

    def evaluate(expression, statements=""):
        found = child.attempt(f"{statements}\n_ = {expression}")
        assert not isinstance(found, tuple) or found[:1] != ("raised",), found
        return found

    yield evaluate
    machine.close()


#: Each case has an instruction, its result type, a NumPy expression for the same result, and
#: the types of the operands.
INTEGERS = (
    ("add.u32 %d, %a, %b;", "u32", "a + b", "u32 u32"),
    ("add.s16 %d, %a, %b;", "s16", "a + b", "s16 s16"),
    ("sub.s64 %d, %a, %b;", "s64", "a - b", "s64 s64"),
    ("sub.sat.s32 %d, %a, %b;", "s32", "np.clip(a.astype('i8') - b, -2**31, 2**31 - 1)", "s32 s32"),
    ("mul.lo.s32 %d, %a, %b;", "s32", "a * b", "s32 s32"),
    ("mul.hi.s32 %d, %a, %b;", "s32", "(a.astype('i8') * b) >> 32", "s32 s32"),
    (
        "mul.hi.u64 %d, %a, %b;",
        "u64",
        "np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b)], 'u8')",
        "u64 u64",
    ),
    ("mul.wide.s32 %d, %a, %b;", "s64", "a.astype('i8') * b", "s32 s32"),
    ("mul.wide.u16 %d, %a, %b;", "u32", "a.astype('u4') * b", "u16 u16"),
    ("mad.lo.u32 %d, %a, %b, %c;", "u32", "a * b + c", "u32 u32 u32"),
    (
        "div.s32 %d, %a, %b;",
        "s32",
        (
            "[-1 if y == 0 else int(abs(int(x)) // abs(int(y)) * (-1 if (x < 0) != (y < 0) else 1))"
            " & 0xffffffff for x, y in zip(a, b)]"
        ),
        "s32 s32",
    ),
    ("rem.u32 %d, %a, %b;", "u32", "np.where(b == 0, a, a % np.maximum(b, 1))", "u32 u32"),
    ("min.s32 %d, %a, %b;", "s32", "np.minimum(a, b)", "s32 s32"),
    ("max.u16 %d, %a, %b;", "u16", "np.maximum(a, b)", "u16 u16"),
    ("abs.s32 %d, %a;", "s32", "np.abs(a)", "s32"),
    ("neg.s64 %d, %a;", "s64", "-a", "s64"),
    ("and.b32 %d, %a, %b;", "u32", "a & b", "u32 u32"),
    ("xor.b64 %d, %a, %b;", "u64", "a ^ b", "u64 u64"),
    ("not.b16 %d, %a;", "u16", "~a", "u16"),
    ("popc.b32 %d, %a;", "u32", "[bin(x).count('1') for x in a]", "u32"),
    ("clz.b64 %t, 1; clz.b32 %d, %a;", "u32", "[32 - int(x).bit_length() for x in a]", "u32"),
    ("brev.b32 %d, %a;", "u32", "[int(f'{x:032b}'[::-1], 2) for x in a]", "u32"),
    ("bfind.u32 %d, %a;", "u32", "[(int(x).bit_length() - 1) % 2**32 for x in a]", "u32"),
    (
        "and.b32 %x, %b, 63; shl.b32 %d, %a, %x;",
        "u32",
        "np.where((b & 63) < 32, a << (b & 31), 0)",
        "u32 u32",
    ),
    (
        "and.b32 %x, %b, 63; shr.s32 %d, %a, %x;",
        "s32",
        "a >> np.minimum(b & 63, 31).astype('i4')",
        "s32 u32",
    ),
    (
        "shf.l.wrap.b32 %d, %a, %b, 9;",
        "u32",
        "((b.astype('u8') << 32 | a) << 9 >> 32) & 0xffffffff",
        "u32 u32",
    ),
    ("bfe.u32 %d, %a, 5, 9;", "u32", "a >> 5 & 511", "u32"),
    ("bfe.s32 %d, %a, 28, 9;", "s32", "a >> 28", "s32"),
    ("bfi.b32 %d, %a, %b, 8, 12;", "u32", "b & 0xfff000ff | a << 8 & 0xfff00", "u32 u32"),
    ("prmt.b32 %d, %a, %b, 0x5140;", "u32", "PERMUTED", "u32 u32"),
    ("lop3.b32 %d, %a, %b, %c, 0xe8;", "u32", "a & b | a & c | b & c", "u32 u32 u32"),
    (
        "add.cc.u32 %d, %a, %b; addc.u32 %d, 0, 0;",
        "u32",
        "(a.astype('u8') + b) >> 32",
        "u32 u32",
    ),
    (
        "{ .reg .pred %p; setp.lt.s32 %p, %a, %b; selp.b32 %d, %a, %b, %p; }",
        "s32",
        "np.minimum(a, b)",
        "s32 s32",
    ),
    (
        "mov.b32 %d, 7; setp.gt.u32 %p, %a, %b; @!%p mov.b32 %d, 8;",
        "u32",
        "np.where(a > b, 7, 8)",
        "u32 u32",
    ),
)
FLOATS = (
    ("add.f32 %d, %a, %b;", "f32", "a + b", "f32 f32"),
    ("sub.rn.f64 %d, %a, %b;", "f64", "a - b", "f64 f64"),
    ("mul.f32 %d, %a, %b;", "f32", "a * b", "f32 f32"),
    (
        "mul.rz.f32 %d, %a, %b;",
        "f32",
        "TRUNCATED(a.astype('f8') * b)",
        "f32 f32",
    ),
    ("div.rn.f32 %d, %a, %b;", "f32", "a / b", "f32 f32"),
    (
        "fma.rn.f32 %d, %a, %b, %c;",
        "f32",
        "a.astype(np.longdouble) * b + c",
        "f32 f32 f32",
    ),
    ("sqrt.rn.f64 %d, %a;", "f64", "np.sqrt(a)", "f64"),
    ("neg.f32 %d, %a;", "f32", "-a", "f32"),
    ("abs.f64 %d, %a;", "f64", "np.abs(a)", "f64"),
    ("add.sat.f32 %d, %a, %b;", "f32", "np.clip(np.nan_to_num(a + b, posinf=1), 0, 1)", "f32 f32"),
    ("ex2.approx.f32 %d, %a;", "f32", "np.exp2(a.astype('f8'))", "f32"),
    ("add.f16 %d, %a, %b;", "f16", "a + b", "f16 f16"),
    ("mul.f16 %d, %a, %b;", "f16", "a * b", "f16 f16"),
    ("fma.rn.f16 %d, %a, %b, %c;", "f16", "a.astype('f8') * b + c", "f16 f16 f16"),
    ("add.bf16 %d, %a, %b;", "bf16", "TO_BF16(BF16(a) + BF16(b))", "bf16 bf16"),
    ("setp.lt.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "u32", "a < b", "f32 f32"),
    ("setp.neu.f32 %p, %a, %b; selp.b32 %d, 1, 0, %p;", "u32", "a != b", "f32 f32"),
)
CONVERSIONS = (
    ("cvt.rn.f32.s32 %d, %a;", "f32", "a", "s32"),
    ("cvt.rn.f32.u64 %d, %a;", "f32", "a", "u64"),
    ("cvt.rn.f64.s64 %d, %a;", "f64", "a", "s64"),
    ("cvt.rzi.s32.f32 %d, %a;", "s32", "np.clip(a.astype('f8'), -2**31, 2**31 - 1)", "f32"),
    ("cvt.rni.f32.f32 %d, %a;", "f32", "np.rint(a)", "f32"),
    ("cvt.rn.f16.f32 %d, %a;", "f16", "a", "f32"),
    ("cvt.f32.f16 %d, %a;", "f32", "a", "f16"),
    ("cvt.rn.bf16.f32 %d, %a;", "bf16", "TO_BF16(a)", "f32"),
    ("cvt.f64.f32 %d, %a;", "f64", "a", "f32"),
    ("cvt.rn.f32.f64 %d, %a;", "f32", "a", "f64"),
    ("cvt.s64.s32 %d, %a;", "s64", "a", "s32"),
    ("cvt.u32.u8 %d, %a;", "u32", "a & 255", "u32"),
    ("cvt.s32.s8 %d, %a;", "s32", "a.astype('i1')", "u32"),
    ("cvt.sat.u8.s32 %d, %a;", "u32", "np.clip(a, 0, 255)", "s32"),
    (
        "cvt.rn.f16x2.f32 %d, %a, %b;",
        "u32",
        "a.astype('f2').view('u2').astype('u4') << 16 | b.astype('f2').view('u2')",
        "f32 f32",
    ),
)
SETUP = """
def BF16(a):
    return (a.astype(np.uint32) << 16).view(np.float32)
def TO_BF16(v):
    v = np.asarray(v, np.float32)
    bits = v.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(v), 0x7fff, rounded).astype(np.uint16)
def TRUNCATED(v):
    f = v.astype(np.float32)
    over = np.abs(f.astype(np.float64)) > np.abs(v)
    return np.where(over & np.isfinite(v), np.nextafter(f, np.float32(0)), f)
"""


@pytest.mark.parametrize(
    ("instructions", "result", "expected", "operands"),
    [*INTEGERS, *FLOATS, *CONVERSIONS],
    ids=lambda value: value.split()[0] if value.endswith(";") else "",
)
def test_an_instruction_computes_the_same_as_numpy(ptx, instructions, result, expected, operands):
    expected = expected.replace(
        "PERMUTED",
        "(b >> 8 & 255) << 24 | (a >> 8 & 255) << 16 | (b & 255) << 8 | (a & 255)",
    )
    types = operands.split()
    names = ", ".join("abc"[: len(types)])
    call = f"check({instructions!r}, {result!r}, lambda {names}: {expected}, *{types!r})"
    assert ptx(call, SETUP) is None


SUM = """HEAD + '''.extern .shared .align 16 .b8 room[];
.visible .entry k(.param .u64 out, .param .u64 in) {
  .reg .b32 %r<20>; .reg .f32 %f<4>; .reg .b64 %d<8>; .reg .pred %p<4>;
  .shared .align 4 .b8 more[8];
  mov.u32 %r1, %tid.x;
  ld.param.u64 %d1, [in];
  mul.wide.u32 %d2, %r1, 4;
  add.s64 %d1, %d1, %d2;
  ld.global.f32 %f1, [%d1];
  mov.u32 %r2, room;
  shl.b32 %r3, %r1, 2;
  add.u32 %r2, %r2, %r3;
  st.shared.f32 [%r2], %f1;
  mov.u32 %r4, 64;
LOOP:
  bar.sync 0;
  setp.ge.u32 %p1, %r1, %r4;
  @%p1 bra NEXT;
  shl.b32 %r5, %r4, 2;
  add.u32 %r6, %r2, %r5;
  ld.shared.f32 %f2, [%r6];
  ld.shared.f32 %f1, [%r2];
  add.f32 %f1, %f1, %f2;
  st.shared.f32 [%r2], %f1;
NEXT:
  shr.u32 %r4, %r4, 1;
  setp.ne.u32 %p2, %r4, 0;
  @%p2 bra LOOP;
  setp.ne.u32 %p3, %r1, 0;
  @%p3 ret;
  ld.param.u64 %d3, [out];
  st.global.f32 [%d3], %f1;
}'''"""


def test_threads_of_a_block_add_values_in_shared_memory(ptx):
    run = f"""
x = np.arange(128, dtype=np.float32)
out = np.zeros(1, np.float32)
launch({SUM}, "k", 1, 128, out, x, shared=512)"""
    assert ptx("out[0].item(), x.sum().item()", run) == (8128.0, 8128.0)


WARP = """HEAD + '''.visible .entry k(.param .u64 out) {
  .reg .b32 %r<20>; .reg .b64 %d<4>; .reg .pred %p<4>;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 8;
  mov.b32 %r9, 0;
  @%p1 bra FEW;
  mul.lo.u32 %r9, %r1, 100;
  bra JOIN;
FEW:
  add.u32 %r9, %r1, 1;
JOIN:
  INSTRUCTIONS
  ld.param.u64 %d1, [out];
  mad.wide.u32 %d1, %r1, 4, %d1;
  st.global.u32 [%d1], %r3;
  ret;
}'''"""
LANES = "np.where(lane < 8, lane + 1, lane * 100)"


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ("shfl.sync.bfly.b32 %r3, %r9, 4, 31, -1;", "v[lane ^ 4]"),
        ("shfl.sync.up.b32 %r3|%p2, %r9, 3, 0, -1;", "np.where(lane < 3, v, v[lane - 3])"),
        ("shfl.sync.idx.b32 %r3, %r9, 2, 0x181f, -1;", "v[lane // 8 * 8 + 2]"),
        ("vote.sync.ballot.b32 %r3, %p1, -1;", "np.full(32, 255)"),
        ("vote.sync.any.pred %p3, !%p1, -1; selp.b32 %r3, 5, 6, %p3;", "np.full(32, 5)"),
        ("redux.sync.add.s32 %r3, %r9, -1;", "np.full(32, v.sum())"),
        ("match.any.sync.b32 %r3, %laneid, -1;", "1 << lane"),
        ("mov.u32 %r3, %lanemask_lt;", "(1 << lane) - 1"),
        ("bar.red.popc.u32 %r3, 0, %p1;", "np.full(32, 8)"),
    ],
    ids=lambda value: value.split()[0] if value.endswith(";") else "",
)
def test_lanes_of_a_warp_reconverge_after_a_branch(ptx, instructions, expected):
    run = f"""
lane = np.arange(32)
v = {LANES}
out = np.zeros(32, np.uint32)
launch({WARP}.replace("INSTRUCTIONS", {instructions!r}), "k", 1, 32, out)
wanted = np.asarray({expected}).astype(np.uint32)"""
    assert ptx("(out == wanted).all().item() or (out.tolist(), wanted.tolist())", run) is True


CALLS = """HEAD + '''
.global .align 4 .u32 table[4] = {3, 5, 7, 11};
.const .align 8 .u64 where = generic(table);
.global .u32 count;
.func (.param .b32 result) looked_up (.param .b32 index) {
  .reg .b32 %r<4>; .reg .b64 %d<4>; .reg .pred %p;
  ld.param.u32 %r1, [index];
  mov.b32 %r2, 99;
  setp.ge.u32 %p, %r1, 4;
  @%p bra DONE;
  ld.const.u64 %d1, [where];
  mad.wide.u32 %d1, %r1, 4, %d1;
  ld.u32 %r2, [%d1];
DONE:
  st.param.b32 [result], %r2;
  ret;
}
.visible .entry k(.param .u64 out) {
  .local .align 8 .b8 room[16];
  .reg .b64 %SP, %SPL, %d<4>; .reg .b32 %r<8>;
  mov.u64 %SPL, room;
  cvta.local.u64 %SP, %SPL;
  mov.u32 %r1, %tid.x;
  {
  .param .b32 one;
  st.param.b32 [one], %r1;
  .param .b32 found;
  call.uni (found), looked_up, (one);
  ld.param.b32 %r2, [found];
  }
  st.local.u32 [%SPL+4], %r2;
  ld.u32 %r3, [%SP+4];
  atom.global.add.u32 %r4, [count], 1;
  st.v2.u32 [%SP+8], {%r3, %r4};
  ld.local.v2.u32 {%r5, %r6}, [%SPL+8];
  mad.lo.u32 %r7, %r6, 1000, %r5;
  ld.param.u64 %d1, [out];
  mad.wide.u32 %d1, %r1, 4, %d1;
  st.global.u32 [%d1], %r7;
  ret;
}'''"""


def test_functions_variables_and_local_memory_work(ptx):
    run = f"""
out = np.zeros(6, np.uint32)
launch({CALLS}, "k", 1, 6, out)"""
    assert ptx("out.tolist()", run) == [3, 1005, 2007, 3011, 4099, 5099]


MMA = """HEAD + '''.visible .entry k(.param .u64 out, .param .u64 a, .param .u64 b, .param .u64 c) {
  .reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %l; .reg .b64 %x, %y;
  mov.u32 %l, %laneid;
  mul.wide.u32 %y, %l, 16;
  ld.param.u64 %x, [a]; add.u64 %x, %x, %y; ld.global.v4.b32 {%a0, %a1, %a2, %a3}, [%x];
  ld.param.u64 %x, [c]; add.u64 %x, %x, %y; ld.global.v4.b32 {%c0, %c1, %c2, %c3}, [%x];
  mul.wide.u32 %y, %l, 8;
  ld.param.u64 %x, [b]; add.u64 %x, %x, %y; ld.global.v2.b32 {%b0, %b1}, [%x];
  mma.sync.aligned.SHAPE {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%b0, %b1},
    {%c0, %c1, %c2, %c3};
  mul.wide.u32 %y, %l, 16;
  ld.param.u64 %x, [out]; add.u64 %x, %x, %y; st.global.v4.b32 [%x], {%d0, %d1, %d2, %d3};
  ret;
}'''"""


@pytest.mark.parametrize(
    ("shape", "depth", "dtype", "total"),
    [
        ("m16n8k16.row.col.f32.f16.f16.f32", 16, "f2", "f4"),
        ("m16n8k16.row.col.f32.bf16.bf16.f32", 16, "bf16", "f4"),
        ("m16n8k8.row.col.f32.tf32.tf32.f32", 8, "f4", "f4"),
        ("m16n8k32.row.col.s32.s8.s8.s32", 32, "i1", "i4"),
    ],
)
def test_matrices_of_a_warp_are_multiplied(ptx, shape, depth, dtype, total):
    run = f"""
r = np.random.default_rng(3)
A, B, C = (r.integers(-9, 9, s) for s in ((16, {depth}), ({depth}, 8), (16, 8)))
lane = np.arange(32)
g, t = lane // 4, lane % 4
per = {depth} // 8
def fragment(m, rows, columns):
    return np.stack([m[rows(n), columns(n)] for n in range({depth} * 16 // 32)], 1)
def packed(m):
    if {dtype!r} == "bf16":
        return (m.astype("f4").view("u4") >> 16).astype("u2")
    return m.astype({dtype!r})
a = np.stack([A[g + 8 * (k // per % 2), t * per + k // per // 2 * 4 * per + k % per]
              for k in range(4 * per)], 1)
b = np.stack([B[t * per + k // per * 4 * per + k % per, g] for k in range(2 * per)], 1)
at = [(g + 8 * (k // 2), t * 2 + k % 2) for k in range(4)]
c = np.stack([C[x] for x in at], 1).astype({total!r})
out = np.zeros((32, 4), {total!r})
launch({MMA}.replace("SHAPE", {shape!r}), "k", 1, 32, out, packed(a), packed(b), c)
wanted = np.stack([(A @ B + C)[x] for x in at], 1)"""
    assert ptx("(out == wanted).all().item()", run) is True


def test_ldmatrix_gives_each_lane_its_two_values(ptx):
    run = """
text = HEAD + '''.visible .entry k(.param .u64 out, .param .u64 in) {
  .shared .align 16 .b8 room[512];
  .reg .b32 %r<8>; .reg .b64 %d<4>;
  mov.u32 %r1, %laneid; mov.u32 %r2, room; mad.lo.u32 %r2, %r1, 16, %r2;
  ld.param.u64 %d1, [in]; mad.wide.u32 %d1, %r1, 16, %d1;
  cp.async.cg.shared.global [%r2], [%d1], 16;
  cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
  ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r3, %r4, %r5, %r6}, [%r2];
  ld.param.u64 %d2, [out]; mad.wide.u32 %d2, %r1, 16, %d2;
  st.global.v4.b32 [%d2], {%r3, %r4, %r5, %r6};
  ret;
}'''
m = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
out = np.zeros((32, 4, 2), np.uint16)
launch(text, "k", 1, 32, out, m)
lane = np.arange(32)
row, column = lane // 4, lane % 4 * 2
wanted = np.stack(
    [np.stack([m[k].T[row, column + n] for n in (0, 1)], 1) for k in range(4)], 1)"""
    assert ptx("(out == wanted).all().item()", run) is True


ATOMS = """HEAD + '''.visible .entry k(.param .u64 out) {
  .reg .b32 %r<8>; .reg .b64 %d; .reg .f32 %f<4>;
  ld.param.u64 %d, [out];
  mov.u32 %r1, %tid.x;
  red.global.add.u32 [%d], 2;
  atom.max.u32 %r2, [%d+4], %r1;
  atom.global.cas.b32 %r3, [%d+8], 0, 77;
  mov.f32 %f1, 0f3F000000;
  atom.global.add.f32 %f2, [%d+12], %f1;
  atom.global.inc.u32 %r4, [%d+16], 9;
  ret;
}'''"""


def test_atomic_operations_of_all_threads_take_effect(ptx):
    run = f"""
out = np.zeros(5, np.uint32)
launch({ATOMS}, "k", 3, 64, out)"""
    assert ptx("out[:3].tolist() + out[3:4].view('f4').tolist()", run) == [384, 63, 77, 96.0]
    assert ptx("out[4].item()") == 192 % 10


def test_lanes_of_a_warp_may_wait_for_each_other(ptx):
    # All lanes of a warp try to take one lock in a loop. The lane that has the lock must go on and
    # release it, while the other lanes are still in the loop.
    run = """
text = HEAD + '''.visible .entry k(.param .u64 out) {
  .reg .b32 %r<8>; .reg .b64 %d; .reg .pred %p;
  ld.param.u64 %d, [out];
AGAIN:
  atom.global.cas.b32 %r1, [%d], 0, 1;
  setp.ne.u32 %p, %r1, 0;
  @%p bra AGAIN;
  ld.global.u32 %r2, [%d+4];
  add.u32 %r2, %r2, 1;
  st.global.u32 [%d+4], %r2;
  atom.global.exch.b32 %r3, [%d], 0;
  ret;
}'''
out = np.zeros(2, np.uint32)
launch(text, "k", 2, 64, out)"""
    assert ptx("out.tolist()", run) == [0, 128]


BAD = "HEAD + '.visible .entry k(.param .u64 out) {{ .reg .b64 %d<4>; .reg .b32 %r; {} ret; }}'"


@pytest.mark.parametrize(
    ("instructions", "code"),
    [
        ("wgmma.fence.sync.aligned;", 801),
        ("call no_such_function;", 801),
        ("tex.2d.v4.f32.f32 {%r, %r, %r, %r}, [%d1, {%r, %r}];", 801),
        ("bra NOWHERE;", 218),
        ("add.u32 %r, %unknown, 1;", 801),
    ],
)
def test_unknown_instruction_is_refused_at_load(ptx, instructions, code):
    text = BAD.format(instructions)
    assert ptx(f"launch({text}, 'k', 1, 1, np.zeros(1))") == ("failed", code)
    assert ptx("check('add.u32 %d, %a, %b;', 'u32', lambda a, b: a + b, 'u32', 'u32')") is None


@pytest.mark.parametrize(
    ("instructions", "code"),
    [
        ("mov.b64 %d1, 4096; st.global.u32 [%d1], 1;", 700),
        ("ld.param.u64 %d1, [out]; ld.global.u32 %r, [%d1+8];", 700),
        ("ld.param.u64 %d1, [out]; st.global.u32 [%d1+2], 1;", 716),
        ("trap;", 719),
    ],
)
def test_forbidden_kernel_operation_ends_the_context(emulated, instructions, code):
    child = emulated("1x256MiB,context=32MiB").target()
    child.do("context()")
    child.do(LAUNCH)
    text = BAD.format(instructions)
    assert child.attempt(f"launch({text}, 'k', 1, 1, np.zeros(1))") == ("failed", code)
    assert child.attempt("ok(D.cuMemAlloc(1))") == ("failed", code)


def test_a_captured_kernel_runs_at_each_launch_of_its_graph(ptx):
    run = """
text = elementwise("add.u32 %d, %a, 1;", "u32", "u32")
module = loaded(text)
kernel = ok(D.cuModuleGetFunction(module, b"k"))
p = ok(D.cuMemAlloc(256))
ok(D.cuMemsetD32(p, 5, 64))
stream = ok(D.cuStreamCreate(1))
values = np.array([int(p), int(p)], np.uint64)
pointers = np.array([values.ctypes.data, values.ctypes.data + 8], np.uint64)
ok(D.cuStreamBeginCapture(stream, D.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(D.cuLaunchKernel(kernel, 2, 1, 1, 32, 1, 1, 0, stream, pointers.ctypes.data, 0))
graph = ok(D.cuStreamEndCapture(stream))
run = ok(D.cuGraphInstantiate(graph, 0))
for _ in range(3):
    ok(D.cuGraphLaunch(run, stream))
ok(D.cuStreamSynchronize(stream))
out = np.zeros(64, np.uint32)
ok(D.cuMemcpyDtoH(out.ctypes.data, p, 256))"""
    assert ptx("set(out.tolist())", run) == {8}


def test_a_variable_of_a_module_is_device_memory(ptx):
    run = f"""
module = loaded({CALLS})
p, size = ok(D.cuModuleGetGlobal(module, b"table"))
out = np.zeros(4, np.uint32)
ok(D.cuMemcpyDtoH(out.ctypes.data, p, 16))"""
    assert ptx("(size, out.tolist())", run) == (16, [3, 5, 7, 11])


def test_the_linker_joins_ptx_for_a_module(ptx):
    run = """
one = HEAD + '''.func (.param .b32 r) twice (.param .b32 x) {
  .reg .b32 %r; ld.param.u32 %r, [x]; shl.b32 %r, %r, 1; st.param.b32 [r], %r; ret; }'''
two = HEAD + '''.extern .func (.param .b32 r) twice (.param .b32 x);
.visible .entry k(.param .u64 out) {
  .reg .b32 %r; .reg .b64 %d; ld.param.u64 %d, [out];
  { .param .b32 x; .param .b32 r; st.param.b32 [x], 21;
    call (r), twice, (x); ld.param.b32 %r, [r]; }
  st.global.u32 [%d], %r; ret; }'''
state = ok(D.cuLinkCreate(0, [], []))
kind = D.CUjitInputType.CU_JIT_INPUT_PTX
for text in (one, two):
    ok(D.cuLinkAddData(state, kind, text.encode(), len(text), b"", 0, [], []))
image, size = ok(D.cuLinkComplete(state))
joined = ctypes.string_at(image, size - 1).decode()
out = np.zeros(1, np.uint32)
launch(joined, "k", 1, 1, out)
ok(D.cuLinkDestroy(state))"""
    assert ptx("out.item()", run) == 42
