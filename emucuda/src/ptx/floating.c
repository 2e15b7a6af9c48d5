/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Floating point: f16, bf16, f32, f64, and pairs of the narrow ones. Each result is rounded once.
 * Where a GPU approximates a result (ex2, sin, rcp.approx...), this code returns the exact result,
 * rounded.
 */
#include "ptx.h"

#include <fenv.h>
#include <math.h>

struct format { /* a value has `digits` binary digits and an exponent from `least` to `most` */
    int digits, least, most;
};

static struct format format_of(struct type t)
{
    switch (t.kind) {
    case KIND_BFLOAT: return (struct format){8, -126, 127};
    case KIND_TF32: return (struct format){11, -126, 127};
    case KIND_E4M3: return (struct format){4, -6, 8};
    case KIND_E5M2: return (struct format){3, -14, 15};
    default: return t.bits == 16 ? (struct format){11, -14, 15} : (struct format){24, -126, 127};
    }
}

double widen(struct type t, uint64_t bits)
{
    if (t.kind == KIND_TF32 || (t.kind == KIND_FLOAT && t.bits == 32))
        return (double)as_f32(bits);
    if (t.kind == KIND_FLOAT && t.bits == 64)
        return as_f64(bits);
    if (t.kind == KIND_BFLOAT)
        return (double)as_f32(bits << 16 & 0xffffffff);
    struct format f = format_of(t);
    unsigned fraction = (unsigned)f.digits - 1, low = (unsigned)bits & ((1u << fraction) - 1);
    unsigned exponent = (unsigned)(bits & low_bits(t.bits - 1u)) >> fraction;
    bool negative = bits >> (t.bits - 1) & 1;
    double value;
    if (t.kind == KIND_E4M3 ? exponent == 15 && low == 7 : exponent == (1u << (t.bits - 1u - fraction)) - 1)
        value = low ? NAN : INFINITY;
    else if (exponent)
        value = as_f64((uint64_t)(exponent + 1022u + (unsigned)(f.least)) << 52 | (uint64_t)low << (52 - fraction));
    else
        value = ldexp((double)low, f.least - f.digits + 1);
    return negative ? -value : value;
}

static double rounded(double q, enum rounding rounding, bool negative)
{
    switch (rounding) {
    case TO_ZERO: return floor(q);
    case DOWN: return negative ? ceil(q) : floor(q);
    case UP: return negative ? floor(q) : ceil(q);
    case TO_NEAREST_AWAY: return floor(q + 0.5);
    default: return rint(q);
    }
}

uint64_t narrow(struct type t, double v, enum rounding rounding, int flags)
{
    if (flags & RELU && v < 0)
        v = 0;
    if (t.kind == KIND_FLOAT && t.bits == 64)
        return isnan(v) ? 0x7fffffffffffffffull : of_f64(v);
    struct format f = format_of(t);
    unsigned sign_at = t.kind == KIND_TF32 ? 31 : t.bits - 1u;
    if (isnan(v))
        return flags & RELU && t.bits < 32 ? low_bits(sign_at) : low_bits(sign_at);
    if (t.kind == KIND_FLOAT && t.bits == 32 && rounding == TO_NEAREST)
        return of_f32((float)v);
    uint64_t sign = signbit(v) ? 1ull << sign_at : 0;
    double a = fabs(v), most = t.kind == KIND_E4M3 ? 448.0 : ldexp(2 - ldexp(1, 1 - f.digits), f.most);
    unsigned fraction = (unsigned)f.digits - 1, shift = t.kind == KIND_TF32 ? 13 : 0;
    uint64_t infinity = t.kind == KIND_E4M3 ? 0x7f : ((uint64_t)(f.most - f.least + 2) << fraction) << shift;
    uint64_t largest = t.kind == KIND_E4M3 ? 0x7e : infinity - (1ull << shift);
    if (isinf(a))
        return sign | (flags & SATURATE ? largest : infinity);
    if (a == 0)
        return sign;
    int e = ilogb(a) < f.least ? f.least : ilogb(a);
    double unit = ldexp(1, e - f.digits + 1), r = rounded(a / unit, rounding, sign != 0) * unit;
    if (r > most) {
        bool to_largest = flags & SATURATE || rounding == TO_ZERO || (rounding == DOWN && !sign) || (rounding == UP && sign);
        return sign | (to_largest ? largest : infinity);
    }
    if (r < ldexp(1, f.least))
        return sign | (uint64_t)ldexp(r, f.digits - 1 - f.least) << shift;
    e = ilogb(r);
    uint64_t digits = (uint64_t)ldexp(r, f.digits - 1 - e);
    return sign | ((uint64_t)(e - f.least + 1) << fraction | (digits & ((1ull << fraction) - 1))) << shift;
}

enum rounding rounding_of(const struct statement *s)
{
    if (has(s, "rz") || has(s, "rzi"))
        return TO_ZERO;
    if (has(s, "rm") || has(s, "rmi"))
        return DOWN;
    if (has(s, "rp") || has(s, "rpi"))
        return UP;
    return has(s, "rna") ? TO_NEAREST_AWAY : TO_NEAREST;
}

