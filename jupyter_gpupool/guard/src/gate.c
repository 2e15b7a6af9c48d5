/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The gate: what happens when the byte that an entry point tests is not zero, and the count of
 * calls that a suspend waits for.
 *
 * The broker closes the gate and then waits until the count is zero; a call counts itself and then
 * looks at the gate again. Each writes before it reads (the additions are full barriers), so at
 * least one of them sees the other: no call is inside when the session is locked.
 */
#include "guard.h"

#include <stdlib.h>
#include <time.h>

const uint8_t guard_open = GATE_OPEN, guard_shut = GATE_CLOSED;

const uint8_t *guard_gate = &guard_shut, *guard_free_gate = &guard_shut;

static bool initialised, context, ending;

/* Calls of this thread that are inside, and where they are counted. */
static __thread struct {
    uint32_t depth;
    uint32_t *inflight;
} inside;

void guard_gates(const uint8_t *gate, const uint8_t *free_gate)
{
    __atomic_store_n(&guard_gate, gate, __ATOMIC_RELEASE);
    __atomic_store_n(&guard_free_gate, free_gate, __ATOMIC_RELEASE);
}

uint64_t monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

bool gate_lets(bool use)
{
    uint8_t gate = __atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST);
    if (gate == GATE_OPEN)
        return true;
    if (gate == GATE_UNUSED) {
        /* If the broker closes it meanwhile the exchange fails, and the caller's second look, or
         * the driver's own lock, decides. */
        if (use)
            __atomic_compare_exchange_n(&guard_page->gate, &gate, GATE_OPEN, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return gate == GATE_UNUSED || gate == GATE_OPEN;
    }
    return gate == GATE_PAUSED &&
           monotonic() >= __atomic_load_n(&guard_page->pause_until, __ATOMIC_RELAXED);
}

/* Paused: it is short, and nobody is asked. */
static CUresult sit_out(void)
{
    struct polite p;
    CUresult error = CUDA_SUCCESS;
    polite_begin(&p);
    while (__atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_PAUSED && !gate_lets(true))
        if (polite_interrupted(&p)) {
            error = CUDA_ERROR_SYSTEM_NOT_READY;
            break;
        } else {
            nap(1);
        }
    polite_end(&p);
    return error;
}

CUresult gate_pass(void)
{
    while (!gate_lets(true)) {
        /* Before cuInit no call reaches a device: the driver says so itself. */
        if (!__atomic_load_n(&initialised, __ATOMIC_ACQUIRE))
            return CUDA_SUCCESS;
        /* What is freed as the process ends is freed by its end: a suspended kernel shuts down
         * without a lease. Frameworks know this answer from a driver that was unloaded first. */
        if (__atomic_load_n(&ending, __ATOMIC_ACQUIRE) || polite_finalizing())
            return CUDA_ERROR_DEINITIALIZED;
        CUresult error = __atomic_load_n(&guard_page->gate, __ATOMIC_SEQ_CST) == GATE_PAUSED
                             ? sit_out()
                             : broker_attach();
        if (error)
            return error;
    }
    return CUDA_SUCCESS;
}

/* Registered at the first call, so it runs before what was registered by then, cudart's own and
 * destructors of objects among it. */
static void end(void)
{
    __atomic_store_n(&ending, true, __ATOMIC_RELEASE);
}

void gate_at_exit(void)
{
    atexit(end);
}

/* ---- from the entry points */

static CUresult pass_entry(uint32_t entry)
{
    bool before = polite_keep(guard_gives_back[entry]);
    CUresult error = gate_pass();
    polite_keep(before);
    return error;
}

CUresult guard_slow_gate(uint32_t entry)
{
    CUresult error = guard_settle();
    return error || !guard_page || inside.depth ? error : pass_entry(entry);
}

CUresult guard_slow_free(uint32_t entry)
{
    CUresult error = guard_settle();
    if (error || !guard_blocked() || inside.depth)
        return error;
    return pass_entry(entry);
}

