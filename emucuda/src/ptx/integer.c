/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Integers and bits: the operations from add to mad, logic, shifts and bit fields.
 *
 * A register may hold more bits than an instruction uses. So each instruction uses only the low
 * bits of a register: the number of bits that the instruction's type has.
 */
#include "ptx.h"

/* In `result`, x, y and z are the operands as unsigned numbers; sx and sy are x and y as signed
 * numbers. */
#define OPERATION(name, result)                                                                       \
    static void name(struct warp *w, const struct instruction *i, uint32_t mask)                      \
    {                                                                                                 \
        const unsigned bits = i->type.bits;                                                           \
        const uint64_t low = low_bits(bits), *a = ARG(w, i, 1, 0);                                    \
        const uint64_t *b = i->count[2] ? ARG(w, i, 2, 0) : a, *c = i->count[3] ? ARG(w, i, 3, 0) : a; \
        const bool is_signed = i->type.kind == KIND_SIGNED;                                           \
        uint64_t *d = ARG(w, i, 0, 0);                                                                \
        FOR_LANES(l, mask) {                                                                          \
            uint64_t x = a[l] & low, y = b[l] & low, z = c[l];                                        \
            int64_t sx = sign_extend(x, bits), sy = sign_extend(y, bits);                             \
            (void)x, (void)y, (void)z, (void)sx, (void)sy, (void)is_signed;                           \
            d[l] = (uint64_t)(result);                                                                \
        }                                                                                             \
    }

static uint64_t high(bool is_signed, unsigned bits, uint64_t x, uint64_t y, int64_t sx, int64_t sy)
{
    if (bits == 64)
        return is_signed ? (uint64_t)(((__int128)sx * sy) >> 64) : (uint64_t)(((unsigned __int128)x * y) >> 64);
    return (is_signed ? (uint64_t)(sx * sy) : x * y) >> bits;
}

static uint64_t quotient(bool is_signed, uint64_t x, uint64_t y, int64_t sx, int64_t sy)
{
    if (!y)
        return ~0ull; /* as on hardware; PTX does not define this result */
    return is_signed ? sy == -1 ? 0 - (uint64_t)sx : (uint64_t)(sx / sy) : x / y;
}

static uint64_t remainder_of(bool is_signed, uint64_t x, uint64_t y, int64_t sx, int64_t sy)
{
    if (!y)
        return x;
    return is_signed ? sy == -1 ? 0 : (uint64_t)(sx % sy) : x % y;
}

static uint64_t saturated(int64_t v) { return (uint64_t)(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v); }

OPERATION(add, x + y)
OPERATION(add_sat, saturated(sx + sy))
OPERATION(sub, x - y)
OPERATION(sub_sat, saturated(sx - sy))
OPERATION(mul, x *y)
OPERATION(mul_high, high(is_signed, bits, x, y, sx, sy))
OPERATION(mul_wide, is_signed ? (uint64_t)(sx * sy) : x * y)
OPERATION(mul24, sign_extend(x << 40, 64) >= 0 && !is_signed ? (x & 0xffffff) * (y & 0xffffff)
                 : (uint64_t)(sign_extend(x & 0xffffff, is_signed ? 24 : 64) *
                              sign_extend(y & 0xffffff, is_signed ? 24 : 64)))
OPERATION(mad, x *y + z)
OPERATION(mad_high, high(is_signed, bits, x, y, sx, sy) + z)
OPERATION(mad_wide, (is_signed ? (uint64_t)(sx * sy) : x * y) + z)
OPERATION(divide, quotient(is_signed, x, y, sx, sy))
OPERATION(modulo, remainder_of(is_signed, x, y, sx, sy))
OPERATION(minimum, is_signed ? (sx < sy ? x : y) : (x < y ? x : y))
OPERATION(maximum, is_signed ? (sx > sy ? x : y) : (x > y ? x : y))
OPERATION(absolute, sx < 0 ? 0 - (uint64_t)sx : (uint64_t)sx)
OPERATION(negative, 0 - x)
OPERATION(sad, z + (is_signed ? (sx < sy ? (uint64_t)sy - (uint64_t)sx : (uint64_t)sx - (uint64_t)sy)
                              : (x < y ? y - x : x - y)))
