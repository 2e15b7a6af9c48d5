/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Stream-ordered allocation, and the calls about pools. The guard counts the memory that a pool
 * reserves; see reserves.c.
 */
#include "reserves.h"
#include "wraps.h"

enum { ALLOC_TYPE_MANAGED = 2 };

/* If the program has allocated this many bytes from a reserve since the guard last asked the driver
 * for the reserve's size, the guard asks again. It does so even if it expects no growth. */
#define UNSEEN (64 * MIB)

/* Enter a pool that this process did not create. The guard counts the pool only if it is the
 * default pool or the current pool of a device. It does not count imported pools and pools in host
 * memory. */
static struct reserve *adopt(CUmemoryPool pool, struct here h)
{
    typedef CUresult (*pool_of)(CUmemoryPool *, CUdevice);
    struct reserves *all = reserves();
    CUmemoryPool its = NULL;
    if (!all)
        return NULL;
    own_lock(&all->lock);
    struct reserve *r = reserve_find(all, pool);
    own_unlock(&all->lock);
    if (r)
        return r;
    struct reserve new = {.kind = RESERVE_POOL, .ordinal = -1, .pool = pool};
    for (int device = 0; device < PAGE_DEVICES && new.ordinal < 0; device++)
        if (!CALL(pool_of, cuDeviceGetDefaultMemPool)(&its, device) && its == pool)
            new.ordinal = here_of_device(new.device = device).ordinal;
    if (new.ordinal < 0 && !CALL(pool_of, cuDeviceGetMemPool)(&its, h.device) && its == pool)
        new.ordinal = h.ordinal;
    own_lock(&all->lock);
    r = reserve_find(all, pool);
    if (!r && (r = reserve_add(all)))
        *r = new;
    own_unlock(&all->lock);
    return r;
}

static CUmemoryPool current_pool(struct here h)
{
    typedef CUresult (*pool_of)(CUmemoryPool *, CUdevice);
    CUmemoryPool pool = NULL;
    return CALL(pool_of, cuDeviceGetMemPool)(&pool, h.device) ? NULL : pool;
}

/* Whether the stream is being captured. In this case its allocations become nodes of a graph, and
 * the guard counts the graph when it is launched. */
static bool capturing(CUstream stream, bool per_thread)
{
    typedef CUresult (*is)(CUstream, int *);
    int entry = per_thread ? E_cuStreamIsCapturing_ptsz : E_cuStreamIsCapturing, status = 0;
    if (!capture_any())
        return false;
    if ((uintptr_t)stream < 2 && !per_thread) /* the legacy stream cannot be captured */
        return false;
    return guard_has(entry) && !((is)guard_real[entry])(stream, &status) && status == 1;
}

struct request {
    CUdeviceptr *out;
    size_t bytes;
    CUmemoryPool pool; /* NULL: the device's current pool */
    CUstream stream;
    bool per_thread;
};

static CUresult driver_allocate(const struct request *q)
{
    if (q->per_thread)
        return q->pool ? REAL(cuMemAllocFromPoolAsync_ptsz)(q->out, q->bytes, q->pool, q->stream)
                       : REAL(cuMemAllocAsync_ptsz)(q->out, q->bytes, q->stream);
    return q->pool ? REAL(cuMemAllocFromPoolAsync)(q->out, q->bytes, q->pool, q->stream)
                   : REAL(cuMemAllocAsync)(q->out, q->bytes, q->stream);
}

static CUresult driver_free(const struct request *q)
{
    return q->per_thread ? REAL(cuMemFreeAsync_ptsz)(*q->out, q->stream) : REAL(cuMemFreeAsync)(*q->out, q->stream);
}

/* Finds the pool, and computes the bytes by which the allocation makes the pool grow. Also adds the
 * allocation to `live`, so that no other thread plans to use the same idle bytes. `look`: whether
 * to ask the driver for the pool's size after the allocation. */
