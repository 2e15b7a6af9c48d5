/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Runs a launch. The blocks run one after the other, and the warps of a block run in turns. The
 * lanes of a warp run together while they are at the same instruction. In a cooperative launch all
 * blocks exist at the same time.
 */
#include "ptx.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* A warp runs at most TURN instructions before the next warp runs. If the lanes of a warp are at
 * different instructions, the lanes at one instruction run at most LANES_TURN instructions before
 * other lanes run. These turns are necessary, because a warp or a lane may wait for a value that
 * another warp or lane writes. */
enum { TURN = 1 << 20, LANES_TURN = 1 << 14 };

void fail(struct warp *w, CUresult error, const char *format, ...)
{
    struct run *run = w->block->run;
    va_list args;
    va_start(args, format);
    int used = vsnprintf(run->message, sizeof run->message, format, args);
    va_end(args);
    if (w->now && used > 0 && (size_t)used < sizeof run->message)
        snprintf(run->message + used, sizeof run->message - (size_t)used, ", in \"%.200s\"", w->now->text);
    run->error = error;
    longjmp(run->out, 1);
}

static void set_special(struct warp *w, enum special which, const uint64_t *values, uint64_t same)
{
    int32_t slot = w->block->run->code->special[which];
    for (int l = 0; slot && l < LANES; l++)
        w->reg[(size_t)slot * LANES + (size_t)l] = values ? values[l] : same;
}

void refresh_clock(struct warp *w)
{
    uint64_t now = now_ns();
    set_special(w, CLOCK, NULL, (uint32_t)now);
    set_special(w, CLOCK_HI, NULL, now >> 32);
    set_special(w, CLOCK64, NULL, now);
    set_special(w, TIMER, NULL, now);
    set_special(w, TIMER_LO, NULL, (uint32_t)now);
    set_special(w, TIMER_HI, NULL, now >> 32);
}

static void set_specials(struct warp *w)
{
    const struct launch *launch = w->block->run->launch;
    const unsigned *n = launch->block;
    uint64_t tid[3][LANES], lane[LANES], mask[5][LANES];
    for (unsigned l = 0; l < LANES; l++) {
        unsigned inside = w->index * LANES + l;
        tid[0][l] = inside % n[0];
        tid[1][l] = inside / n[0] % n[1];
        tid[2][l] = inside / n[0] / n[1];
        lane[l] = l;
        mask[0][l] = 1u << l;
        mask[1][l] = (1u << l) - 1;
        mask[2][l] = mask[0][l] | mask[1][l];
        mask[3][l] = ~(uint32_t)mask[2][l];
        mask[4][l] = ~(uint32_t)mask[1][l];
    }
    for (int d = 0; d < 3; d++) {
        set_special(w, TID_X + d, tid[d], 0);
        set_special(w, NTID_X + d, NULL, n[d]);
        set_special(w, CTAID_X + d, NULL, w->block->index[d]);
        set_special(w, NCTAID_X + d, NULL, launch->grid[d]);
    }
    for (int m = 0; m < 5; m++)
        set_special(w, MASK_EQ + m, mask[m], 0);
    set_special(w, LANEID, lane, 0);
    set_special(w, WARPID, NULL, w->index);
    set_special(w, NWARPID, NULL, 64);
    set_special(w, SMID, NULL, 0);
    set_special(w, NSMID, NULL, 132);
    set_special(w, GRIDID, NULL, 1);
    set_special(w, DYNAMIC_SHARED, NULL, launch->shared);
    set_special(w, TOTAL_SHARED, NULL, w->block->run->shared_size);
    set_special(w, ALWAYS_0, NULL, 0);
    set_special(w, ALWAYS_1, NULL, 1);
    refresh_clock(w);
}

static void block_free(struct block *b)
{
    for (unsigned i = 0; b->warp && i < b->warps; i++) {
        free(b->warp[i].reg);
        free(b->warp[i].local);
    }
    free(b->warp);
    free(b->shared);
    memset(b, 0, sizeof *b);
}

/* Starts block `number`. If `b` has run another block before, the new block uses that block's
 * memory. */