/* ---- values ---- */

static double flushed(double v) { return fabs(v) < 0x1p-126 ? copysign(0, v) : v; }

/* Returns a + b, rounded to odd: if the sum loses digits, its last digit is 1. Then a later
 * rounding to a narrower type gives the correct result. */
static double sum_to_odd(double a, double b)
{
    double sum = a + b, part = sum - a, lost = (a - (sum - part)) + (b - part);
    uint64_t bits = of_f64(sum);
    if (lost != 0 && isfinite(sum) && !(bits & 1))
        sum = as_f64((lost > 0) == (sum > 0) ? bits + 1 : bits - 1);
    return sum;
}

enum how { ADD, SUB, MUL, FMA, DIV, MIN, MAX, NEG, ABS, SQRT, RSQRT, RCP, EX2, LG2, SIN, COS, TANH, COPYSIGN };

static double least(double a, double b, bool nan_wins, bool most)
{
    if (isnan(a) || isnan(b))
        return nan_wins || (isnan(a) && isnan(b)) ? NAN : isnan(a) ? b : a;
    if (a == b) /* -0 is less than 0 */
        return (signbit(a) != 0) == !most ? a : b;
    return (a < b) == !most ? a : b;
}

static double function(enum how how, double a)
{
    switch (how) {
    case SQRT: return sqrt(a);
    case RSQRT: return 1 / sqrt(a);
    case RCP: return 1 / a;
    case EX2: return exp2(a);
    case LG2: return log2(a);
    case SIN: return sin(a);
    case COS: return cos(a);
    default: return tanh(a);
    }
}

static uint64_t single(enum how how, enum rounding rounding, int flags, uint64_t x, uint64_t y, uint64_t z)
{
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    float a = as_f32(x), b = as_f32(y), c = as_f32(z);
    if (flags & FTZ) {
        a = (float)flushed((double)a);
        b = (float)flushed((double)b);
        c = (float)flushed((double)c);
    }
    volatile float va = a, vb = b, vc = c, r;
    if (rounding != TO_NEAREST)
        fesetround(modes[rounding]);
    switch (how) {
    case ADD: r = va + vb; break;
    case SUB: r = va - vb; break;
    case MUL: r = va * vb; break;
    case FMA: r = fmaf(va, vb, vc); break;
    case DIV: r = va / vb; break;
    case SQRT: r = sqrtf(va); break;
    case RCP: r = 1 / va; break;
    case MIN: r = (float)least((double)a, (double)b, flags & NAN_WINS, false); break;
    case MAX: r = (float)least((double)a, (double)b, flags & NAN_WINS, true); break;
    default: r = (float)function(how, (double)a); break;
    }
    if (rounding != TO_NEAREST)
        fesetround(FE_TONEAREST);
    float v = r;
    if (flags & FTZ)
        v = (float)flushed((double)v);
    if (flags & SATURATE)
        v = v > 0 ? v < 1 ? v : 1 : 0;
    return isnan(v) ? 0x7fffffff : of_f32(v);
}

static uint64_t twofold(enum how how, enum rounding rounding, int flags, uint64_t x, uint64_t y, uint64_t z)
{
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    volatile double a = as_f64(x), b = as_f64(y), c = as_f64(z), r;
    if (rounding != TO_NEAREST)
        fesetround(modes[rounding]);
    switch (how) {
    case ADD: r = a + b; break;
    case SUB: r = a - b; break;
    case MUL: r = a * b; break;
    case FMA: r = fma(a, b, c); break;
    case DIV: r = a / b; break;
    case MIN: r = least(a, b, flags & NAN_WINS, false); break;
    case MAX: r = least(a, b, flags & NAN_WINS, true); break;
    default: r = function(how, a); break;
    }
    if (rounding != TO_NEAREST)
        fesetround(FE_TONEAREST);
    return isnan(r) ? 0x7fffffffffffffffull : of_f64(r);
}

static uint64_t half(struct type t, enum how how, int flags, uint64_t x, uint64_t y, uint64_t z)
{
    double a = widen(t, x), b = widen(t, y), r;
    if (flags & FTZ && t.kind == KIND_FLOAT) { /* flush subnormal numbers of f16 */
        a = fabs(a) < 0x1p-14 ? copysign(0, a) : a;
        b = fabs(b) < 0x1p-14 ? copysign(0, b) : b;
    }
    switch (how) {
    case ADD: r = sum_to_odd(a, b); break;
    case SUB: r = sum_to_odd(a, -b); break;
    case MUL: r = a * b; break;
    case FMA: r = sum_to_odd(a * b, widen(t, z)); break; /* the product is exact */
    case MIN: r = least(a, b, flags & NAN_WINS, false); break;
    case MAX: r = least(a, b, flags & NAN_WINS, true); break;
    default: r = function(how, a); break;
    }
    if (flags & SATURATE)
        r = r > 0 ? r < 1 ? r : 1 : 0;
    return narrow(t, r, TO_NEAREST, flags & RELU);
}