static struct reserve *plan(struct reserves *all, CUmemoryPool pool, struct here h, uint64_t extent, uint64_t *growth,
                            bool *look)
{
    own_lock(&all->lock);
    struct reserve *r = reserve_find(all, pool);
    if (!r) {
        own_unlock(&all->lock);
        r = adopt(pool, h);
        own_lock(&all->lock);
    }
    if (r && r->ordinal >= 0) {
        uint64_t idle = r->charged > r->live ? r->charged - r->live : 0;
        *growth = extent > idle ? reserve_round(extent - idle) : 0;
        r->live += extent;
        r->unseen += extent;
        *look = *growth || r->unseen >= UNSEEN;
    }
    own_unlock(&all->lock);
    return r && (r->ordinal >= 0 || r->managed) ? r : NULL;
}

static void unplan(struct reserves *all, struct reserve *r, uint64_t extent)
{
    own_lock(&all->lock);
    r->live -= extent < r->live ? extent : r->live;
    own_unlock(&all->lock);
}

/* Managed memory from a pool counts like memory from cuMemAllocManaged. The guard counts each
 * allocation and not the pool's reserve, because the reserve may be in host memory. */
static CUresult allocate_managed(const struct request *q, struct here h, uint64_t extent)
{
    struct own own = {.bytes = extent, .owner = h.number, .kind = OWN_MANAGED, .ordinal = (int16_t)h.ordinal};
    CUresult result = guard_charge(h.ordinal, extent);
    if (result)
        return result;
    result = driver_allocate(q);
    if (!result)
        own.key = *q->out;
    return keep(result, &own, REAL(cuMemFree_v2));
}

static CUresult allocate(const struct request *q)
{
    typedef CUresult (*trim)(CUmemoryPool, size_t);
    struct here h = guard_page ? here_of_stream(q->stream, q->per_thread) : (struct here){.ordinal = -1};
    struct reserves *all = reserves();
    struct reserve *r = NULL;
    CUmemoryPool pool = NULL;
    uint64_t extent, growth = 0;
    bool look = false;
    /* Limit the size, so that the sums below do not overflow. No pool is larger than this limit. */
    extent = q->bytes > UINT64_MAX / 4 ? UINT64_MAX / 4 : q->bytes;
    extent = (extent + 511) / 512 * 512;
    if (h.ordinal >= 0 && q->out && q->bytes && all && !capturing(q->stream, q->per_thread))
        pool = q->pool ? q->pool : current_pool(h);
    if (pool)
        r = plan(all, pool, h, extent, &growth, &look);
    if (!r)
        return driver_allocate(q);
    current_seen(h.context);
    if (r->managed)
        return allocate_managed(q, h, extent);

    CUresult refused = look ? reserve_begin(r, growth) : CUDA_SUCCESS;
    if (refused) {
        unplan(all, r, extent);
        return refused;
    }
    CUresult result = driver_allocate(q);
    if (result)
        unplan(all, r, extent);
    if (look)
        refused = reserve_end(r, true);
    if (result)
        return result;
    struct own stale, own = {.key = *q->out, .bytes = extent, .owner = (uint64_t)r, .kind = OWN_POOLED,
                             .ordinal = (int16_t)r->ordinal};
    if (refused || !table_put(&own, &stale)) {
        driver_free(q);
        unplan(all, r, extent);
        CALL(trim, cuMemPoolTrimTo)(r->pool, 0);
        reserve_settle(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    settle_stale(&stale);
    return CUDA_SUCCESS;
}

void pool_freed(const struct own *own)
{
    struct reserves *all = reserves();
    struct reserve *r = (struct reserve *)own->owner;
    own_lock(&all->lock);
    r->live -= own->bytes < r->live ? own->bytes : r->live;
    if (r->ended)
        reserve_compare(r);
    own_unlock(&all->lock);
}

CUresult wrap_cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    ENTER;
    return allocate(&(struct request){out, bytes, NULL, stream, false});
}

CUresult wrap_cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    ENTER;
    return allocate(&(struct request){out, bytes, NULL, stream, true});
}

/* If the pool is NULL, call the driver, which reports the error. */
CUresult wrap_cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ENTER;
    return pool ? allocate(&(struct request){out, bytes, pool, stream, false})
                : REAL(cuMemAllocFromPoolAsync)(out, bytes, pool, stream);
}

