/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Calls that free or destroy something while the process has no slice. A destructor must not wait
 * for a lease: it runs in the interpreter's garbage collection, under locks of its framework, or at
 * the end of the process. So the guard notes the call and returns success at once. The first thread
 * that passes the open gate makes the noted calls in their order, before its own call.
 *
 * The bytes stay charged until then, because they are still in the suspended state and the driver
 * needs them for the restore. The noted call goes through the usual wrapper, which gives back the
 * charge. The application never sees an error of the driver for a noted call.
 */
#include "own.h"
#include "wraps.h"
#include "guard.h"

#include <sys/mman.h>

#define CHUNK_BYTES 65536
#define ENOUGH 200 /* number of quick checks whether another thread has made the noted calls. After
                    * them this thread sleeps */

struct noted {
    uint32_t entry;
    CUcontext context; /* the current context of the thread that noted the call; NULL: none */
    uint64_t argument[LATER_ARGUMENTS];
};

struct chunk {
    struct chunk *next;
    uint32_t count, done;
    struct noted call[(CHUNK_BYTES - 16) / sizeof(struct noted)];
};

/* In a child of fork() this block is zero again, because the child has nothing on the device. */
struct later {
    uint32_t lock;
    uint32_t running; /* a thread makes the noted calls */
    struct chunk *first, *last;
};

static void *the_later;

static struct later *later(void) { return own_block(&the_later, sizeof(struct later)); }

#define ROOM (sizeof((struct chunk *)0)->call / sizeof(struct noted))

/* Whether the call destroys a context. For such a call, the guard must not make that context
 * current first. */
static bool ends_context(uint32_t entry)
{
    return entry == E_cuCtxDestroy_v2 || entry == E_cuCtxDetach || entry == E_cuGreenCtxDestroy ||
           entry == E_cuDevicePrimaryCtxRelease_v2 || entry == E_cuDevicePrimaryCtxReset_v2;
}

bool later_may(uint32_t entry) { return !ends_context(entry) || !registered_any(); }

bool later_note(uint32_t entry, const uint64_t *argument)
{
    struct later *l = later();
    bool noted = false;
    if (!l)
        return false;
    own_lock(&l->lock);
    struct chunk *c = l->last;
    if (!c || c->count == ROOM) {
        c = own_map(CHUNK_BYTES);
        if (c && l->last)
            l->last->next = c;
        else if (c)
            l->first = c;
        if (c)
            l->last = c;
    }
    if (c) {
        struct noted *n = &c->call[c->count++];
        n->entry = entry;
        n->context = current_context();
        for (int i = 0; i < LATER_ARGUMENTS; i++)
            n->argument[i] = argument[i];
        noted = true;
        gate_arrears(ARREARS_CALLS, true);
    }
    own_unlock(&l->lock);
    if (noted && entry == E_cuCtxDestroy_v2)
        current_destroyed_later((CUcontext)argument[0]);
    return noted;
}

/* Whether this thread must make the noted calls: some are left, and no other thread is making them.
 * *left: whether some are left. */
static bool begin(struct later *l, bool *left)
{
    own_lock(&l->lock);
    *left = l->first != NULL;
    bool mine = *left && !l->running;
    if (mine)
        __atomic_store_n(&l->running, 1, __ATOMIC_RELEASE);
    own_unlock(&l->lock);
    return mine;
}

/* Gets the next noted call. Returns false if no noted call is left, or if the gate has closed. In
 * both cases this thread stops, and another thread may make the noted calls. */
static bool next(struct later *l, struct noted *out, bool *left)
{
    struct chunk *empty = NULL;
    own_lock(&l->lock);
    struct chunk *c = l->first;
    *left = c != NULL;
    bool found = *left && !gate_closed();
    if (found) {
        *out = c->call[c->done++];
        if (c->done == c->count) {
            l->first = c->next;
            if (!l->first)
                l->last = NULL;
            empty = c;
        }
    } else {
        __atomic_store_n(&l->running, 0, __ATOMIC_RELEASE); /* other threads read it without the lock */
        if (!*left)
            gate_arrears(ARREARS_CALLS, false);
    }
    own_unlock(&l->lock);
    if (empty)
        munmap(empty, CHUNK_BYTES);
    return found;
}

/* Several threads note calls. So before each noted call, make current the context that was current
 * in the thread that noted the call. */
static void make_current(CUcontext wanted, CUcontext *pushed)
{
    CUcontext popped;
    if (wanted == *pushed)
        return;
    if (*pushed)
        REAL(cuCtxPopCurrent_v2)(&popped);
    /* If the push fails, the context has ended, and everything in the context is free. So the noted
     * call has nothing to free. */
    *pushed = wanted && !REAL(cuCtxPushCurrent_v2)(wanted) ? wanted : NULL;
}

bool later_do(void)
{
    typedef CUresult (*exchange)(int *);
    typedef CUresult (*call)(uint64_t, uint64_t, uint64_t);
    enum { RELAXED = 2 };
    struct later *l = __atomic_load_n(&the_later, __ATOMIC_ACQUIRE);
    struct noted n;
    CUcontext pushed = NULL, mine = current_context();
    bool left;
    if (!l)
        return true;
    if (!begin(l, &left))
        return !left;
    /* This thread may be capturing a graph in a mode that forbids some of the noted calls. Change
     * the mode for a moment, so that these calls do not break the capture. */
    int mode = RELAXED;
    bool exchanged = guard_has(E_cuThreadExchangeStreamCaptureMode) &&
                     !CALL(exchange, cuThreadExchangeStreamCaptureMode)(&mode);
    while (next(l, &n, &left)) {
        bool own = !n.context || n.context == mine || ends_context(n.entry);
        make_current(own ? NULL : n.context, &pushed);
        ((call)guard_exported((int)n.entry))(n.argument[0], n.argument[1], n.argument[2]);
    }
    make_current(NULL, &pushed);
    if (exchanged)
        CALL(exchange, cuThreadExchangeStreamCaptureMode)(&mode);
    return !left;
}

CUresult later_sit_out(void)
{
    struct later *l = __atomic_load_n(&the_later, __ATOMIC_ACQUIRE);
    struct polite p;
    CUresult error = CUDA_SUCCESS;
    for (int i = 0; l && i < ENOUGH && __atomic_load_n(&l->running, __ATOMIC_ACQUIRE); i++)
        __builtin_ia32_pause();
    if (!l || !__atomic_load_n(&l->running, __ATOMIC_ACQUIRE))
        return CUDA_SUCCESS;
    polite_begin(&p);
    while (!error && __atomic_load_n(&l->running, __ATOMIC_ACQUIRE))
        if (polite_interrupted(&p))
            error = CUDA_ERROR_SYSTEM_NOT_READY;
        else
            polite_nap(&p);
    polite_end(&p);
    return error;
}