CUresult guard_slow_refuse(uint32_t entry)
{
    CUresult error = guard_slow_gate(entry);
    if (error)
        return error;
    return guard_page && guard_initialised() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* ---- for C functions and counted calls */

/* `gated`: at the gate, for a call that uses the device if `use`. */
static CUresult enter(bool gated, bool use)
{
    if (inside.depth) {
        inside.depth++;
        return CUDA_SUCCESS;
    }
    CUresult error = guard_settle();
    if (error)
        return error;
    inside.depth = 1;
    inside.inflight = NULL;
    if (!guard_page)
        return CUDA_SUCCESS;
    uint32_t *inflight = &guard_slot()->inflight;
    for (;;) {
        __atomic_add_fetch(inflight, 1, __ATOMIC_SEQ_CST);
        inside.inflight = inflight;
        if (!gated || gate_lets(use) || !__atomic_load_n(&initialised, __ATOMIC_ACQUIRE))
            return CUDA_SUCCESS;
        __atomic_sub_fetch(inflight, 1, __ATOMIC_SEQ_CST);
        inside.inflight = NULL;
        inside.depth = 0;
        error = gate_pass();
        if (error)
            return error;
        inside.depth = 1;
    }
}

CUresult guard_enter(void)
{
    return enter(true, true);
}

CUresult guard_enter_entry(uint32_t entry)
{
    bool before = polite_keep(guard_gives_back[entry]);
    CUresult error = enter(true, true);
    polite_keep(before);
    return error;
}

CUresult guard_enter_back(void)
{
    bool before = polite_keep(true);
    CUresult error = enter(true, true);
    polite_keep(before);
    return error;
}

CUresult guard_enter_free(void)
{
    return enter(guard_has_context(), false);
}

void guard_leave(void)
{
    /* Zero only in the child of a fork() from inside. */
    if (!inside.depth || --inside.depth || !inside.inflight)
        return;
    __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
    inside.inflight = NULL;
}

void gate_step_out(void)
{
    if (inside.inflight)
        __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
}

CUresult gate_step_in(void)
{
    if (!inside.inflight)
        return CUDA_SUCCESS;
    for (;;) {
        __atomic_add_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
        if (gate_lets(true) || !guard_initialised())
            return CUDA_SUCCESS;
        __atomic_sub_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
        CUresult error = gate_pass();
        if (error) {
            /* The caller leaves, as after any error of its own. */
            __atomic_add_fetch(inside.inflight, 1, __ATOMIC_SEQ_CST);
            return error;
        }
    }
}

/* ---- what the process has done */

bool guard_initialised(void)
{
    return __atomic_load_n(&initialised, __ATOMIC_ACQUIRE);
}

bool guard_has_context(void)
{
    return __atomic_load_n(&context, __ATOMIC_ACQUIRE);
}

bool guard_blocked(void)
{
    return guard_page && guard_has_context() && !gate_lets(false);
}

void guard_note_init(void)
{
    struct page_slot *slot = guard_slot();
    if (slot)
        __atomic_or_fetch(&slot->flags, SLOT_CUDA, __ATOMIC_RELEASE);
    __atomic_store_n(&initialised, true, __ATOMIC_RELEASE);
}

void guard_note_context(void)
{
    struct page_slot *slot = guard_slot();
    if (!slot || guard_has_context())
        return;
    __atomic_or_fetch(&slot->flags, SLOT_CONTEXT, __ATOMIC_RELEASE);
    cached_fill();
    __atomic_store_n(&context, true, __ATOMIC_RELEASE);
    /* From now on the driver's answers may have to wait for a lease, also those that need none. */
    guard_gates(&guard_page->gate, &guard_page->gate);
}

void gate_fork(enum fork_when when)
{
    if (when != FORK_CHILD)
        return;
    initialised = context = false;
    inside.depth = 0;
    inside.inflight = NULL;
    if (__atomic_load_n(&guard_gate, __ATOMIC_RELAXED) != &guard_open || guard_page)
        guard_gates(&guard_shut, &guard_shut);
}
