/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Conversions between types: cvt, and cvta between spaces.
 */
#include "ptx.h"

#include <math.h>

static bool is_float(struct type t) { return t.kind >= KIND_FLOAT && t.kind != KIND_PREDICATE; }

/* Rounds a floating value to an integer of type `t`. A value outside the type's range becomes the
 * smallest or the largest integer of the type. */
static uint64_t to_integer(struct type t, double v, enum rounding rounding)
{
    double most = ldexp(1, t.bits - (t.kind == KIND_SIGNED)), least = t.kind == KIND_SIGNED ? -most : 0;
    if (isnan(v))
        return t.bits == 64 ? 1ull << 63 : 0;
    switch (rounding) {
    case TO_NEAREST: v = rint(v); break;
    case TO_ZERO: v = trunc(v); break;
    case DOWN: v = floor(v); break;
    default: v = ceil(v); break;
    }
    if (v >= most)
        return t.kind == KIND_SIGNED ? low_bits(t.bits - 1u) : low_bits(t.bits);
    if (v < least)
        return t.kind == KIND_SIGNED ? 0 - (1ull << (t.bits - 1)) : 0;
    return t.kind == KIND_SIGNED ? (uint64_t)(int64_t)v : (uint64_t)v;
}

static uint64_t from_integer(const struct instruction *i, uint64_t bits, enum rounding rounding)
{
    static const uint64_t big = 1ull << 53;
    bool is_signed = i->from.kind == KIND_SIGNED;
    int64_t s = sign_extend(bits, i->from.bits);
    bool negative = is_signed && s < 0;
    uint64_t size = negative ? 0 - (uint64_t)s : is_signed ? (uint64_t)s : bits & low_bits(i->from.bits);
    if (size >= big && i->type.bits == 64) { /* the integer has more digits than an f64 */
        unsigned extra = 11u - (unsigned)__builtin_clzll(size);
        uint64_t unit = 1ull << extra, rest = size & (unit - 1), whole = size - rest;
        bool up = rounding == TO_NEAREST ? rest > unit / 2 || (rest == unit / 2 && whole & unit)
                  : rounding == UP ? rest && !negative : rounding == DOWN ? rest && negative : false;
        double v = (double)whole + (up ? (double)unit : 0);
        return of_f64(negative ? -v : v);
    }
    /* Round to odd: if this step loses digits, set the last digit that stays to 1. Then the
     * rounding in narrow() gives the correct result. */
    if (size >= big) {
        unsigned extra = 11u - (unsigned)__builtin_clzll(size);
        uint64_t rest = size & ((1ull << extra) - 1);
        size = (size - rest) | (rest ? 1ull << extra : 0);
    }
    double v = (double)size;
    return narrow(i->type, negative ? -v : v, rounding, i->flags);
}

static uint64_t saturated_integer(const struct instruction *i, uint64_t bits)
{
    struct type f = i->from, t = i->type;
    __int128 v = f.kind == KIND_SIGNED ? (__int128)sign_extend(bits, f.bits) : (__int128)(bits & low_bits(f.bits));
    __int128 most = t.kind == KIND_SIGNED ? (__int128)low_bits(t.bits - 1u) : (__int128)low_bits(t.bits);
    __int128 least = t.kind == KIND_SIGNED ? -most - 1 : 0;
    return (uint64_t)(v > most ? most : v < least ? least : v);
}

static uint64_t converted(const struct instruction *i, uint64_t bits)
{
    enum rounding rounding = (enum rounding)(i->how & 255);
    if (is_float(i->from)) {
        double v = widen(i->from, bits & low_bits(i->from.bits));
        if (i->flags & FTZ && i->from.bits == 32 && fabs(v) < 0x1p-126)
            v = copysign(0, v);
        if (!is_float(i->type))
            return to_integer(i->type, v, rounding);
        if (i->how >> 8) /* round to an integral value */
            v = rounding == TO_ZERO ? trunc(v) : rounding == DOWN ? floor(v) : rounding == UP ? ceil(v) : rint(v);
        if (i->flags & SATURATE && i->type.kind != KIND_E4M3 && i->type.kind != KIND_E5M2)
            v = v > 0 ? v < 1 ? v : 1 : 0;
        uint64_t r = narrow(i->type, v, i->how >> 8 ? TO_NEAREST : rounding, i->flags);
        if (i->flags & FTZ && i->type.bits == 32 && fabsf(as_f32(r)) < 0x1p-126f)
            r &= 0x80000000;
        return r;
    }
    if (is_float(i->type))
        return from_integer(i, bits, rounding);
    if (i->flags & SATURATE)
        return saturated_integer(i, bits);
    return i->from.kind == KIND_SIGNED ? (uint64_t)sign_extend(bits, i->from.bits) : bits & low_bits(i->from.bits);
}

