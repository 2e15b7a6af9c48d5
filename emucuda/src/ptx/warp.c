/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Instructions by which the lanes of a warp exchange values: shfl, vote, match, redux, activemask,
 * elect.
 */
#include "ptx.h"

static const struct type U32 = {KIND_UNSIGNED, 32, 1};

/* shfl. The arguments are: result[|inside], value, lane or distance, limits. `inside` becomes true
 * if the source lane is within the limits. */
static void shuffle(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *inside = i->count[0] > 1 ? ARG(w, i, 0, 1) : NULL, before[LANES];
    const uint64_t *b = ARG(w, i, 2, 0), *c = ARG(w, i, 3, 0);
    memcpy(before, ARG(w, i, 1, 0), sizeof before);
    FOR_LANES(l, mask) {
        unsigned distance = (unsigned)b[l] & 31, limit = (unsigned)c[l] & 31, segment = (unsigned)c[l] >> 8 & 31;
        unsigned most = (l & segment) | (limit & ~segment), least = l & segment;
        int from;
        bool good;
        switch (i->how) {
        case 'u': from = (int)l - (int)distance; good = from >= (int)most; break;
        case 'd': from = (int)(l + distance); good = from <= (int)most; break;
        case 'b': from = (int)(l ^ distance); good = from <= (int)most; break;
        default: from = (int)(least | (distance & ~segment)); good = from <= (int)most; break;
        }
        uint64_t v = before[good ? from : (int)l];
        d[l] = (uint32_t)v;
        if (inside)
            inside[l] = good;
    }
}

static bool decode_shuffle(struct builder *b, const struct statement *s, struct instruction *i)
{
    bool together = has(s, "sync");
    if (s->args != 4 + together)
        return false;
    i->how = has(s, "up") ? 'u' : has(s, "down") ? 'd' : has(s, "bfly") ? 'b' : 'i';
    arg_result(b, i, s->arg[0]);
    for (int a = 1; a < 4; a++)
        arg_value(b, i, s->arg[a], U32);
    if (together)
        i->meets = value_slot(b, s->arg[4], U32);
    i->run = shuffle;
    return true;
}

static void vote(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *p = ARG(w, i, 1, 0);
    uint32_t yes = 0;
    FOR_LANES(l, mask)
        yes |= (uint32_t)(p[l] & 1) << l;
    FOR_LANES(l, mask)
        d[l] = i->how == 'b' ? yes : i->how == 'l' ? yes == mask : i->how == 'n' ? yes != 0 : yes == mask || !yes;
}

static bool decode_vote(struct builder *b, const struct statement *s, struct instruction *i)
{
    bool together = has(s, "sync");
    if (s->args != 2 + together)
        return false;
    i->how = has(s, "ballot") ? 'b' : has(s, "all") ? 'l' : has(s, "any") ? 'n' : 'u';
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], (struct type){KIND_PREDICATE, 1, 1});
    if (together)
        i->meets = value_slot(b, s->arg[2], U32);
    i->run = vote;
    return true;
}

static void match(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *p = i->count[0] > 1 ? ARG(w, i, 0, 1) : NULL, v[LANES];
    memcpy(v, ARG(w, i, 1, 0), sizeof v);
    FOR_LANES(l, mask) {
        uint32_t same = 0;
        for (unsigned o = 0; o < LANES; o++)
            if (mask >> o & 1 && !((v[o] ^ v[l]) & low_bits(i->type.bits)))
                same |= 1u << o;
        bool all = same == mask;
        d[l] = i->how == 'l' ? (all ? mask : 0) : same;
        if (p)
            p[l] = all;
    }
}

static bool decode_match(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    if (s->args != 3 || !i->type.count)
        return false;
    i->how = has(s, "all") ? 'l' : 'n';
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    i->meets = value_slot(b, s->arg[2], U32);
    i->run = match;
    return true;
}

static void redux(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    bool begun = false;
    int64_t r = 0;
    FOR_LANES(l, mask) {
        int64_t v = i->type.kind == KIND_SIGNED ? sign_extend(a[l], 32) : (int64_t)(uint32_t)a[l];
        switch (begun ? i->how : 0) {
        case 'a': r += v; break;
        case 'm': r = v < r ? v : r; break;
        case 'M': r = v > r ? v : r; break;
        case '&': r &= v; break;
        case '|': r |= v; break;
        case '^': r ^= v; break;
        default: r = v; break;
        }
        begun = true;
    }
    FOR_LANES(l, mask)
        d[l] = (uint32_t)r;
}

static bool decode_redux(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    if (s->args != 3 || i->type.kind > KIND_SIGNED)
        return false;
    i->how = has(s, "add") ? 'a' : has(s, "min") ? 'm' : has(s, "max") ? 'M' : has(s, "and") ? '&' : has(s, "or") ? '|' : '^';
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    i->meets = value_slot(b, s->arg[2], U32);
    i->run = redux;
    return true;
}

static void activemask(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    FOR_LANES(l, mask)
        d[l] = mask;
}

static bool decode_activemask(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->args != 1)
        return false;
    arg_result(b, i, s->arg[0]);
    i->run = activemask;
    return true;
}

static void elect(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned first = (unsigned)__builtin_ctz(mask);
    FOR_LANES(l, mask) {
        ARG(w, i, 0, 0)[l] = first;
        ARG(w, i, 0, 1)[l] = l == first;
    }
}

static bool decode_elect(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->args != 2 || !has(s, "sync"))
        return false;
    arg_result(b, i, s->arg[0]);
    i->meets = value_slot(b, s->arg[1], U32);
    i->run = elect;
    return i->count[0] == 2;
}

const struct decoding warp_group[] = {
    {"shfl", decode_shuffle}, {"vote", decode_vote}, {"match", decode_match}, {"redux", decode_redux},
    {"activemask", decode_activemask}, {"elect", decode_elect}, {NULL, NULL},
};