OPERATION(and_, x &y)
OPERATION(or_, x | y)
OPERATION(xor_, x ^ y)
OPERATION(not_, ~x)
OPERATION(not_predicate, !x)
OPERATION(cnot, !x)
OPERATION(popc, __builtin_popcountll(x))
OPERATION(clz, x ? (unsigned)__builtin_clzll(x) - (64 - bits) : bits)

static uint64_t reversed(uint64_t x, unsigned bits)
{
    uint64_t r = 0;
    for (unsigned n = 0; n < bits; n++)
        r |= (x >> n & 1) << (bits - 1 - n);
    return r;
}
OPERATION(brev, reversed(x, bits))

static uint64_t found(uint64_t x, int64_t sx, bool is_signed, unsigned bits, bool as_shift)
{
    uint64_t v = is_signed && sx < 0 ? ~x & low_bits(bits) : x;
    if (!v)
        return 0xffffffff;
    unsigned at = 63u - (unsigned)__builtin_clzll(v);
    return as_shift ? bits - 1 - at : at;
}
OPERATION(bfind, found(x, sx, is_signed, bits, i->how))

/* The amount of a shift has 32 bits, and may be larger than the width of the type. */
OPERATION(shl, (uint32_t)b[l] < bits ? x << (uint32_t)b[l] : 0)
OPERATION(shr, is_signed ? (uint64_t)(sx >> ((uint32_t)b[l] < bits ? (uint32_t)b[l] : bits - 1))
               : (uint32_t)b[l] < bits ? x >> (uint32_t)b[l] : 0)

static unsigned funnel(uint64_t amount, bool wraps)
{
    return wraps ? (unsigned)amount & 31 : (uint32_t)amount > 32 ? 32 : (uint32_t)amount;
}
OPERATION(shf_left, (uint32_t)(((y << 32 | x) << funnel(z, i->how)) >> 32))
OPERATION(shf_right, (uint32_t)((y << 32 | x) >> funnel(z, i->how)))

static uint64_t extracted(uint64_t x, bool is_signed, unsigned bits, unsigned at, unsigned length)
{
    unsigned top = at + length - 1;
    if (!length)
        return 0;
    uint64_t sign = is_signed ? x >> (top < bits ? top : bits - 1) & 1 : 0;
    uint64_t field = at < bits ? x >> at : 0;
    uint64_t inside = at < bits ? low_bits(length < bits - at ? length : bits - at) : 0;
    return (field & inside) | (sign ? ~inside : 0);
}
OPERATION(bfe, extracted(x, is_signed, bits, (unsigned)b[l] & 255, (unsigned)z & 255))

/* bfi: the result is b with the lowest n bits of a in place of n bits of b, from bit c on. */
static void bfi(struct warp *w, const struct instruction *i, uint32_t mask)
{
    const uint64_t *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = ARG(w, i, 3, 0), *n = ARG(w, i, 4, 0);
    uint64_t *d = ARG(w, i, 0, 0);
    FOR_LANES(l, mask) {
        unsigned at = (unsigned)c[l] & 255, length = (unsigned)n[l] & 255, bits = i->type.bits;
        uint64_t field = at < bits ? low_bits(length) << at : 0;
        d[l] = (b[l] & ~field) | (at < bits ? a[l] << at & field : 0);
    }
}

OPERATION(bmsk, ((uint32_t)y ? low_bits((uint32_t)y > 32 ? 32 : (unsigned)y) : 0) << (x > 63 ? 63 : x))

static uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t s = selector >> (4 * n) & 15, byte = (uint32_t)(both >> (8 * (s & 7))) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * n);
    }
    return r;
}
OPERATION(prmt, permuted((uint32_t)x, (uint32_t)y, (uint32_t)z))

static uint64_t looked_up(uint32_t a, uint32_t b, uint32_t c, unsigned table)
{
    uint32_t r = 0;
    for (unsigned n = 0; n < 8; n++)
        if (table >> n & 1)
            r |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return r;
}
OPERATION(lop3, looked_up((uint32_t)x, (uint32_t)y, (uint32_t)z, i->how))