/* Extends an integer to 64 bits: an integer of a signed type with its sign, other integers with
 * zeros. */
static uint64_t extended(struct type t, uint64_t v)
{
    if (is_float(t))
        return v;
    return t.kind == KIND_SIGNED ? (uint64_t)sign_extend(v, t.bits) : v & low_bits(t.bits);
}

static void cvt(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    const uint64_t *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = extended(i->type, converted(i, a[l]));
}

static void cvt_wide(struct warp *w, const struct instruction *i, uint32_t mask) /* cvt.u64.u32 */
{
    uint64_t *d = ARG(w, i, 0, 0);
    const uint64_t *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = (uint32_t)a[l];
}

/* Converts two values and packs the results. The values come from two registers, the upper value
 * first, or from the two halves of one register. */
static void cvt_pair(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    const uint64_t *a = ARG(w, i, 1, 0), *b = i->count[2] ? ARG(w, i, 2, 0) : NULL;
    unsigned to = i->type.bits, from = i->from.bits;
    FOR_LANES(l, mask) {
        uint64_t upper = b ? a[l] : a[l] >> from, lower = b ? b[l] : a[l];
        d[l] = converted(i, upper) << to | (converted(i, lower) & low_bits(to));
    }
}

static bool decode_cvt(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->from = type_at(s, 1);
    i->type = type_at(s, 2);
    bool to_integral = has(s, "rni") || has(s, "rzi") || has(s, "rmi") || has(s, "rpi");
    if (!i->from.count || !i->type.count || type_bits(i->from) > 64 || type_bits(i->type) > 64 || has(s, "pack") ||
        has(s, "rs") || type_at(s, 3).count)
        return false;
    enum rounding rounding = rounding_of(s);
    if (is_float(i->from) && !is_float(i->type) && !to_integral)
        rounding = TO_ZERO;
    i->how = (uint16_t)((unsigned)rounding | (unsigned)to_integral << 8);
    i->flags = (uint16_t)((has(s, "ftz") ? FTZ : 0) | (has(s, "sat") || has(s, "satfinite") ? SATURATE : 0) |
                          (has(s, "relu") ? RELU : 0));
    if (has(s, "satfinite") && i->type.bits > 8)
        return false;
    bool pair = i->type.count == 2;
    if (s->args != (pair && i->from.count == 1 ? 3 : 2) || (i->from.count == 2 && !pair))
        return false;
    arg_result(b, i, s->arg[0]);
    for (int a = 1; a < s->args; a++)
        arg_value(b, i, s->arg[a], i->from);
    bool widens = !is_float(i->from) && !is_float(i->type) && i->from.kind != KIND_SIGNED && i->from.bits == 32 &&
                  i->type.bits == 64 && !i->flags;
    i->run = pair ? cvt_pair : widens ? cvt_wide : cvt;
    return true;
}

static void add_window(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0), window = (uint64_t)i->how << 48;
    bool away = i->flags & 1;
    FOR_LANES(l, mask)
        d[l] = away ? a[l] - window : a[l] + window;
}

static bool decode_cvta(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    bool shared = has(s, "shared") || has(s, "shared::cta"), local = has(s, "local");
    if (s->args != 2 || i->type.bits != 64 || has(s, "shared::cluster"))
        return false;
    i->how = (uint16_t)(shared ? SHARED_WINDOW >> 48 : local ? LOCAL_WINDOW >> 48 : 0);
    i->flags = has(s, "to");
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    i->run = add_window;
    return true;
}

static void isspacep(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = a[l] >> 48 == i->how;
}

static bool decode_isspacep(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->args != 2)
        return false;
    i->how = (uint16_t)(has(s, "shared") || has(s, "shared::cta") ? SHARED_WINDOW >> 48
                        : has(s, "local") ? LOCAL_WINDOW >> 48 : 0);
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], (struct type){KIND_BITS, 64, 1});
    i->run = isspacep;
    return true;
}

const struct decoding convert_group[] = {
    {"cvt", decode_cvt}, {"cvta", decode_cvta}, {"isspacep", decode_isspacep}, {NULL, NULL},
};
