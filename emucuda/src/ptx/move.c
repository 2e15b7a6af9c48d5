/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Moves: between registers (mov), and between registers and memory (ld, st, cp.async).
 */
#include "ptx.h"

static void mov(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0);
    FOR_LANES(l, mask)
        d[l] = a[l];
}

static void mov_clock(struct warp *w, const struct instruction *i, uint32_t mask)
{
    refresh_clock(w);
    mov(w, i, mask);
}

static void pack(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    unsigned count = i->count[1], bits = i->type.bits / count;
    FOR_LANES(l, mask) {
        uint64_t v = 0;
        for (unsigned n = 0; n < count; n++)
            v |= (ARG(w, i, 1, (int)n)[l] & low_bits(bits)) << (bits * n);
        d[l] = v;
    }
}

static void unpack(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned count = i->count[0], bits = i->type.bits / count;
    FOR_LANES(l, mask) {
        uint64_t v = ARG(w, i, 1, 0)[l];
        for (unsigned n = 0; n < count; n++)
            ARG(w, i, 0, (int)n)[l] = v >> (bits * n) & low_bits(bits);
    }
}

static bool decode_mov(struct builder *b, const struct statement *s, struct instruction *i)
{
    i->type = type_at(s, 1);
    if (s->args != 2 || !i->type.count || type_bits(i->type) > 64 || s->parts != 1)
        return false;
    arg_result(b, i, s->arg[0]);
    arg_value(b, i, s->arg[1], i->type);
    bool reads_clock = !strncmp(s->arg[1], "%clock", 6) || !strncmp(s->arg[1], "%globaltimer", 12);
    i->run = i->count[0] > 1 ? unpack : i->count[1] > 1 ? pack : reads_clock ? mov_clock : mov;
    return i->count[0] == 1 || i->count[1] == 1;
}

uint64_t lane_address(const struct warp *w, const struct instruction *i, int argument, unsigned lane)
{
    uint64_t at = ARG(w, i, argument, 0)[lane] + (uint64_t)i->offset[argument];
    switch (i->space[argument]) {
    case SPACE_SHARED: return SHARED_WINDOW + (uint32_t)at;
    case SPACE_LOCAL: return LOCAL_WINDOW + (uint32_t)at;
    default: return at;
    }
}

bool space_of(const struct statement *s, enum space *out)
{
    *out = has(s, "shared") || has(s, "shared::cta") ? SPACE_SHARED : has(s, "local") ? SPACE_LOCAL : SPACE_GENERIC;
    return !has(s, "shared::cluster");
}

static void load(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned size = i->type.bits / 8, count = i->count[0];
    FOR_LANES(l, mask) {
        const uint8_t *from = bytes_of(w, l, lane_address(w, i, 1, l), size * count, READ);
        for (unsigned n = 0; n < count; n++) {
            uint64_t v = 0;
            memcpy(&v, from + n * size, size);
            ARG(w, i, 0, (int)n)[l] = i->type.kind == KIND_SIGNED ? (uint64_t)sign_extend(v, i->type.bits) : v;
        }
    }
}

static void store(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned size = i->type.bits / 8, count = i->count[1];
    FOR_LANES(l, mask) {
        uint8_t *to = bytes_of(w, l, lane_address(w, i, 0, l), size * count, WRITE);
        for (unsigned n = 0; n < count; n++)
            memcpy(to + n * size, &ARG(w, i, 1, (int)n)[l], size);
    }
}

static bool decode_memory(struct builder *b, const struct statement *s, struct instruction *i)
{
    enum space space;
    bool loads = s->name[0] == 'l';
    i->type = type_at(s, 1);
    bool hinted = has(s, "L2::cache_hint") && s->args == 3;
    if ((s->args != 2 && !hinted) || i->type.count != 1 || i->type.bits > 64 || i->type.bits < 8 ||
        has(s, "async") || !space_of(s, &space))
        return false;
    unsigned vector = has(s, "v2") ? 2 : has(s, "v4") ? 4 : has(s, "v8") ? 8 : 1;
    if (loads) {
        arg_result(b, i, s->arg[0]);
        arg_address(b, i, s->arg[1], space);
    } else {
        arg_address(b, i, s->arg[0], space);
        arg_value(b, i, s->arg[1], i->type);
    }
    i->run = loads ? load : store;
    return i->count[loads ? 0 : 1] == vector;
}

/* cp.async.ca.shared.global [to], [from], bytes [, bytes to read]. The emulation does not wait with
 * the copy: it copies at once. */
static void copy(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned size = i->how;
    FOR_LANES(l, mask) {
        uint64_t read = i->count[2] ? (uint32_t)ARG(w, i, 2, 0)[l] : size;
        uint8_t *to = bytes_of(w, l, lane_address(w, i, 0, l), size, WRITE);
        if (read > size)
            read = size;
        if (read)
            memcpy(to, bytes_of(w, l, lane_address(w, i, 1, l), size, READ), read);
        memset(to + read, 0, size - read);
    }
}

static bool decode_copy(struct builder *b, const struct statement *s, struct instruction *i)
{
    struct type u32 = {KIND_UNSIGNED, 32, 1};
    bool good;
    if (!has(s, "async") || has(s, "bulk") || has(s, "mbarrier"))
        return false;
    i->run = NULL;
    if (has(s, "commit_group") || has(s, "wait_group") || has(s, "wait_all"))
        return true;
    int hint = has(s, "L2::cache_hint");
    if (s->args < 3 || s->args > 4 + hint)
        return false;
    i->how = (uint16_t)literal(s->arg[2], u32, &good);
    arg_address(b, i, s->arg[0], SPACE_SHARED);
    arg_address(b, i, s->arg[1], SPACE_GENERIC);
    if (s->args - hint == 4)
        arg_value(b, i, s->arg[3], u32);
    i->run = copy;
    return good && (i->how == 4 || i->how == 8 || i->how == 16);
}

/* createpolicy: the result is only a hint for caches. */
static void zero(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0);
    FOR_LANES(l, mask)
        d[l] = 0;
}

static bool decode_policy(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (!s->args)
        return false;
    arg_result(b, i, s->arg[0]);
    i->run = zero;
    return true;
}

const struct decoding move_group[] = {
    {"mov", decode_mov}, {"ld", decode_memory}, {"ldu", decode_memory}, {"st", decode_memory},
    {"cp", decode_copy}, {"createpolicy", decode_policy}, {NULL, NULL},
};
