/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Contexts. Each device charges a process the overhead of one context. The charge begins with the
 * process's first context on the device, and ends with its last context there.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STACK_DEPTH 64

static __thread struct context *stack[STACK_DEPTH];
static __thread int depth;

bool context_valid(struct context *context)
{
    for (struct context *c = driver.contexts; c; c = c->next)
        if (c == context)
            return !c->destroyed;
    return false;
}

bool context_known(struct context *c)
{
    pthread_mutex_lock(&driver.lock);
    bool valid = context_valid(c);
    pthread_mutex_unlock(&driver.lock);
    return valid;
}

/* True for a primary context that was reset, or that was released as often as it was retained. */
static bool primary_ended(const struct context *context)
{
    bool ended = false;
    pthread_mutex_lock(&driver.lock);
    for (struct context *c = driver.contexts; c; c = c->next)
        ended = ended || (c == context && c->primary && c->destroyed);
    pthread_mutex_unlock(&driver.lock);
    return ended;
}

CUresult context_current(struct context **out)
{
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = stack[depth - 1];
    return (*out)->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult context_new(int device, unsigned flags, struct context **out)
{
    struct device *d = &driver.device[device];
    if (device_is_lost(d->physical))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    CUresult result = arena_open_device(device);
    if (!result)
        result = service_start();
    if (result)
        return result;
    if (!d->charged) {
        struct fault more;
        d->overhead = machine->spec.context;
        if (fault_active(FAULT_CONTEXT_MORE, getpid(), (int)d->physical, &more))
            d->overhead += more.bytes;
        if (!machine_charge(driver.slot, d->physical, d->overhead))
            return CUDA_ERROR_OUT_OF_MEMORY;
        d->charged = true;
    }
    struct context *c = *out; /* not NULL: an ended primary context, which becomes active again with
                               * the same handle */
    if (!c) {
        c = calloc(1, sizeof *c);
        if (!c)
            return CUDA_ERROR_OUT_OF_MEMORY;
        c->magic = MAGIC_CONTEXT;
        c->device = device;
        c->next = driver.contexts;
        driver.contexts = c;
    }
    c->destroyed = false;
    c->flags = flags;
    c->peers = 0;
    c->id = ++driver.next_id;
    c->limits[0] = 1024;     /* stack */
    c->limits[1] = 7340032;  /* printf FIFO */
    c->limits[2] = 8388608;  /* malloc heap */
    c->limits[5] = 128;      /* L2 fetch granularity */
    c->legacy = stream_new(c, 0, 0);
    *out = c;
    return CUDA_SUCCESS;
}

/* Ends what was allocated in a context. Memory of a pool stays: the driver associates it with no
 * context (the manual, cuCtxDestroy). */
static void allocations_end(const struct context *c)
{
    for (size_t i = driver.allocations; i-- > 0;) {
        struct allocation a = driver.allocation[i];
        if (a.context != c || a.kind == ALLOC_VMM)
            continue;
        if (a.kind == ALLOC_POOL) {
            driver.allocation[i].context = NULL;
            continue;
        }
        if (a.kind == ALLOC_GRAPH) {
            graph_memory_free(a.graph); /* this also removes the allocation from the table */
            continue;
        }
        if (a.kind == ALLOC_DEVICE)
            device_release(&a, true);
        else if (a.kind != ALLOC_REGISTERED) /* registered memory belongs to the program */
            host_release(&a);
        allocation_remove(&driver.allocation[i]);
    }
}

/* Ends a context, but does not free the memory behind its handle. This memory only gets a mark. So
 * a program that uses the handle later gets an error and does not crash. */
void context_end(struct context *c)
{
    c->destroyed = true;
    allocations_end(c);
    arrays_end(c);
    vmm_imports_end(c);
    events_end(c);
    for (struct stream *s = driver.streams; s; s = s->next)
        if (s->context == c) {
            capture_drop(s);
            s->destroyed = true;
        }
    bool last = true;
    for (struct context *o = driver.contexts; o; o = o->next)
        last = last && (o->destroyed || o->device != c->device);
    struct device *d = &driver.device[c->device];
    if (last && d->charged) {
        pools_trim_idle();
        if (d->graph_pool)
            pool_trim(d->graph_pool, 0);
        machine_release(driver.slot, d->physical, d->overhead);
        d->charged = d->worked = false;
    }
}

static CUresult push(struct context *c)
{
    if (depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = c;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    GATED;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    struct context *c = NULL;
    pthread_mutex_lock(&driver.lock);
    CUresult result = context_new(device, flags, &c);
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    *out = c;
    return push(c);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *out, void *affinity, int n, unsigned flags, CUdevice device)
{
    CHECKED;
    (void)affinity;
    return n ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *out, const void *params, unsigned flags, CUdevice device)
{
    (void)params; /* the parameters are for MPS and graphics sharing, which are not emulated */
    return cuCtxCreate_v2(out, flags, device);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext c)
{
    REQUIRE(c);
    GATED;
    pthread_mutex_lock(&driver.lock);
    CUresult result = context_valid(c) && !c->primary && !c->green ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
    if (!result)
        context_end(c);
    pthread_mutex_unlock(&driver.lock);
    if (!result && depth && stack[depth - 1] == c)
        depth--;
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    GATED;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    struct device *d = &driver.device[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    if (!d->primary || d->primary->destroyed) {
        struct context *c = d->primary;
        result = context_new(device, d->primary_flags, &c);
        if (!result) {
            c->primary = true;
            d->primary = c;
            d->primary_count = 0;
        }
    }
    if (!result) {
        d->primary_count++;
        *out = d->primary;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

static CUresult primary_end(CUdevice device, bool all)
{
    GATED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    struct device *d = &driver.device[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    if (d->primary && !d->primary->destroyed) {
        if (d->primary_count)
            d->primary_count--;
        if (all)
            d->primary_count = 0;
        if (!d->primary_count)
            context_end(d->primary);
    } else if (!all) {
        result = CUDA_ERROR_INVALID_CONTEXT;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { return primary_end(d, false); }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice d) { return primary_end(d, true); }

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    CHECKED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    driver.device[device].primary_flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    REQUIRE(flags && active);
    CHECKED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    struct device *d = &driver.device[device];
    *flags = d->primary_flags;
    *active = d->primary && !d->primary->destroyed;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c)
{
    CHECKED;
    return context_known(c) ? push(c) : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    CHECKED;
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (out)
        *out = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext c)
{
    CHECKED;
    if (!c) {
        if (depth)
            depth--;
        return CUDA_SUCCESS;
    }
    /* Accept a primary context that is not active. The CUDA runtime makes a primary context current
     * before it retains the context. After a reset, the runtime keeps the context's handle. */
    if (!context_known(c) && !primary_ended(c))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!depth)
        return push(c);
    stack[depth - 1] = c;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *out)
{
    CHECKED;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

/* Replaces `c` by the current context if `c` is null. Otherwise checks that `c` is a valid
 * context. */
#define CONTEXT(c)                                      \
    do {                                                \
        CHECKED;                                        \
        if (!(c)) {                                     \
            CUresult current_ = context_current(&(c));  \
            if (current_)                               \
                return current_;                        \
        } else if (!context_known(c)) {                         \
            return CUDA_ERROR_INVALID_CONTEXT;          \
        }                                               \
    } while (0)

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext c)
{
    REQUIRE(out);
    CONTEXT(c);
    *out = c->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *out) { return cuCtxGetDevice_v2(out, NULL); }

EXPORT CUresult cuCtxGetId(CUcontext c, unsigned long long *id)
{
    REQUIRE(id);
    CONTEXT(c);
    *id = c->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags)
{
    REQUIRE(flags);
    struct context *c = NULL;
    CONTEXT(c);
    *flags = c->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned flags)
{
    struct context *c = NULL;
    CONTEXT(c);
    c->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext c, unsigned *version)
{
    CONTEXT(c);
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, int limit)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (!value || limit < 0 || limit > 9)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = c->limits[limit];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (limit < 0 || limit > 9)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    c->limits[limit] = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCacheConfig(int *config)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (config)
        *config = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(int config)
{
    struct context *c = NULL;
    (void)config;
    CONTEXT(c);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (flags || !context_known(peer) || peer->device == c->device)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->peers >> peer->device & 1)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    c->peers |= 1ull << peer->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    struct context *c = NULL;
    CONTEXT(c);
    if (!context_known(peer) || !(c->peers >> peer->device & 1))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    c->peers &= ~(1ull << peer->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext c)
{
    CONTEXT(c);
    CUresult refused;
    if (sync_returns_early())
        return CUDA_SUCCESS;
    if (capture_refuses(NULL, c, &refused))
        return refused;
    pthread_mutex_lock(&driver.lock);
    uint64_t tail = driver_tail(c);
    pthread_mutex_unlock(&driver.lock);
    sleep_until(tail);
    pools_trim_synced();
    return driver_sticky();
}

EXPORT CUresult cuCtxSynchronize(void) { return cuCtxSynchronize_v2(NULL); }
