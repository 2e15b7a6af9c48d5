/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What the wrappers share that count memory: where a call allocates, how a wrapper passes the gate,
 * and the bookkeeping of what was allocated.
 */
#ifndef GPUPOOL_GUARD_COUNTING_H
#define GPUPOOL_GUARD_COUNTING_H

#include "guard.h"
#include "table.h"

#pragma GCC visibility push(hidden)

/* ---- where a call allocates (context.c) */

struct here {
    CUcontext context;
    uint64_t number; /* the context's number: unlike a handle, it is never used again */
    CUdevice device;
    int ordinal; /* -1: not counted (no page, no context, a device outside the session) */
};

struct here here_now(void);
/* The last result of here_now in this thread, without a call of the driver. */
struct here here_remembered(void);
struct here here_of_stream(CUstream stream, bool per_thread);
struct here here_of_device(CUdevice device);

/* ---- calls (memory.c) */

/* Stands at the head of each wrapper: passes the gate, and counts the call until the wrapper returns. */
#define ENTER                                                          \
    CUresult entered_ = guard_enter();                                 \
    if (entered_)                                                      \
        return entered_;                                               \
    __attribute__((cleanup(guard_left))) int leaving_ = 0

/* Stands at the head of wrappers that free or destroy something, with the wrapper's name and arguments. */
#define ENTER_BACK(name, ...)                                                                   \
    CUresult entered_ = guard_enter_back(E_##name, (const uint64_t[LATER_ARGUMENTS]){__VA_ARGS__}); \
    if (entered_)                                                                               \
        return entered_ == GUARD_NOTED ? CUDA_SUCCESS : entered_;                               \
    __attribute__((cleanup(guard_left))) int leaving_ = 0

/* Stands at the head of wrappers that query whether work is done. */
#define ENTER_QUERY                                                                             \
    CUresult entered_ = guard_enter_query();                                                    \
    if (entered_)                                                                               \
        return entered_ == GUARD_NOTED ? CUDA_SUCCESS : entered_;                               \
    __attribute__((cleanup(guard_left))) int leaving_ = 0

static inline void guard_left(int *unused)
{
    (void)unused;
    guard_leave();
}

/* Called with the driver's `result` of an allocation that was charged: enter the allocation in the table, or
 * give the charge back. If the table has no room, `undo` frees the allocation. */
CUresult keep(CUresult result, const struct own *own, CUresult (*undo)(CUdeviceptr key));
/* Before cuInit the driver itself reports the error. */
static inline bool managed_allowed(void)
{
    return !guard_initialised() || __atomic_load_n(&guard_page->managed, __ATOMIC_RELAXED) == MANAGED_ALLOW;
}

/* Give back what an entry was charged. */
void settle_stale(const struct own *own);

/* A stream has stopped recording a graph (captures.c). */
void capture_over(const struct own *own);
/* Host memory was unregistered (registered.c). */
void registered_over(const struct own *own);
/* Whether any stream of this process may be recording: one recording may include other streams. */
bool capture_any(void);

/* ---- charge.c */

/* Charge bytes that the driver has already taken, even beyond the grant. */
void charge_fact(int ordinal, uint64_t bytes);

/* ---- reserves.c, pools.c, graphs.c: memory that the driver reserves by its own rules */

enum reserve_kind { RESERVE_POOL = 1, RESERVE_GRAPHS };
enum reserve_state { ALIVE, ENDING, ENDED };

struct reserve {
    uint32_t kind; /* 0: unused */
    int ordinal;   /* -1: the pool is known, and not counted */
    CUdevice device;
    uint32_t calls;   /* calls inside the driver now, each of which may make it grow */
    uint64_t unseen;  /* bytes allocated since the driver was last asked */
    uint32_t ended;   /* ALIVE, ENDING or ENDED: allocations from it remain until they are freed */
    CUmemoryPool pool;
    uint64_t charged; /* bytes counted for it; all but `pending` of them are charged to the page */
    uint64_t pending; /* bytes that threads are charging to the page now */
    uint64_t live;    /* bytes allocated from it */
};

/* Charges `growth` before a call that may grow the reserve. Call reserve_end after that call. */
CUresult reserve_begin(struct reserve *r, uint64_t growth);
/* Compares the charge with the real growth. CUDA_ERROR_OUT_OF_MEMORY if the growth exceeds the charge and does
 * not fit: then undo the call and call reserve_settle. */
CUresult reserve_end(struct reserve *r, bool look);
void reserve_settle(struct reserve *r);
struct reserve *reserve_graphs(struct here h);
/* Ask the driver for the size of all reserves of a device (-1: of all devices). */
void pools_settle(int ordinal);
/* Give up unused reserves, then do the same; returns whether there is any reserve. */
bool pools_reclaim(int ordinal);
/* Called after a synchronise: pools may have shrunk. Costs one load if there are no pools. */
void pools_synced(void);
void pool_freed(const struct own *own);
/* Counts trims of graph memory: a graph that was launched before a trim may reserve memory again. */
extern uint32_t graph_trims;

#pragma GCC visibility pop
#endif