static bool block_start(struct block *b, struct run *run, uint64_t number)
{
    const unsigned *grid = run->launch->grid, *block = run->launch->block;
    unsigned threads = block[0] * block[1] * block[2];
    size_t registers = (size_t)run->code->slots * LANES * sizeof(uint64_t);
    b->run = run;
    b->index[0] = (uint32_t)(number % grid[0]);
    b->index[1] = (uint32_t)(number / grid[0] % grid[1]);
    b->index[2] = (uint32_t)(number / grid[0] / grid[1]);
    b->living = threads;
    memset(b->barrier, 0, sizeof b->barrier);
    if (!b->warp) {
        b->warps = (threads + LANES - 1) / LANES;
        b->warp = calloc(b->warps, sizeof *b->warp);
        b->shared = calloc(1, run->shared_size + 16u);
        if (!b->warp || !b->shared)
            return false;
        for (unsigned i = 0; i < b->warps; i++) {
            b->warp[i].reg = calloc(1, registers);
            b->warp[i].local = calloc(LANES, run->code->local + 16u);
            if (!b->warp[i].reg || !b->warp[i].local)
                return false;
        }
    } else {
        memset(b->shared, 0, run->shared_size);
    }
    for (unsigned i = 0; i < b->warps; i++) {
        struct warp *w = &b->warp[i];
        unsigned left = threads - i * LANES;
        *w = (struct warp){.block = b, .reg = w->reg, .local = w->local, .index = i,
                           .alive = left >= LANES ? ~0u : (1u << left) - 1};
        set_specials(w);
    }
    return true;
}

/* Returns the lanes of `may` that run next: those at the lowest instruction. If `after` is not 0,
 * the lanes at instruction `after` have just had a long turn. Then the lanes at the lowest
 * instruction above `after` run next, if there are any. */
static uint32_t next_lanes(const struct warp *w, uint32_t may, uint32_t after, uint32_t *pc, uint32_t *other)
{
    uint32_t lowest = UINT32_MAX, lanes = 0;
    FOR_LANES(l, may)
        if (w->pc[l] < lowest && (!after || w->pc[l] > after))
            lowest = w->pc[l];
    if (lowest == UINT32_MAX)
        return after ? next_lanes(w, may, 0, pc, other) : 0;
    *other = UINT32_MAX;
    FOR_LANES(l, may) {
        if (w->pc[l] == lowest)
            lanes |= 1u << l;
        else if (w->pc[l] > lowest && w->pc[l] < *other)
            *other = w->pc[l];
    }
    *pc = lowest;
    return lanes;
}

/* Returns true if the lanes may execute the instruction now. The instruction's mask names the lanes
 * that must execute it together. The lanes wait while a lane of the mask has not arrived and
 * another lane can still run. Adds to `*lanes` the lanes that already wait at the instruction. */
static bool all_met(struct warp *w, const struct instruction *i, uint32_t *lanes, uint32_t pc)
{
    FOR_LANES(l, w->held)
        if (w->pc[l] == pc)
            *lanes |= 1u << l;
    uint32_t wanted = (uint32_t)R(w, i->meets)[__builtin_ctz(*lanes)] & w->alive & ~w->waiting;
    w->held |= *lanes;
    if (wanted & ~*lanes && w->alive & ~w->waiting & ~w->held)
        return false;
    w->held &= ~*lanes;
    return true;
}

/* Runs a warp until its turn is over, or until all its lanes wait or have ended. */
static void warp_run(struct warp *w)
{
    const struct code *code = w->block->run->code;
    int turn = TURN;
    uint32_t after = 0;
    bool alone = false; /* the other lanes will never reach the instruction */
    while (turn > 0) {
        uint32_t pc = 0, other, may = w->alive & ~w->waiting & ~w->held;
        if (!may && w->held) {
            may = w->held;
            w->held = 0;
            alone = true;
        }
        uint32_t lanes = next_lanes(w, may, after, &pc, &other);
        int mine = other == UINT32_MAX ? turn : LANES_TURN;
        after = 0;
        if (!lanes)
            return;
        for (;; turn--, mine--) {
            const struct instruction *i = &code->at[pc];
            if (mine <= 0) {
                after = other == UINT32_MAX ? 0 : pc;
                break;
            }
            if (i->meets != NO_SLOT && lanes != ~0u && !alone) {
                FOR_LANES(l, lanes)
                    w->pc[l] = pc;
                if (!all_met(w, i, &lanes, pc))
                    goto again;
            }
            alone = false;
            uint32_t mask = lanes;
            if (i->predicate != NO_SLOT) {
                const uint64_t *p = R(w, i->predicate);
                mask = 0;
                FOR_LANES(l, lanes)
                    if (p[l] != i->negated)
                        mask |= 1u << l;
            }
            w->now = i;
            if (i->branches) {
                FOR_LANES(l, lanes)
                    w->pc[l] = pc + 1;
                if (mask)
                    i->run(w, i, mask);
                lanes &= w->alive & ~w->waiting;
                if (!lanes)
                    goto again;
                pc = w->pc[__builtin_ctz(lanes)];
                bool together = true;
                FOR_LANES(l, lanes)
                    together = together && w->pc[l] == pc;
                if (!together || pc >= other) {
                    turn--;
                    goto again;
                }
                continue;
            }
            if (mask)
                i->run(w, i, mask);
            if (++pc >= other)
                break;
        }
        FOR_LANES(l, lanes)
            w->pc[l] = pc;
    again:;
    }
}

