/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The context that is current in each thread. A destructor asks for the current context, makes its
 * own context current, and then restores the first one. These calls need no device, but the driver
 * may block in them while the process is suspended. So the guard keeps its own copy of each
 * thread's stack of contexts. While the driver would block, the guard changes only its copy. Before
 * the thread's next call to the driver, the guard makes the same changes in the driver.
 */
#include "table.h"
#include "wraps.h"
#include "guard.h"

#include <pthread.h>

#define DEEPEST 16

struct stack {
    uint32_t depth;
    CUcontext at[DEEPEST];
};

static __thread struct {
    struct stack real;   /* the driver's stack */
    struct stack wanted; /* the stack as the application sees it */
    bool differ;
    bool lost; /* the driver's stack is deeper than the array `at`, so `real` is incomplete */
} mine;

static pthread_key_t at_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static CUcontext top(const struct stack *s) { return s->depth ? s->at[s->depth - 1] : NULL; }

static bool push(struct stack *s, CUcontext context)
{
    if (s->depth == DEEPEST)
        return false;
    s->at[s->depth++] = context;
    return true;
}

/* Replaces the top of the stack, as cuCtxSetCurrent does. */
static void set(struct stack *s, CUcontext context)
{
    if (s->depth)
        s->depth--;
    if (context)
        push(s, context);
}

static bool equal(const struct stack *a, const struct stack *b)
{
    for (uint32_t i = 0; i < a->depth && i < b->depth; i++)
        if (a->at[i] != b->at[i])
            return false;
    return a->depth == b->depth;
}

/* ---- while the driver would block */

static void thread_ends(void *unused)
{
    (void)unused;
    if (mine.differ)
        gate_arrears(ARREARS_CONTEXTS, false);
    mine.differ = false;
}

static void make_key(void) { pthread_key_create(&at_end, thread_ends); }

static void changed(void)
{
    bool differ = !equal(&mine.real, &mine.wanted);
    if (differ == mine.differ)
        return;
    pthread_once(&once, make_key);
    pthread_setspecific(at_end, differ ? &mine : NULL);
    mine.differ = differ;
    gate_arrears(ARREARS_CONTEXTS, differ);
}

bool current_differs(void) { return mine.differ; }

void current_apply(void)
{
    if (!mine.differ)
        return;
    struct stack *real = &mine.real;
    const struct stack *wanted = &mine.wanted;
    uint32_t same = 0;
    CUcontext gone;
    while (same < real->depth && same < wanted->depth && real->at[same] == wanted->at[same])
        same++;
    for (; real->depth > same; real->depth--)
        REAL(cuCtxPopCurrent_v2)(&gone);
    for (; real->depth < wanted->depth; real->depth++) {
        real->at[real->depth] = wanted->at[real->depth];
        if (REAL(cuCtxPushCurrent_v2)(real->at[real->depth])) {
            /* This context has ended, so also drop the contexts that were pushed above it. */
            mine.wanted.depth = real->depth;
            break;
        }
    }
    changed();
}

/* ---- the driver's current context */

CUcontext current_context(void) { return top(&mine.wanted); }

bool current_known(void) { return !mine.lost; }

static void driver_knows(void)
{
    if (!mine.differ)
        mine.wanted = mine.real;
}

void current_seen(CUcontext context)
{
    if (__builtin_expect(top(&mine.real) == context || mine.differ, 1))
        return;
    set(&mine.real, context);
    mine.lost = false;
    driver_knows();
}

void current_pushed(CUcontext context)
{
    mine.lost |= !push(&mine.real, context);
    driver_knows();
}

static void popped(void)
{
    if (mine.real.depth && !mine.lost)
        mine.real.depth--;
    driver_knows();
}

void current_destroyed(CUcontext context)
{
    if (context && top(&mine.real) == context)
        popped();
}

void current_destroyed_later(CUcontext context)
{
    if (!context || top(&mine.wanted) != context)
        return;
    mine.wanted.depth--;
    changed();
}

