/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Stream-ordered allocation. A pool reserves device memory in 2 MiB pages when it needs more. Like
 * the real driver, it frees the memory above its release threshold at the next synchronise call.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ATTR_REUSE_FIRST = 1, ATTR_REUSE_LAST = 3, ATTR_THRESHOLD = 4, ATTR_RESERVED = 5,
       ATTR_RESERVED_HIGH = 6, ATTR_USED = 7, ATTR_USED_HIGH = 8 };

static struct pool *pool_new(int device, const CUmemPoolProps *props)
{
    struct pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->magic = MAGIC_POOL;
    p->device = device;
    p->props = *props;
    p->reuse[0] = p->reuse[1] = p->reuse[2] = 1;
    p->access = device < 0 ? ~0ull : 1ull << device;
    p->next = driver.pools;
    driver.pools = p;
    return p;
}

/* Call this with the lock held. */
struct pool *pool_default(int device)
{
    struct device *d = &driver.device[device];
    CUmemPoolProps props = {.allocType = MEM_ALLOCATION_PINNED, .location = {MEM_LOCATION_DEVICE, device}};
    if (!d->default_pool) {
        d->default_pool = pool_new(device, &props);
        if (d->default_pool)
            d->default_pool->is_default = true;
    }
    if (!d->current_pool)
        d->current_pool = d->default_pool;
    return d->default_pool;
}

/* Returns the pool that gives memory to the device's graphs. Unused memory stays in this pool until
 * the program trims it. Call this with the lock held. */
struct pool *pool_for_graphs(int device)
{
    struct device *d = &driver.device[device];
    CUmemPoolProps props = {.allocType = MEM_ALLOCATION_PINNED, .location = {MEM_LOCATION_DEVICE, device}};
    if (!d->graph_pool && (d->graph_pool = pool_new(device, &props)))
        d->graph_pool->threshold = ~0ull;
    return d->graph_pool;
}

static bool pool_valid(const struct pool *pool)
{
    for (struct pool *p = driver.pools; p; p = p->next)
        if (p == pool)
            return !p->destroyed;
    return false;
}

void pool_trim(struct pool *p, uint64_t keep)
{
    uint64_t least = p->used > keep ? p->used : keep;
    if (p->device < 0 || least >= p->reserved) /* so the sum below does not overflow */
        return;
    uint64_t target = (least + GRANULE - 1) / GRANULE * GRANULE; /* at least `keep` bytes stay */
    if (p->reserved <= target)
        return;
    machine_release(driver.slot, driver.device[p->device].physical, p->reserved - target);
    p->reserved = target;
}

void pools_trim_idle(void)
{
    for (struct pool *p = driver.pools; p; p = p->next)
        pool_trim(p, p->destroyed ? 0 : p->threshold);
}

/* A synchronise call can return after the process was locked. While the process is suspended, its
 * device memory is not charged, so the pools must not release any. */
void pools_trim_synced(void)
{
    __attribute__((cleanup(gate_leave))) int passed = gate_try();
    if (!passed)
        return;
    pthread_mutex_lock(&driver.lock);
    pools_trim_idle();
    pthread_mutex_unlock(&driver.lock);
}

