/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Atomic operations on memory: atom and red. The lanes do their operations one after the other. One
 * lock serves all launches of the process.
 */
#include "ptx.h"

enum { ADD, MIN, MAX, AND, OR, XOR, EXCH, CAS, INC, DEC };
static const char *const names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};

static pthread_mutex_t atoms = PTHREAD_MUTEX_INITIALIZER;

static uint64_t one(struct type t, int how, uint64_t old, uint64_t v)
{
    old &= low_bits(t.bits);
    v &= low_bits(t.bits);
    if (t.kind == KIND_FLOAT || t.kind == KIND_BFLOAT) {
        double a = widen(t, old), b = widen(t, v);
        if (how == ADD && t.bits == 32)
            return of_f32((float)a + (float)b);
        return narrow(t, how == ADD ? a + b : how == MIN ? (a < b ? a : b) : (a > b ? a : b), TO_NEAREST, 0);
    }
    bool less = t.kind == KIND_SIGNED ? sign_extend(old, t.bits) < sign_extend(v, t.bits) : old < v;
    switch (how) {
    case ADD: return old + v;
    case MIN: return less ? old : v;
    case MAX: return less ? v : old;
    case AND: return old & v;
    case OR: return old | v;
    case XOR: return old ^ v;
    case INC: return old >= v ? 0 : old + 1;
    case DEC: return !old || old > v ? v : old - 1;
    default: return v; /* EXCH: exchange */
    }
}

static uint64_t changed(const struct instruction *i, uint64_t old, uint64_t v, uint64_t other)
{
    struct type t = i->type;
    if (i->how == CAS)
        return (old & low_bits(t.bits)) == (v & low_bits(t.bits)) ? other : old;
    uint64_t r = one(t, i->how, old, v);
    if (t.count == 2)
        r = (r & low_bits(t.bits)) | one(t, i->how, old >> t.bits, v >> t.bits) << t.bits;
    return r;
}

/* The arguments of atom are: result, address, value, and for CAS a second value. The arguments of
 * red are the same without the result. */
static void atom(struct warp *w, const struct instruction *i, uint32_t mask)
{
    int at = i->flags & HAS_RESULT ? 1 : 0; /* index of the argument with the address */
    unsigned count = i->count[at + 1], size = type_bits(i->type) / 8;
    FOR_LANES(l, mask) {
        uint8_t *place = bytes_of(w, l, lane_address(w, i, at, l), size * count, WRITE);
        for (unsigned n = 0; n < count; n++) {
            uint64_t old = 0, other = i->how == CAS ? ARG(w, i, at + 2, (int)n)[l] : 0;
            pthread_mutex_lock(&atoms);
            memcpy(&old, place + n * size, size);
            uint64_t now = changed(i, old, ARG(w, i, at + 1, (int)n)[l], other);
            memcpy(place + n * size, &now, size);
            pthread_mutex_unlock(&atoms);
            if (at)
                ARG(w, i, 0, (int)n)[l] = i->type.kind == KIND_SIGNED ? (uint64_t)sign_extend(old, i->type.bits) : old;
        }
    }
}

static bool decode_atom(struct builder *b, const struct statement *s, struct instruction *i)
{
    enum space space;
    int how = -1, result = s->name[0] == 'a';
    for (int n = 0; n <= DEC; n++)
        if (has(s, names[n]))
            how = n;
    i->type = type_at(s, 1);
    bool is_float = i->type.kind == KIND_FLOAT || i->type.kind == KIND_BFLOAT;
    int values = how == CAS ? 2 : 1, hint = has(s, "L2::cache_hint");
    if (how < 0 || !i->type.count || type_bits(i->type) > 64 || (is_float && how > MAX) || !space_of(s, &space) ||
        s->args != result + 1 + values + hint || has(s, "async"))
        return false;
    i->how = (uint16_t)how;
    i->flags = result ? HAS_RESULT : 0;
    if (result)
        arg_result(b, i, s->arg[0]);
    arg_address(b, i, s->arg[result], space);
    for (int n = 0; n < values; n++)
        arg_value(b, i, s->arg[result + 1 + n], i->type);
    i->run = atom;
    return true;
}

const struct decoding atomic_group[] = {{"atom", decode_atom}, {"red", decode_atom}, {NULL, NULL}};
