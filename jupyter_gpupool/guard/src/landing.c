/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The first context of a process whose devices at cuInit are not the devices of its slice. Only the
 * driver can move a process to another device. So the process makes a context on the device that it
 * sees, in memory that the broker keeps free there. Then the broker lets the driver suspend the
 * process and restore it on the slice, as for every session that moves.
 */
#include "guard.h"
#include "wraps.h"

#include <stdio.h>
#include <unistd.h>

/* `taken`: whether a thread of this process is landing. `kept`: the devices on which this thread
 * has made a context for the landing. */
static uint32_t taken;
static __thread struct {
    int count;
    CUdevice device[PAGE_DEVICES];
} kept;

bool landing_moves(void)
{
    struct page_slot *slot = guard_slot();
    return slot && __atomic_load_n(&slot->landing, __ATOMIC_SEQ_CST) >= LANDING_MOVES;
}

bool landing_aside(void)
{
    struct page_slot *slot = guard_slot();
    return slot && __atomic_load_n(&slot->landing, __ATOMIC_SEQ_CST) == LANDING_ASIDE;
}

static void set(uint64_t landing)
{
    struct page_slot *slot = guard_slot();
    if (slot)
        __atomic_store_n(&slot->landing, landing, __ATOMIC_SEQ_CST);
}

CUresult landing_wait(void)
{
    struct polite p;
    CUresult error = CUDA_SUCCESS;
    polite_begin(&p);
    while (!error && landing_moves()) {
        if (polite_interrupted(&p))
            error = CUDA_ERROR_SYSTEM_NOT_READY;
        else
            polite_nap(&p);
    }
    polite_end(&p);
    gate_point();
    return error;
}

/* Let one thread land at a time. A mutex is not possible here: a waiting thread must release the
 * interpreter's lock, and must not count as a call inside the driver, because the broker waits
 * until no call is inside. */
static CUresult take_turn(void)
{
    uint32_t free = 0;
    struct polite p;
    CUresult error = CUDA_SUCCESS;
    if (__atomic_compare_exchange_n(&taken, &free, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return CUDA_SUCCESS;
    gate_step_out();
    polite_begin(&p);
    while (!error && (free = 0,
                      !__atomic_compare_exchange_n(&taken, &free, 1, false, __ATOMIC_ACQ_REL,
                                                   __ATOMIC_RELAXED))) {
        if (polite_interrupted(&p))
            error = CUDA_ERROR_SYSTEM_NOT_READY;
        else
            polite_nap(&p);
    }
    polite_end(&p);
    if (error) {
        gate_step_back();
        return error;
    }
    error = gate_step_in();
    if (error)
        __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
    return error;
}

enum landing_kept landing_over(void)
{
    enum landing_kept found = kept.count ? KEPT_RELEASED : KEPT_NONE;
    while (kept.count) {
        CUdevice device = kept.device[--kept.count];
        uint64_t argument[LATER_ARGUMENTS] = {(uint64_t)device};
        /* This function runs inside a counted call. If the gate is open now, a suspend waits for
         * this call, so the driver can release the context now. */
        if (gate_lets(false) || !later_note(E_cuDevicePrimaryCtxRelease_v2, argument))
            REAL(cuDevicePrimaryCtxRelease_v2)(device);
        else
            found = KEPT_NOTED;
    }
    return found;
}

/* Make a context on each device that this process sees and that does not belong to the slice. */
static CUresult take_contexts(void)
{
    CUcontext context;
    for (CUdevice d = 0; d < PAGE_DEVICES; d++) {
        int ordinal = guard_ordinal(d);
        if (ordinal < 0)
            break;
        if (guard_sees_slice(ordinal))
            continue;
        CUresult error = REAL(cuDevicePrimaryCtxRetain)(&context, d);
        if (error)
            return error;
        kept.device[kept.count++] = d;
    }
    return CUDA_SUCCESS;
}

/* Called inside a counted call, after an error of "begin" or "move". The session gives its slice
 * back, and this process waits for a slice that it can use. After success the caller checks the
 * devices again. */
static CUresult stay(CUresult error)
{
    if (error == CUDA_ERROR_SYSTEM_NOT_READY)
        return error; /* the wait was interrupted, or no broker answers */
    char why[SENTENCE_BYTES];
    gate_step_out();
    if (error == CUDA_ERROR_DEVICE_UNAVAILABLE) {
        error = broker_land("stay", why);
        if (!error || error == CUDA_ERROR_DEVICE_UNAVAILABLE)
            dprintf(2, "jupyter_gpupool: process %d %s: %s\n", (int)getpid(),
                    error ? "cannot use the GPU of its session" : "waits for another GPU", why);
    } else if (error == CUDA_ERROR_NOT_READY) {
        nap(1);
    }
    CUresult gate = gate_step_in();
    return gate ? gate : error == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : error;
}

/* Called inside a counted call. After success the caller checks the devices again. */
static CUresult land(void)
{
    set(LANDING_BEGUN);
    gate_step_out();
    CUresult error = broker_land("begin", NULL);
    CUresult gate = error ? (gate_step_back(), CUDA_SUCCESS) : gate_step_in();
    if (!error && !gate)
        gate = take_contexts();
    if (gate || error == CUDA_ERROR_SYSTEM_NOT_READY) {
        /* Tell the broker to release the memory that it keeps free for this process. */
        landing_over();
        gate_step_out();
        broker_land("cancel", NULL);
        gate_step_back();
    }
    if (error || gate) {
        set(LANDING_NONE);
        return error ? stay(error) : gate;
    }
    /* From here on this process's calls wait, and the guard answers queries from its cache. */
    guard_note_init();
    guard_note_context();
    set(LANDING_MOVES);
    gate_point();
    gate_step_out();
    error = broker_land("move", NULL);
    if (error == CUDA_ERROR_SYSTEM_NOT_READY) {
        /* An interrupt ended the wait while no broker ran. So this process does not know which
         * device it is on now. All its calls wait until the next broker has written the device to
         * the slot. */
        gate_step_back();
        kept.count = 0;
        return error;
    }
    /* If the broker has refused the move, it suspends no process of the session until this thread
     * has released the contexts. */
    set(error ? LANDING_BEGUN : LANDING_NONE);
    gate_point();
    if (error) {
        gate_step_back();
        landing_over();
        set(LANDING_NONE);
        return stay(error);
    }
    gate = gate_step_in();
    if (gate)
        landing_over();
    else
        cached_fill();
    return gate;
}

CUresult landing(int ordinal)
{
    CUresult error = CUDA_SUCCESS;
    while (!error && !guard_sees_slice(ordinal)) {
        error = take_turn();
        if (error)
            return error;
        if (!guard_sees_slice(ordinal))
            error = land();
        __atomic_store_n(&taken, 0, __ATOMIC_RELEASE);
    }
    return error;
}

void landing_fork(enum fork_when when)
{
    if (when != FORK_CHILD)
        return;
    taken = 0;
    kept.count = 0;
}
