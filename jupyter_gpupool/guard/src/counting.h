/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The common parts of all wrappers that count memory: where a call allocates, how a wrapper passes
 * the gate, and the records of the allocations.
 */
#ifndef GPUPOOL_GUARD_COUNTING_H
#define GPUPOOL_GUARD_COUNTING_H

#include "guard.h"
#include "table.h"

#pragma GCC visibility push(hidden)

/* ---- the device and context where a call allocates (context.c) */

struct here {
    CUcontext context;
    uint64_t number; /* the context's number. A later context may get the same handle, but never the
                      * same number */
    CUdevice device;
    int ordinal; /* the session's ordinal of the device. -1: the guard does not count the bytes of
                  * this call (no page, no context, or a device outside the session) */
};

struct here here_now(void);
/* The same as here_now, but from the guard's own records, because the driver may block. The ordinal
 * is -1 if the guard does not know the thread's current context. */
struct here here_recorded(void);
struct here here_of_stream(CUstream stream, bool per_thread);
struct here here_of_device(CUdevice device);

/* ---- calls (memory.c) */

/* The first line of a wrapper of a call that uses the device. The macro waits at the gate, and
 * counts the call until the wrapper returns. Code before the macro must not need the slice. */
#define ENTER                                                          \
    CUresult entered_ = guard_enter();                                 \
    if (entered_)                                                      \
        return entered_;                                               \
    __attribute__((cleanup(guard_left))) int leaving_ = 0

/* The first line of a wrapper of a call that frees or destroys something. The macro gets the name
 * and the arguments of the call. If the guard notes the call, the macro returns from the wrapper,
 * and only the code before the macro runs now. */
#define ENTER_BACK(name, ...)                                                                   \
    CUresult entered_ = guard_enter_back(E_##name, (const uint64_t[LATER_ARGUMENTS]){__VA_ARGS__}); \
    if (entered_)                                                                               \
        return entered_ == GUARD_NOTED ? CUDA_SUCCESS : entered_;                               \
    __attribute__((cleanup(guard_left))) int leaving_ = 0

/* The first line of a wrapper of a call that asks whether work on the device is done. */
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

/* Called after a charged allocation, with the driver's `result`. After success, this function
 * enters the allocation in the table. After an error, it gives the charge back. If the table has no
 * room, it calls `undo` to free the allocation, and gives the charge back. */
CUresult keep(CUresult result, const struct own *own, CUresult (*undo)(CUdeviceptr key));
/* Whether managed memory is allowed. Before cuInit the answer is yes: the driver then gets the
 * call, and reports that cuInit is missing. */
static inline bool managed_allowed(void)
{
    return !guard_initialised() || __atomic_load_n(&guard_page->managed, __ATOMIC_RELAXED) == MANAGED_ALLOW;
}

/* Called for an entry that is no longer in the table: gives back its bytes, or ends the recording
 * or the registration that it stands for. */
void settle_stale(const struct own *own);

/* A stream has stopped recording a graph (captures.c). */
void capture_over(const struct own *own);
/* Host memory was unregistered (registered.c). */
void registered_over(const struct own *own);
/* Whether any stream of this process may be recording. The function does not look at one stream
 * only, because a recording on another stream may include this stream. */
bool capture_any(void);

/* ---- charge.c */

/* Charge bytes that the driver has already taken, even if they exceed the grant. */
void charge_fact(int ordinal, uint64_t bytes);

/* ---- reserves.c, pools.c, graphs.c: memory that the driver reserves by its own rules */

enum reserve_kind { RESERVE_POOL = 1, RESERVE_GRAPHS };
enum reserve_state { ALIVE, ENDING, ENDED };

struct reserve {
    uint32_t kind; /* 0: unused */
    int ordinal;   /* the session's ordinal; -1: the guard knows the pool, but does not count its
                    * memory */
    CUdevice device;
    uint32_t calls;   /* calls inside the driver now; each may make the reserve grow */
    uint64_t unseen;  /* bytes allocated since the driver was last asked */
    uint32_t ended;   /* ALIVE, ENDING or ENDED. After the end of a reserve, its allocations exist
                       * until the program frees them */
    bool managed;     /* a pool of managed memory: the guard counts its allocations one by one */
    CUmemoryPool pool;
    uint64_t charged; /* bytes counted for the reserve: the bytes already charged to the page, plus
                       * `pending` */
    uint64_t pending; /* bytes that threads are charging to the page now */
    uint64_t live;    /* bytes allocated from the reserve */
};

/* Charges `growth` bytes for the reserve. Call this function before a driver call that may grow the
 * reserve, and reserve_end after the driver call. */
CUresult reserve_begin(struct reserve *r, uint64_t growth);
/* Compares the charge with the real growth. Returns CUDA_ERROR_OUT_OF_MEMORY if the growth exceeds
 * the charge and the difference does not fit in the grant. After this error the caller must undo
 * its driver call, and call reserve_settle. */
CUresult reserve_end(struct reserve *r, bool look);
void reserve_settle(struct reserve *r);
struct reserve *reserve_graphs(struct here h);
/* Compare the charges of all reserves of a device with the driver's figures (-1: of all
 * devices). */
void pools_settle(int ordinal);
/* Let the driver release unused reserves of a device, then compare as pools_settle does. Returns
 * whether the device has any reserve. */
bool pools_reclaim(int ordinal);
/* Called after a synchronise: pools may have shrunk. Costs one load if there are no pools. */
void pools_synced(void);
void pool_freed(const struct own *own);
/* How often the memory of graphs has been trimmed. A trim releases reserved memory, so the next
 * launch of a graph may reserve memory again. */
extern uint32_t graph_trims;

#pragma GCC visibility pop
#endif