void current_fork(enum fork_when when)
{
    if (when != FORK_CHILD)
        return;
    mine.real.depth = mine.wanted.depth = 0;
    mine.differ = mine.lost = false;
}

/* ---- the calls. If the driver would not block, each function calls the driver. This costs a few
 * instructions more than a direct call. */

/* Whether the guard must answer from its own stack, because the driver would block. If the result
 * is false, the caller calls the driver if *error is 0; otherwise it returns *error. */
static bool blocked(uint32_t entry, CUresult *error)
{
    *error = CUDA_SUCCESS;
    if (!__atomic_load_n(__atomic_load_n(&guard_free_gate, __ATOMIC_RELAXED), __ATOMIC_RELAXED))
        return false;
    *error = guard_settle();
    if (!*error && guard_blocked() && !mine.lost)
        return true;
    if (!*error)
        *error = guard_slow_free(entry);
    return false;
}

CUresult wrap_cuCtxSetCurrent(CUcontext context)
{
    CUresult error;
    if (blocked(E_cuCtxSetCurrent, &error)) {
        set(&mine.wanted, context);
        changed();
        return CUDA_SUCCESS;
    }
    if (!error && !(error = REAL(cuCtxSetCurrent)(context))) {
        set(&mine.real, context);
        driver_knows();
    }
    return error;
}

CUresult wrap_cuCtxPushCurrent_v2(CUcontext context)
{
    CUresult error;
    if (blocked(E_cuCtxPushCurrent_v2, &error)) {
        if (context && push(&mine.wanted, context)) {
            changed();
            return CUDA_SUCCESS;
        }
        error = guard_slow_free(E_cuCtxPushCurrent_v2);
    }
    if (!error && !(error = REAL(cuCtxPushCurrent_v2)(context)))
        current_pushed(context);
    return error;
}

CUresult wrap_cuCtxPopCurrent_v2(CUcontext *out)
{
    CUresult error;
    if (blocked(E_cuCtxPopCurrent_v2, &error)) {
        if (!mine.wanted.depth)
            return CUDA_ERROR_INVALID_CONTEXT;
        if (out)
            *out = top(&mine.wanted);
        mine.wanted.depth--;
        changed();
        return CUDA_SUCCESS;
    }
    if (!error && !(error = REAL(cuCtxPopCurrent_v2)(out)))
        popped();
    return error;
}

CUresult wrap_cuCtxGetCurrent(CUcontext *out)
{
    CUresult error;
    if (blocked(E_cuCtxGetCurrent, &error)) {
        if (out)
            *out = current_context();
        return out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    return error ? error : REAL(cuCtxGetCurrent)(out);
}

/* Finds the device of a context without the driver. Returns false if the guard's table does not
 * have the context. Otherwise *error is the result of the call. */
static bool device_of(CUcontext context, CUdevice *out, CUresult *error)
{
    struct own own;
    *error = !out ? CUDA_ERROR_INVALID_VALUE : !context ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
    if (*error)
        return true;
    if (!table_get(OWN_CONTEXT, (uint64_t)context, &own))
        return false;
    *out = (CUdevice)own.extra;
    return true;
}

CUresult wrap_cuCtxGetDevice(CUdevice *out)
{
    CUresult error;
    if (blocked(E_cuCtxGetDevice, &error)) {
        if (device_of(current_context(), out, &error))
            return error;
        error = guard_slow_free(E_cuCtxGetDevice);
    }
    return error ? error : REAL(cuCtxGetDevice)(out);
}

CUresult wrap_cuCtxGetDevice_v2(CUdevice *out, CUcontext context)
{
    CUresult error;
    if (blocked(E_cuCtxGetDevice_v2, &error)) {
        if (device_of(context ? context : current_context(), out, &error))
            return error;
        error = guard_slow_free(E_cuCtxGetDevice_v2);
    }
    return error ? error : REAL(cuCtxGetDevice_v2)(out, context);
}
