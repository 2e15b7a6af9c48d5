/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Comparisons and selections: setp, set, selp, slct, testp.
 */
#include "ptx.h"

#include <math.h>

enum { EQ, NE, LT, LE, GT, GE, UNORDERED_EQ, UNORDERED_NE, UNORDERED_LT, UNORDERED_LE, UNORDERED_GT, UNORDERED_GE,
       NUMBERS, NANS };

static bool holds(int how, bool less, bool equal)
{
    switch (how) {
    case EQ: return equal;
    case NE: return !equal;
    case LT: return less;
    case LE: return less || equal;
    case GT: return !less && !equal;
    default: return !less;
    }
}

static bool compared(const struct instruction *i, uint64_t a, uint64_t b)
{
    struct type t = i->from;
    int how = i->how & 255;
    uint64_t low = low_bits(t.bits);
    if (t.kind == KIND_FLOAT || t.kind == KIND_BFLOAT) {
        double x = widen(t, a & low), y = widen(t, b & low);
        if (i->flags & FTZ) {
            x = fabs(x) < 0x1p-126 ? 0 : x;
            y = fabs(y) < 0x1p-126 ? 0 : y;
        }
        bool unordered = isnan(x) || isnan(y);
        if (how == NUMBERS || how == NANS)
            return unordered == (how == NANS);
        return unordered ? how >= UNORDERED_EQ : holds(how % 6, x < y, x == y);
    }
    if (t.kind == KIND_SIGNED) {
        int64_t x = sign_extend(a, t.bits), y = sign_extend(b, t.bits);
        return holds(how, x < y, x == y);
    }
    return holds(how, (a & low) < (b & low), (a & low) == (b & low));
}

static bool combined(const struct instruction *i, bool first, bool second)
{
    switch (i->how >> 8) {
    case 'a': return first && second;
    case 'o': return first || second;
    case 'x': return first != second;
    default: return first;
    }
}

/* setp p|q, a, b [, c]. The result p is the comparison of a and b, combined with the predicate c.
 * The result q is the same with the opposite comparison. For a packed type, p and q are the results
 * for its two values. */
static void setp(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *p = ARG(w, i, 0, 0), *q = i->count[0] > 1 ? ARG(w, i, 0, 1) : NULL;
    const uint64_t *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = i->count[3] ? ARG(w, i, 3, 0) : a;
    unsigned bits = i->from.bits;
    bool packed = i->from.count == 2;
    FOR_LANES(l, mask) {
        bool found = compared(i, a[l], b[l]), other = packed ? compared(i, a[l] >> bits, b[l] >> bits) : !found;
        bool with = c[l] & 1;
        uint64_t first = combined(i, found, with);
        if (q)
            q[l] = combined(i, other, with);
        p[l] = first;
    }
}

static void set(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    const uint64_t *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = i->count[3] ? ARG(w, i, 3, 0) : a;
    uint64_t yes = i->type.kind == KIND_FLOAT || i->type.kind == KIND_BFLOAT ? narrow(i->type, 1, TO_NEAREST, 0)
                                                                           : low_bits(i->type.bits);
    FOR_LANES(l, mask)
        d[l] = combined(i, compared(i, a[l], b[l]), c[l] & 1) ? yes : 0;
}

static void selp(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *p = ARG(w, i, 3, 0);
    FOR_LANES(l, mask)
        d[l] = p[l] ? a[l] : b[l];
}

static void slct(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0), *b = ARG(w, i, 2, 0), *c = ARG(w, i, 3, 0);
    FOR_LANES(l, mask) {
        bool first = i->from.kind == KIND_FLOAT ? as_f32(c[l]) >= 0 : sign_extend(c[l], 32) >= 0;
        d[l] = first ? a[l] : b[l];
    }
}

static void testp(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *p = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    double least = i->type.bits == 64 ? 0x1p-1022 : 0x1p-126;
    FOR_LANES(l, mask) {
        double v = widen(i->type, a[l] & low_bits(i->type.bits));
        bool tiny = v != 0 && fabs(v) < least;
        switch (i->how) {
        case 'f': p[l] = isfinite(v); break;
        case 'i': p[l] = isinf(v); break;
        case 'u': p[l] = !isnan(v); break;
        case 'o': p[l] = isnan(v); break;
        case 'r': p[l] = isfinite(v) && v != 0 && !tiny; break;
        default: p[l] = tiny; break;
        }
    }
}

static bool decode_comparison(struct builder *b, const struct statement *s, struct instruction *i)
{
    static const struct {
        const char *name;
        int how;
    } names[] = {{"eq", EQ}, {"ne", NE}, {"lt", LT}, {"le", LE}, {"gt", GT}, {"ge", GE}, {"lo", LT}, {"ls", LE},
                 {"hi", GT}, {"hs", GE}, {"equ", UNORDERED_EQ}, {"neu", UNORDERED_NE}, {"ltu", UNORDERED_LT},
                 {"leu", UNORDERED_LE}, {"gtu", UNORDERED_GT}, {"geu", UNORDERED_GE}, {"num", NUMBERS}, {"nan", NANS}};
    int how = -1;
    for (unsigned n = 0; s->parts && n < sizeof names / sizeof *names; n++)
        if (!strcmp(s->part[0], names[n].name))
            how = names[n].how;
    bool is_set = !strcmp(s->name, "set");
    i->from = type_at(s, 1);
    i->type = is_set ? type_at(s, 2) : (struct type){KIND_PREDICATE, 1, 1};
    if (how < 0 || !i->from.count || !i->type.count || i->from.bits > 64 || (is_set && i->from.count == 2))
        return false;
    i->how = (uint16_t)(how | (has(s, "and") ? 'a' : has(s, "or") ? 'o' : has(s, "xor") ? 'x' : 0) << 8);
    i->flags = has(s, "ftz") ? FTZ : 0;
    if (s->args != (i->how >> 8 ? 4 : 3))
        return false;
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->from);
    arg_value(b, i, s->arg[2], i->from);
    if (s->args == 4)
        arg_value(b, i, s->arg[3], (struct type){KIND_PREDICATE, 1, 1});
    i->run = is_set ? set : setp;
    return true;
}

static bool decode_selection(struct builder *b, const struct statement *s, struct instruction *i)
{
    bool by_sign = s->name[1] == 'l'; /* slct has a second type */
    i->from = type_at(s, 1);
    i->type = by_sign ? type_at(s, 2) : i->from;
    if (s->args != 4 || !i->type.count)
        return false;
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    arg_value(b, i, s->arg[2], i->type);
    arg_value(b, i, s->arg[3], by_sign ? i->from : (struct type){KIND_PREDICATE, 1, 1});
    i->run = by_sign ? slct : selp;
    return true;
}

static bool decode_testp(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    if (s->args != 2 || i->type.kind != KIND_FLOAT)
        return false;
    i->how = has(s, "finite") ? 'f' : has(s, "infinite") ? 'i' : has(s, "number") ? 'u' : has(s, "notanumber") ? 'o'
             : has(s, "normal") ? 'r' : 's';
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    i->run = testp;
    return true;
}

const struct decoding compare_group[] = {
    {"setp", decode_comparison}, {"set", decode_comparison}, {"selp", decode_selection},
    {"slct", decode_selection},  {"testp", decode_testp},    {NULL, NULL},
};