CUresult wrap_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    ENTER;
    return pool ? allocate(&(struct request){out, bytes, pool, stream, true})
                : REAL(cuMemAllocFromPoolAsync_ptsz)(out, bytes, pool, stream);
}

/* ---- pools */

CUresult wrap_cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    ENTER;
    struct reserves *all = guard_page && guard_initialised() ? reserves() : NULL;
    if (!all || !props || !out)
        return REAL(cuMemPoolCreate)(out, props);
    bool managed = props->allocType == ALLOC_TYPE_MANAGED;
    if (managed && !managed_allowed())
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = REAL(cuMemPoolCreate)(out, props);
    if (result)
        return result;
    if (managed)
        guard_pin(PIN_MANAGED);
    struct here h = {.ordinal = -1};
    if (props->location.type == MEM_LOCATION_DEVICE && !managed)
        h = here_of_device(props->location.id);
    own_lock(&all->lock);
    struct reserve *r = reserve_add(all);
    if (r)
        *r = (struct reserve){.kind = RESERVE_POOL, .ordinal = h.ordinal, .device = h.device, .managed = managed,
                              .pool = *out};
    own_unlock(&all->lock);
    return result;
}

/* Whether to refuse the query for a pool. The driver has made the default pool of managed memory
 * itself. So the guard cannot refuse to create this pool: it refuses the query. */
static bool managed_refused(int type)
{
    if (!guard_page || !guard_initialised() || type != ALLOC_TYPE_MANAGED)
        return false;
    if (!managed_allowed())
        return true;
    guard_pin(PIN_MANAGED);
    return false;
}

/* Called after a query for a pool: enters a pool of managed memory, whose allocations the guard
 * could not recognise otherwise. */
static CUresult found(CUresult result, const CUmemoryPool *out, int type)
{
    struct reserves *all = guard_page && guard_initialised() ? reserves() : NULL;
    if (result || !all || type != ALLOC_TYPE_MANAGED)
        return result;
    own_lock(&all->lock);
    struct reserve *r = reserve_find(all, *out);
    if (!r && (r = reserve_add(all)))
        *r = (struct reserve){.kind = RESERVE_POOL, .ordinal = -1, .managed = true, .pool = *out};
    own_unlock(&all->lock);
    return result;
}

CUresult wrap_cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    ENTER;
    if (managed_refused(type))
        return CUDA_ERROR_NOT_SUPPORTED;
    return found(REAL(cuMemGetDefaultMemPool)(out, location, type), out, type);
}

CUresult wrap_cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    ENTER;
    if (managed_refused(type))
        return CUDA_ERROR_NOT_SUPPORTED;
    return found(REAL(cuMemGetMemPool)(out, location, type), out, type);
}

#define KNOWN(pool)                                       \
    struct reserves *all = guard_page ? reserves() : NULL; \
    struct reserve *r = NULL;                             \
    if (all) {                                            \
        own_lock(&all->lock);                             \
        r = reserve_find(all, pool);                              \
        own_unlock(&all->lock);                           \
    }

static void mark(struct reserve *r, enum reserve_state ended)
{
    if (!r)
        return;
    own_lock(&reserves()->lock);
    r->ended = ended;
    own_unlock(&reserves()->lock);
}

CUresult wrap_cuMemPoolDestroy(CUmemoryPool pool)
{
    ENTER_BACK(cuMemPoolDestroy, (uint64_t)pool);
    KNOWN(pool);
    /* Mark the pool before the driver destroys it, because afterwards another thread may get the
     * same handle. */
    mark(r, ENDING);
    CUresult result = REAL(cuMemPoolDestroy)(pool);
    mark(r, result ? ALIVE : ENDED);
    if (r)
        reserve_settle(r);
    return result;
}

CUresult wrap_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes)
{
    ENTER_BACK(cuMemPoolTrimTo, (uint64_t)pool, keep_bytes);
    KNOWN(pool);
    CUresult result = REAL(cuMemPoolTrimTo)(pool, keep_bytes);
    if (r)
        reserve_settle(r);
    return result;
}

CUresult wrap_cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    ENTER;
    KNOWN(pool);
    CUresult result = REAL(cuMemPoolSetAttribute)(pool, attribute, value);
    if (r)
        reserve_settle(r);
    return result;
}