/* dp4a, dp2a: sums of products of small integers. */
static void dot(struct warp *w, const struct instruction *i, uint32_t mask)
{
    const uint64_t *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = ARG(w, i, 3, 0);
    uint64_t *d = ARG(w, i, 0, 0);
    bool a_signed = i->from.kind == KIND_SIGNED, b_signed = i->type.kind == KIND_SIGNED;
    unsigned wide = i->how == 2 ? 16 : 8, first = i->flags & HIGH ? 2 : 0;
    FOR_LANES(l, mask) {
        int64_t sum = (int64_t)c[l];
        for (unsigned n = 0; n < i->how; n++) {
            uint64_t x = a[l] >> (wide * n) & low_bits(wide), y = b[l] >> (8 * (n + first)) & 255;
            sum += (a_signed ? sign_extend(x, wide) : (int64_t)x) * (b_signed ? sign_extend(y, 8) : (int64_t)y);
        }
        d[l] = (uint64_t)sum;
    }
}

/* add.cc, addc, sub.cc, subc. Each lane has its own carry, the condition code. */
static void carrying(struct warp *w, const struct instruction *i, uint32_t mask)
{
    const uint64_t low = low_bits(i->type.bits), *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0);
    uint64_t *d = ARG(w, i, 0, 0);
    bool subtracts = i->how == '-';
    FOR_LANES(l, mask) {
        unsigned __int128 in = i->flags & CARRY_IN ? w->carry >> l & 1 : 0;
        unsigned __int128 x = a[l] & low, y = b[l] & low, sum = subtracts ? x - y - in : x + y + in;
        d[l] = (uint64_t)sum & low;
        if (i->flags & CARRY_OUT) {
            bool out = subtracts ? x < y + in : sum > low;
            w->carry = (w->carry & ~(1u << l)) | (uint32_t)out << l;
        }
    }
}

/* mad.lo.cc, madc.hi and similar instructions. */
static void mad_carrying(struct warp *w, const struct instruction *i, uint32_t mask)
{
    const uint64_t low = low_bits(i->type.bits), *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = ARG(w, i, 3, 0);
    uint64_t *d = ARG(w, i, 0, 0);
    unsigned bits = i->type.bits;
    FOR_LANES(l, mask) {
        unsigned __int128 in = i->flags & CARRY_IN ? w->carry >> l & 1 : 0;
        uint64_t x = a[l] & low, y = b[l] & low;
        uint64_t part = i->flags & HIGH ? high(i->type.kind == KIND_SIGNED, bits, x, y, sign_extend(x, bits),
                                               sign_extend(y, bits)) : x * y;
        unsigned __int128 sum = (unsigned __int128)(part & low) + (c[l] & low) + in;
        d[l] = (uint64_t)sum & low;
        if (i->flags & CARRY_OUT)
            w->carry = (w->carry & ~(1u << l)) | (uint32_t)(sum > low) << l;
    }
}

/* ---- decoding ---- */

static bool arguments(struct builder *b, const struct statement *s, struct instruction *i, int count)
{
    if (s->args != count)
        return false;
    arg_result(b, i, s->arg[0]);
    for (int a = 1; a < count; a++)
        arg_value(b, i, s->arg[a], i->type);
    return true;
}

static const struct {
    const char *name;
    int args;
    execute *run, *high, *wide, *saturating;
} simple[] = {
    {"add", 3, add, NULL, NULL, add_sat}, {"sub", 3, sub, NULL, NULL, sub_sat}, {"mul", 3, mul, mul_high, mul_wide, NULL},
    {"mad", 4, mad, mad_high, mad_wide, NULL}, {"mul24", 3, mul24, NULL, NULL, NULL},
    {"div", 3, divide, NULL, NULL, NULL}, {"rem", 3, modulo, NULL, NULL, NULL}, {"min", 3, minimum, NULL, NULL, NULL},
    {"max", 3, maximum, NULL, NULL, NULL}, {"abs", 2, absolute, NULL, NULL, NULL}, {"neg", 2, negative, NULL, NULL, NULL},
    {"sad", 4, sad, NULL, NULL, NULL}, {"and", 3, and_, NULL, NULL, NULL}, {"or", 3, or_, NULL, NULL, NULL},
    {"xor", 3, xor_, NULL, NULL, NULL}, {"not", 2, not_, NULL, NULL, NULL}, {"cnot", 2, cnot, NULL, NULL, NULL},
    {"popc", 2, popc, NULL, NULL, NULL}, {"clz", 2, clz, NULL, NULL, NULL}, {"brev", 2, brev, NULL, NULL, NULL},
    {"shl", 3, shl, NULL, NULL, NULL}, {"shr", 3, shr, NULL, NULL, NULL}, {"bfe", 4, bfe, NULL, NULL, NULL},
    {"bfi", 5, bfi, NULL, NULL, NULL}, {"prmt", 4, prmt, NULL, NULL, NULL}, {"bmsk", 3, bmsk, NULL, NULL, NULL},
};