CUresult pool_reserve(struct pool *p, uint64_t bytes)
{
    uint64_t wanted = (p->used + bytes + GRANULE - 1) / GRANULE * GRANULE;
    if (p->props.maxSize && p->used + bytes > p->props.maxSize)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (p->device >= 0 && wanted > p->reserved) {
        uint32_t physical = driver.device[p->device].physical;
        if (!machine_charge(driver.slot, physical, wanted - p->reserved)) {
            pools_trim_idle(); /* other pools of this process may hold unused memory */
            wanted = (p->used + bytes + GRANULE - 1) / GRANULE * GRANULE;
            if (wanted > p->reserved && !machine_charge(driver.slot, physical, wanted - p->reserved))
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (wanted > p->reserved)
        p->reserved = wanted;
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    return CUDA_SUCCESS;
}

/* Frees the bytes of an allocation in a pool. The caller removes the allocation from the table.
 * Call this with the lock held. */
CUresult pool_free(struct allocation *a)
{
    struct pool *p = a->pool;
    if (a->device >= 0)
        device_release(a, false);
    else
        munmap((void *)a->address, a->extent);
    if (p->props.allocType == MEM_ALLOCATION_MANAGED)
        managed_count(-1);
    p->used -= a->extent;
    p->live--;
    if (p->destroyed)
        pool_trim(p, 0);
    return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *out, size_t size, struct pool *pool, CUstream stream)
{
    struct stream *s;
    struct allocation a;
    CUresult captured;
    if (capture_alloc(stream, size, pool, out, &captured))
        return captured;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    if (!result && !pool && !pool_default(s->context->device))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result && !pool)
        pool = driver.device[s->context->device].current_pool;
    if (!result && (!pool_valid(pool) || pool->imported || !out || !size))
        result = CUDA_ERROR_INVALID_VALUE;
    uint64_t extent = (size + 511) / 512 * 512;
    if (!result && pool->device >= 0) {
        result = size > machine->spec.memory ? CUDA_ERROR_OUT_OF_MEMORY : pool_reserve(pool, extent);
        if (!result)
            result = device_allocate(pool->device, extent, false, &a);
    } else if (!result) {
        extent = (size + 4095) / 4096 * 4096;
        void *p = mmap(NULL, extent, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        a = (struct allocation){.address = (uint64_t)p, .extent = extent, .device = -1};
    }
    if (!result) {
        a.size = size;
        a.kind = ALLOC_POOL;
        a.pool = pool;
        a.context = s->context;
        if (!allocation_add(&a)) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else {
            pool->used += a.extent;
            pool->live++;
            if (pool->props.allocType == MEM_ALLOCATION_MANAGED)
                managed_count(1);
        }
        if (!result) {
            if (pool->used > pool->used_high)
                pool->used_high = pool->used;
            *out = a.address;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream stream)
{
    GATED;
    return allocate(out, size, NULL, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream stream)
{
    GATED;
    return pool ? allocate(out, size, pool, stream) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    GATED;
    struct stream *s;
    CUresult captured;
    if (capture_free(stream, address, &captured))
        return captured;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    struct allocation *a = result ? NULL : allocation_find(address);
    bool imported = !result && !a && vmm_import_close(address);
    if (!result && !imported && (!a || a->address != address ||
                    (a->kind != ALLOC_POOL && a->kind != ALLOC_DEVICE && a->kind != ALLOC_GRAPH)))
        result = CUDA_ERROR_INVALID_VALUE;
    if (!result && a && a->kind == ALLOC_GRAPH) {
        result = graph_memory_free(a->graph);
    } else if (!result && a) {
        if (a->kind == ALLOC_POOL)
            pool_free(a);
        else
            device_release(a, true);
        allocation_remove(a);
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    GATED;
    if (!out || !props)
        return CUDA_ERROR_INVALID_VALUE;
    if (props->handleTypes & ~HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    bool managed = props->allocType == MEM_ALLOCATION_MANAGED;
    bool device = props->location.type == MEM_LOCATION_DEVICE && !managed;
    if ((props->allocType != MEM_ALLOCATION_PINNED && !managed) ||
        (device && (props->location.id < 0 || props->location.id >= driver.count)) ||
        (!device && !managed && (props->location.type < MEM_LOCATION_HOST || props->location.type > MEM_LOCATION_HOST_NUMA_CURRENT)))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    *out = pool_new(device ? props->location.id : -1, props);
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Runs `body` with the lock held, if the pool is valid. */
#define WITH_POOL(pool, body)                                                     \
    do {                                                                          \
        pthread_mutex_lock(&driver.lock);                                         \
        CUresult result = pool_valid(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; \
        if (!result) {                                                            \
            body;                                                                 \
        }                                                                         \
        pthread_mutex_unlock(&driver.lock);                                       \
        return result;                                                            \
    } while (0)

static void destroy(struct pool *p)
{
    if (p->shared || p->imported)
        shared_count(-1);
    p->destroyed = true; /* the pool's live allocations stay until they are freed */
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].current_pool == p)
            driver.device[i].current_pool = driver.device[i].default_pool;
    pool_trim(p, 0);
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    GATED;
    WITH_POOL(pool, if (pool->is_default) result = CUDA_ERROR_INVALID_VALUE; else destroy(pool));
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    GATED;
    WITH_POOL(pool, pool_trim(pool, keep));
}

static CUresult get_attribute(struct pool *p, int attribute, void *value)
{
    if (attribute >= ATTR_REUSE_FIRST && attribute <= ATTR_REUSE_LAST) {
        *(int *)value = p->reuse[attribute - 1];
        return CUDA_SUCCESS;
    }
    const uint64_t figures[] = {p->threshold, p->reserved, p->reserved_high, p->used, p->used_high};
    if (attribute < ATTR_THRESHOLD || attribute > ATTR_USED_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    *(uint64_t *)value = figures[attribute - ATTR_THRESHOLD];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(struct pool *p, int attribute, const void *value)
{
    if (attribute >= ATTR_REUSE_FIRST && attribute <= ATTR_REUSE_LAST)
        p->reuse[attribute - 1] = *(const int *)value;
    else if (attribute == ATTR_THRESHOLD)
        p->threshold = *(const uint64_t *)value;
    else if (attribute == ATTR_RESERVED_HIGH && !*(const uint64_t *)value)
        p->reserved_high = p->reserved;
    else if (attribute == ATTR_USED_HIGH && !*(const uint64_t *)value)
        p->used_high = p->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    GATED;
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_POOL(pool, result = get_attribute(pool, attribute, value));
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value)
{
    GATED;
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_POOL(pool, result = set_attribute(pool, attribute, value));
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    GATED;
    for (size_t i = 0; i < count; i++)
        if (!map || map[i].location.type != MEM_LOCATION_DEVICE || map[i].location.id < 0 ||
            map[i].location.id >= driver.count)
            return CUDA_ERROR_INVALID_VALUE;
    WITH_POOL(pool, for (size_t i = 0; i < count; i++) {
        uint64_t bit = 1ull << map[i].location.id;
        pool->access = map[i].flags ? pool->access | bit : pool->access & ~bit;
    });
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool, CUmemLocation *location)
{
    CHECKED;
    if (!flags || !location || location->type != MEM_LOCATION_DEVICE || location->id < 0 ||
        location->id >= driver.count)
        return CUDA_ERROR_INVALID_VALUE;
    WITH_POOL(pool, *flags = pool->access >> location->id & 1 ? 3 : 0);
}

/* ---- pools that other processes see ---- */

EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type, unsigned long long flags)
{
    GATED;
    if (type != HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    WITH_POOL(pool, if (!out || flags || pool->device < 0 || !(pool->props.handleTypes & type)) result =
                        CUDA_ERROR_INVALID_VALUE;
              else result = share_file(out, SHARE_POOL, pool->device, 0, 0);
              if (!result && !pool->shared) {
                  pool->shared = true;
                  shared_count(1);
              });
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *fd, int type, unsigned long long flags)
{
    GATED;
    struct share share;
    if (type != HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = out && !flags ? share_read((int)(intptr_t)fd, SHARE_POOL, &share) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    CUmemPoolProps props = {.allocType = MEM_ALLOCATION_PINNED, .location = {MEM_LOCATION_DEVICE, share.device}};
    pthread_mutex_lock(&driver.lock);
    *out = pool_new(share.device, &props);
    if (*out) {
        (*out)->imported = true;
        shared_count(1);
    }
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemPoolExportPointer(CUipcMemHandle *out, CUdeviceptr address)
{
    GATED;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find(address);
    if (out && a && a->address == address && a->kind == ALLOC_POOL && a->pool->shared) {
        share_pack(out, SHARE_POINTER, a->device, a->address - driver.device[a->device].window, a->size);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, CUipcMemHandle *data)
{
    GATED;
    struct share share;
    CUresult found = out && data ? share_unpack(data, SHARE_POINTER, &share) : CUDA_ERROR_INVALID_VALUE;
    if (found)
        return found;
    WITH_POOL(pool, result = pool->imported && !share.own ? vmm_import(&share, NULL, out) : CUDA_ERROR_INVALID_VALUE);
}

static CUresult device_pool(CUmemoryPool *out, CUdevice device, bool current)
{
    CHECKED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    *out = pool_default(device);
    if (current && *out)
        *out = driver.device[device].current_pool;
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice d) { return device_pool(out, d, false); }
EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice d) { return device_pool(out, d, true); }

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    CHECKED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    WITH_POOL(pool, if (pool->device != device) result = CUDA_ERROR_INVALID_VALUE;
              else driver.device[device].current_pool = pool);
}

/* Finds a pool for the calls of CUDA 13 that name a location and a kind of memory. */
static CUresult location_pool(CUmemoryPool *out, CUmemLocation *location, int type, bool current)
{
    static struct pool *host_pools[2]; /* of pinned and of managed memory */
    CHECKED;
    if (!out || !location || (type != MEM_ALLOCATION_PINNED && type != MEM_ALLOCATION_MANAGED))
        return CUDA_ERROR_INVALID_VALUE;
    if (location->type == MEM_LOCATION_DEVICE && type == MEM_ALLOCATION_PINNED)
        return device_pool(out, location->id, current);
    CUmemPoolProps props = {.allocType = type, .location = {MEM_LOCATION_HOST, 0}};
    struct pool **host_pool = &host_pools[type == MEM_ALLOCATION_MANAGED];
    pthread_mutex_lock(&driver.lock);
    if (!*host_pool && (*host_pool = pool_new(-1, &props)))
        (*host_pool)->is_default = true;
    *out = *host_pool;
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    return location_pool(out, location, type, false);
}

EXPORT CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    return location_pool(out, location, type, true);
}

EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool)
{
    CHECKED;
    if (!location || type != MEM_ALLOCATION_PINNED || location->type != MEM_LOCATION_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    return cuDeviceSetMemPool(location->id, pool);
}