static uint64_t compute(const struct instruction *i, uint64_t x, uint64_t y, uint64_t z)
{
    enum how how = (enum how)(i->how & 255);
    enum rounding rounding = (enum rounding)(i->how >> 8);
    uint64_t sign = 1ull << (i->type.bits - 1), low = low_bits(i->type.bits);
    switch (how) {
    case NEG: return (x & low) ^ sign;
    case ABS: return x & low & ~sign;
    case COPYSIGN: return (y & low & ~sign) | (x & sign); /* b with the sign of a */
    default: break;
    }
    if (i->type.bits == 64)
        return twofold(how, rounding, i->flags, x, y, z);
    if (i->type.bits == 32)
        return single(how, rounding, i->flags, x, y, z);
    return half(i->type, how, i->flags, x & low, y & low, z & low);
}

static void any(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    const uint64_t *a = ARG(w, i, 1, 0), *b = i->count[2] ? ARG(w, i, 2, 0) : a, *c = i->count[3] ? ARG(w, i, 3, 0) : a;
    unsigned bits = i->type.bits;
    FOR_LANES(l, mask) {
        uint64_t r = compute(i, a[l], b[l], c[l]);
        if (i->type.count == 2)
            r |= compute(i, a[l] >> bits, b[l] >> bits, c[l] >> bits) << bits;
        d[l] = r;
    }
}

/* The most frequent operations have their own functions. */
#define SINGLE(name, result)                                                                    \
    static void name(struct warp *w, const struct instruction *i, uint32_t mask)                \
    {                                                                                           \
        uint64_t *d = ARG(w, i, 0, 0);                                                          \
        const uint64_t *p = ARG(w, i, 1, 0), *q = ARG(w, i, 2, 0), *s = i->count[3] ? ARG(w, i, 3, 0) : p; \
        FOR_LANES(l, mask) {                                                                    \
            float a = as_f32(p[l]), b = as_f32(q[l]), c = as_f32(s[l]), r = (result);           \
            (void)c;                                                                            \
            d[l] = isnan(r) ? 0x7fffffff : of_f32(r);                                           \
        }                                                                                       \
    }
SINGLE(add_f32, a + b)
SINGLE(sub_f32, a - b)
SINGLE(mul_f32, a *b)
SINGLE(fma_f32, fmaf(a, b, c))

/* ---- decoding ---- */

static const struct {
    const char *name;
    enum how how;
    int args;
    execute *f32;
} operations[] = {
    {"add", ADD, 3, add_f32}, {"sub", SUB, 3, sub_f32}, {"mul", MUL, 3, mul_f32}, {"fma", FMA, 4, fma_f32},
    {"mad", FMA, 4, fma_f32}, {"div", DIV, 3, NULL}, {"min", MIN, 3, NULL}, {"max", MAX, 3, NULL},
    {"neg", NEG, 2, NULL}, {"abs", ABS, 2, NULL}, {"sqrt", SQRT, 2, NULL}, {"rsqrt", RSQRT, 2, NULL},
    {"rcp", RCP, 2, NULL}, {"ex2", EX2, 2, NULL}, {"lg2", LG2, 2, NULL}, {"sin", SIN, 2, NULL},
    {"cos", COS, 2, NULL}, {"tanh", TANH, 2, NULL}, {"copysign", COPYSIGN, 3, NULL},
};

static bool decode_float(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    if ((i->type.kind != KIND_FLOAT && i->type.kind != KIND_BFLOAT) || type_bits(i->type) > 64 || has(s, "xorsign"))
        return false;
    if (type_at(s, 2).count) /* operations of mixed precision are not decoded */
        return false;
    i->flags = (uint16_t)((has(s, "ftz") ? FTZ : 0) | (has(s, "sat") ? SATURATE : 0) | (has(s, "relu") ? RELU : 0) |
                          (has(s, "NaN") ? NAN_WINS : 0));
    for (unsigned n = 0; n < sizeof operations / sizeof *operations; n++) {
        if (strcmp(operations[n].name, s->name) || s->args != operations[n].args)
            continue;
        enum rounding rounding = rounding_of(s);
        i->how = (uint16_t)((unsigned)operations[n].how | (unsigned)rounding << 8);
        bool plain = i->type.kind == KIND_FLOAT && i->type.bits == 32 && !i->flags && rounding == TO_NEAREST;
        i->run = plain && operations[n].f32 ? operations[n].f32 : any;
        arg_result(b, i, s->arg[0]);
        for (int a = 1; a < s->args; a++)
            arg_value(b, i, s->arg[a], i->type);
        return true;
    }
    return false;
}

const struct decoding floating_group[] = {
    {"add", decode_float},  {"sub", decode_float},   {"mul", decode_float}, {"fma", decode_float},
    {"mad", decode_float},  {"div", decode_float},   {"min", decode_float}, {"max", decode_float},
    {"neg", decode_float},  {"abs", decode_float},   {"sqrt", decode_float}, {"rsqrt", decode_float},
    {"rcp", decode_float},  {"ex2", decode_float},   {"lg2", decode_float}, {"sin", decode_float},
    {"cos", decode_float},  {"tanh", decode_float},  {"copysign", decode_float}, {NULL, NULL},
};