static bool decode_simple(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    bool predicate = i->type.kind == KIND_PREDICATE;
    if (i->type.count != 1 || i->type.bits > 64 || (i->type.kind > KIND_SIGNED && !predicate) || has(s, "cc"))
        return false;
    for (unsigned n = 0; n < sizeof simple / sizeof *simple; n++) {
        if (strcmp(simple[n].name, s->name))
            continue;
        i->run = has(s, "hi") ? simple[n].high : has(s, "wide") ? simple[n].wide
                 : has(s, "sat") ? simple[n].saturating : simple[n].run;
        if (predicate)
            i->run = i->run == not_ ? not_predicate : i->run == and_ || i->run == or_ || i->run == xor_ ? i->run : NULL;
        if (!strcmp(s->name, "prmt") && s->parts != 1)
            return false;
        return i->run && arguments(b, s, i, simple[n].args);
    }
    return false;
}

static bool decode_carry(struct builder *b, const struct statement *s, struct instruction *i)
{
    bool mads = s->name[0] == 'm';
    i->type = type_at(s, 1);
    i->how = s->name[0] == 's' ? '-' : '+';
    i->flags = (uint16_t)((has(s, "cc") ? CARRY_OUT : 0) | (s->name[3] == 'c' ? CARRY_IN : 0) | (has(s, "hi") ? HIGH : 0));
    i->run = mads ? mad_carrying : carrying;
    return i->type.count && i->type.kind <= KIND_SIGNED && i->flags & (CARRY_IN | CARRY_OUT) &&
           arguments(b, s, i, mads ? 4 : 3);
}

static bool decode_bfind(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    i->how = has(s, "shiftamt");
    i->run = bfind;
    return i->type.count && arguments(b, s, i, 2);
}

static bool decode_shf(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    i->how = has(s, "wrap");
    i->run = has(s, "l") ? shf_left : shf_right;
    return i->type.bits == 32 && arguments(b, s, i, 4);
}

static bool decode_lop3(struct builder *b, const struct statement *s, struct instruction *i)
{
    bool good;
    i->type = (struct type){KIND_BITS, 32, 1};
    i->run = lop3;
    if (s->parts != 1 || s->args != 5)
        return false;
    i->how = (uint16_t)literal(s->arg[4], i->type, &good);
    arg_result(b, i, s->arg[0]);
    for (int a = 1; a < 4; a++)
        arg_value(b, i, s->arg[a], i->type);
    return good;
}

static bool decode_dot(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->from = type_at(s, 2); /* type of a */
    i->type = type_at(s, 1); /* type of b */
    i->how = s->name[2] == '4' ? 4 : 2;
    i->flags = has(s, "hi") ? HIGH : 0;
    i->run = dot;
    return i->type.bits == 32 && i->from.bits == 32 && arguments(b, s, i, 4);
}

const struct decoding integer_group[] = {
    {"add", decode_simple},  {"sub", decode_simple},   {"mul", decode_simple},  {"mad", decode_simple},
    {"mul24", decode_simple}, {"div", decode_simple},  {"rem", decode_simple},  {"min", decode_simple},
    {"max", decode_simple},  {"abs", decode_simple},   {"neg", decode_simple},  {"sad", decode_simple},
    {"and", decode_simple},  {"or", decode_simple},    {"xor", decode_simple},  {"not", decode_simple},
    {"cnot", decode_simple}, {"popc", decode_simple},  {"clz", decode_simple},  {"brev", decode_simple},
    {"shl", decode_simple},  {"shr", decode_simple},   {"bfe", decode_simple},  {"bfi", decode_simple},
    {"prmt", decode_simple}, {"bmsk", decode_simple},  {"add", decode_carry},   {"addc", decode_carry},
    {"sub", decode_carry},   {"subc", decode_carry},   {"mad", decode_carry},   {"madc", decode_carry},
    {"bfind", decode_bfind}, {"shf", decode_shf},      {"lop3", decode_lop3},   {"dp4a", decode_dot},
    {"dp2a", decode_dot},    {NULL, NULL},
};
