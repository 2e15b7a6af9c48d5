/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Branches, ends, barriers.
 */
#include "ptx.h"

void jump(struct warp *w, const struct instruction *i, uint32_t mask)
{
    FOR_LANES(l, mask)
        w->pc[l] = i->target;
}

/* Lets the threads at a barrier continue if enough of them have arrived. A barrier instruction may
 * name the necessary number of threads. If it names no number, all threads of the block that have
 * not ended must arrive. */
static void barrier_check(struct block *b, unsigned id)
{
    uint32_t wanted = b->barrier[id].wanted ? b->barrier[id].wanted : b->living;
    if (!b->barrier[id].arrived || b->barrier[id].arrived < wanted)
        return;
    uint32_t result = b->barrier[id].result;
    b->barrier[id].arrived = b->barrier[id].result = 0;
    for (unsigned n = 0; n < b->warps; n++) {
        struct warp *w = &b->warp[n];
        FOR_LANES(l, w->waiting) {
            if (w->at_barrier[l] != id)
                continue;
            w->waiting &= ~(1u << l);
            const struct instruction *i = &b->run->code->at[w->pc[l] - 1];
            if (i->how == 'p')
                ARG(w, i, 0, 0)[l] = result >> 2;
            else if (i->how == 'a')
                ARG(w, i, 0, 0)[l] = !(result & 1);
            else if (i->how == 'o')
                ARG(w, i, 0, 0)[l] = result >> 1 & 1;
        }
    }
}

static void end(struct warp *w, const struct instruction *i, uint32_t mask)
{
    (void)i;
    w->alive &= ~mask;
    w->block->living -= (unsigned)__builtin_popcount(mask);
    for (unsigned id = 0; id < 16; id++)
        barrier_check(w->block, id);
}

static void trap(struct warp *w, const struct instruction *i, uint32_t mask)
{
    (void)i, (void)mask;
    fail(w, CUDA_ERROR_LAUNCH_FAILED, "it stopped itself");
}

/* The arguments are: [result,] barrier [, threads] [, predicate]. */
static void barrier(struct warp *w, const struct instruction *i, uint32_t mask)
{
    unsigned reduces = i->how != 0, l0 = (unsigned)__builtin_ctz(mask);
    uint64_t id = ARG(w, i, (int)reduces, 0)[l0];
    int rest = (int)reduces + 1;
    struct block *b = w->block;
    if (id > 15)
        fail(w, CUDA_ERROR_LAUNCH_FAILED, "the barrier %llu is more than 15", (unsigned long long)id);
    b->barrier[id].wanted = i->count[rest + (int)reduces] ? (uint32_t)ARG(w, i, rest, 0)[l0] : 0;
    if (reduces) {
        const uint64_t *p = ARG(w, i, rest + (i->count[rest + 1] != 0), 0);
        FOR_LANES(l, mask)
            b->barrier[id].result = p[l] ? (b->barrier[id].result | 2) + 4 : b->barrier[id].result | 1;
    }
    b->barrier[id].arrived += (uint32_t)__builtin_popcount(mask);
    if (!(i->flags & 1)) {
        w->waiting |= mask;
        FOR_LANES(l, mask)
            w->at_barrier[l] = (uint8_t)id;
    }
    barrier_check(b, (unsigned)id);
}

static bool decode_bra(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->args != 1)
        return false;
    i->run = jump;
    go_to(b, i, s->arg[0]);
    return true;
}

static void equals(struct warp *w, const struct instruction *i, uint32_t mask)
{
    uint64_t *d = ARG(w, i, 0, 0), *a = ARG(w, i, 1, 0), *c = ARG(w, i, 2, 0);
    FOR_LANES(l, mask)
        d[l] = (uint32_t)a[l] == c[l];
}

/* Decodes brx.idx to one comparison and one branch for each label. */
static bool decode_brx(struct builder *b, const struct statement *s, struct instruction *i)
{
    const char *label[256];
    int count = s->args == 2 && has(s, "idx") ? branch_targets(b, s->arg[1], label, 256) : 0;
    struct type u32 = {KIND_UNSIGNED, 32, 1};
    if (!count || i->predicate != NO_SLOT)
        return false;
    int32_t same = new_slot(b), index = value_slot(b, s->arg[0], u32);
    for (int n = 0; n < count; n++) {
        struct instruction compare = {.run = equals, .predicate = NO_SLOT, .meets = NO_SLOT};
        struct instruction go = {.run = jump, .predicate = same, .meets = NO_SLOT};
        compare.slot[0] = same;
        compare.slot[1] = index;
        compare.slot[2] = constant_slot(b, (uint64_t)n);
        for (int a = 0; a < 3; a++) {
            compare.first[a] = (uint8_t)a;
            compare.count[a] = 1;
        }
        emit(b, &compare);
        go_to(b, &go, label[n]);
        emit(b, &go);
    }
    i->run = NULL;
    return true;
}

static bool decode_ret(struct builder *b, const struct statement *s, struct instruction *i)
{
    if (s->name[0] == 'r' && !in_entry(b)) {
        i->run = jump;
        go_to(b, i, NULL);
        return true;
    }
    i->run = end;
    i->branches = true;
    return true;
}

static bool decode_trap(struct builder *b, const struct statement *s, struct instruction *i)
{
    (void)b, (void)s;
    i->run = trap;
    return true;
}

static bool decode_nothing(struct builder *b, const struct statement *s, struct instruction *i)
{
    (void)b, (void)s;
    /* These instructions need no work, because blocks and lanes run one after the other. */
    i->run = NULL;
    return true;
}

static bool decode_bar(struct builder *b, const struct statement *s, struct instruction *i)
{
    struct type u32 = {KIND_UNSIGNED, 32, 1};
    if (has(s, "warp")) {
        if (s->args != 1)
            return false;
        i->meets = value_slot(b, s->arg[0], u32);
        arg_value(b, i, s->arg[0], u32);
        i->run = nothing;
        return true;
    }
    bool reduces = has(s, "red"), arrives = has(s, "arrive");
    if (has(s, "cluster") || s->args < 1 + 2 * reduces || s->args > 2 + 2 * reduces)
        return false;
    if (reduces)
        i->how = has(s, "popc") ? 'p' : has(s, "and") ? 'a' : 'o';
    if (reduces)
        arg_result(b, i, s->arg[0]);
    for (int a = reduces; a < s->args; a++)
        arg_value(b, i, s->arg[a], reduces && a == s->args - 1 ? (struct type){KIND_PREDICATE, 1, 1} : u32);
    i->flags = arrives;
    i->branches = true;
    i->run = barrier;
    return true;
}

void nothing(struct warp *w, const struct instruction *i, uint32_t mask) { (void)w, (void)i, (void)mask; }

const struct decoding control_group[] = {
    {"bra", decode_bra},          {"brx", decode_brx},     {"ret", decode_ret},     {"exit", decode_ret},
    {"trap", decode_trap},        {"bar", decode_bar},     {"barrier", decode_bar}, {"membar", decode_nothing},
    {"fence", decode_nothing},    {"nop", decode_nothing}, {"brkpt", decode_nothing},
    {"griddepcontrol", decode_nothing}, {"prefetch", decode_nothing}, {"prefetchu", decode_nothing},
    {"nanosleep", decode_nothing}, {"pmevent", decode_nothing}, {"discard", decode_nothing},
    {"applypriority", decode_nothing}, {"setmaxnreg", decode_nothing}, {NULL, NULL},
};