/* Gives each warp a turn. Returns whether the block has ended. */
static bool block_turn(struct block *b)
{
    bool moved = false;
    for (unsigned i = 0; i < b->warps; i++) {
        struct warp *w = &b->warp[i];
        if (w->alive & ~w->waiting) {
            moved = true;
            warp_run(w);
        }
    }
    if (b->living && !moved) {
        b->warp[0].now = NULL;
        fail(&b->warp[0], CUDA_ERROR_LAUNCH_FAILED, "its threads wait at barriers that the others never reach");
    }
    return !b->living;
}

static CUresult blocks_run(struct run *run)
{
    const unsigned *grid = run->launch->grid;
    uint64_t all = (uint64_t)grid[0] * grid[1] * grid[2];
    uint64_t resident = run->launch->cooperative ? all : 1;
    struct block *volatile blocks = calloc(resident, sizeof *blocks);
    if (!blocks)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!setjmp(run->out)) {
        for (uint64_t first = 0; first < all && !run->error; first += resident) {
            for (uint64_t n = 0; n < resident; n++)
                if (!block_start(&blocks[n], run, first + n)) {
                    run->error = CUDA_ERROR_OUT_OF_MEMORY;
                    snprintf(run->message, sizeof run->message, "the host has no memory for its registers");
                    break;
                }
            for (bool ended = false; !ended && !run->error;) {
                ended = true;
                for (uint64_t n = 0; n < resident; n++)
                    if (blocks[n].living)
                        ended = block_turn(&blocks[n]) && ended;
            }
        }
    }
    for (uint64_t n = 0; n < resident; n++)
        block_free(&blocks[n]);
    free(blocks);
    return run->error;
}

/* A lower bound of the launch's time on a board: its bytes of global memory at the rate of the
 * board's memory. */
static uint64_t duration(const struct run *run)
{
    const struct rates *rates = spec_rates(&machine->spec);
    if (!rates->memory)
        return 0;
    return (uint64_t)((unsigned __int128)run->bytes * 1000000000u / rates->memory);
}

CUresult kernel_compiled(CUfunction k, int device)
{
    struct ptx *ptx = k->module->ptx;
    CUresult result = variables_place(ptx, device);
    pthread_mutex_lock(&k->module->compiling);
    if (!result && k->code[device] && k->storage[device] != ptx->storage[device].address) {
        code_free(k->code[device]);
        k->code[device] = NULL;
    }
    if (!result && !k->code[device]) {
        result = compile(ptx, k->name, device, &k->code[device]);
        k->storage[device] = ptx->storage[device].address;
    }
    pthread_mutex_unlock(&k->module->compiling);
    return result;
}

uint64_t kernel_interpret(CUfunction k, int device, const struct launch *launch, void **params, CUresult *result)
{
    uint32_t last = k->params ? k->params - 1 : 0;
    uint32_t size = k->params ? k->offset[last] + k->size[last] : 0;
    uint8_t *values = calloc(1, size + 16u);
    *result = values ? kernel_compiled(k, device) : CUDA_ERROR_OUT_OF_MEMORY;
    if (*result) {
        free(values);
        return 0;
    }
    for (uint32_t i = 0; i < k->params; i++)
        memcpy(values + k->offset[i], params[i], k->size[i]);
    const struct ptx *ptx = k->module->ptx;
    struct run run = {.code = k->code[device], .launch = launch, .params = values, .params_size = size};
    run.shared_size = (uint32_t)(launch->shared + (run.code->shared > ptx->dynamic_shared ? run.code->shared
                                                                                        : ptx->dynamic_shared));
    *result = blocks_run(&run);
    if (*result)
        fprintf(stderr, "emucuda: kernel %s ended with an error: %s.\n", k->name, run.message);
    free(values);
    return duration(&run);
}
