/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Allocations of device, host and managed memory, and the memory that a pointer points to.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static size_t position(uint64_t address) /* index of the first allocation that begins after
                                          * `address` */
{
    size_t low = 0, high = driver.allocations;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (driver.allocation[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct allocation *allocation_find(uint64_t address)
{
    size_t i = position(address);
    if (!i)
        return NULL;
    struct allocation *a = &driver.allocation[i - 1];
    return address - a->address < a->size ? a : NULL;
}

struct allocation *allocation_add(const struct allocation *a)
{
    if (driver.allocations == driver.allocations_room) {
        size_t room = driver.allocations_room ? driver.allocations_room * 2 : 64;
        struct allocation *p = realloc(driver.allocation, room * sizeof *p);
        if (!p)
            return NULL;
        driver.allocation = p;
        driver.allocations_room = room;
    }
    size_t i = position(a->address);
    memmove(driver.allocation + i + 1, driver.allocation + i,
            (driver.allocations - i) * sizeof *a);
    driver.allocations++;
    driver.allocation[i] = *a;
    driver.allocation[i].id = ++driver.next_id;
    return &driver.allocation[i];
}

void allocation_remove(struct allocation *a)
{
    size_t i = (size_t)(a - driver.allocation);
    driver.allocations--;
    memmove(a, a + 1, (driver.allocations - i) * sizeof *a);
}

/* Allocates device memory in pages of 2 MiB, as the hardware does. Allocations below 1 MiB share
 * pages. The process is charged only for the size of such an allocation, rounded up to 512
 * bytes. */
CUresult device_allocate(int device, uint64_t size, bool charge, struct allocation *out)
{
    struct device *d = &driver.device[device];
    uint64_t unit = size >= MIB && charge ? GRANULE : 512;
    if (!size || size > machine->spec.memory)
        return size ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    uint64_t extent = round_up(size, unit);
    if (charge && !machine_charge(driver.slot, d->physical, extent))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t address = ranges_take(&d->free, extent, unit, 0);
    if (!address) {
        if (charge)
            machine_release(driver.slot, d->physical, extent);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (struct allocation){.address = address, .size = size, .extent = extent,
                               .charged = charge ? extent : 0, .kind = ALLOC_DEVICE, .device = device};
    return CUDA_SUCCESS;
}

void device_release(const struct allocation *a, bool charge)
{
    struct device *d = &driver.device[a->device];
    if (a->shared)
        shared_count(-1);
    arena_punch(a->device, a->address - d->window, a->extent);
    ranges_give(&d->free, a->address, a->extent);
    if (charge)
        machine_release(driver.slot, d->physical, a->charged);
}

CUresult resolve(uint64_t address, uint64_t size, void **host, int *device)
{
    if (device)
        *device = -1;
    *host = (void *)address;
    if (size > UINT64_MAX - address)
        return CUDA_ERROR_INVALID_VALUE;
    if (address < driver.base || address >= driver.base + driver.span)
        return address || !size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (address >= driver.vmm_window)
        return vmm_resolve(address, size, host, device);
    struct allocation *a = allocation_find(address);
    if (!a || size > a->size - (address - a->address))
        return CUDA_ERROR_INVALID_VALUE;
    *host = arena_host(address);
    if (device)
        *device = a->device;
    return CUDA_SUCCESS;
}

/* Counts live managed allocations. A process that has any cannot be checkpointed. */
void managed_count(int change)
{
    __atomic_add_fetch(&driver.slot->managed, (uint32_t)change, __ATOMIC_ACQ_REL);
}

void host_release(const struct allocation *a)
{
    if (a->kind == ALLOC_MANAGED)
        managed_count(-1);
    munmap((void *)a->address, a->extent);
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size)
{
    if (out)
        *out = 0; /* the driver also sets this if the call fails */
    GATED;
    struct context *c;
    struct allocation a;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    result = device_allocate(c->device, size, true, &a);
    if (!result) {
        a.context = c;
        if (allocation_add(&a)) {
            *out = a.address;
        } else {
            device_release(&a, true);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    CHECKED;
    if (!pitch || (element != 4 && element != 8 && element != 16) || !width || !height)
        return CUDA_ERROR_INVALID_VALUE;
    size_t size;
    *pitch = round_up(width, 512);
    if (*pitch < width || __builtin_mul_overflow(*pitch, height, &size))
        size = SIZE_MAX; /* more than any device has */
    return cuMemAlloc_v2(out, size);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address)
{
    GATED;
    if (!address)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&driver.lock);
    struct allocation *found = allocation_find(address);
    CUresult result = !found && vmm_import_close(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (found && found->address == address) {
        struct allocation a = *found;
        result = CUDA_SUCCESS;
        if (a.kind == ALLOC_DEVICE || a.kind == ALLOC_POOL || a.kind == ALLOC_MANAGED ||
            a.kind == ALLOC_GRAPH) {
            /* A free waits for the work that may still use the memory. */
            uint64_t tail = driver_tail(a.context);
            pthread_mutex_unlock(&driver.lock);
            sleep_until(tail);
            pthread_mutex_lock(&driver.lock);
            found = allocation_find(address);
            if (!found || found->id != a.id) {
                pthread_mutex_unlock(&driver.lock);
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        if (a.kind == ALLOC_DEVICE)
            device_release(&a, true);
        else if (a.kind == ALLOC_POOL)
            result = pool_free(found);
        else if (a.kind == ALLOC_MANAGED)
            host_release(&a);
        else if (a.kind == ALLOC_GRAPH)
            result = graph_memory_free(a.graph);
        else
            result = CUDA_ERROR_INVALID_VALUE;
        if (!result && a.kind != ALLOC_GRAPH)
            allocation_remove(found);
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* ---- host and managed memory: these pages are anonymous, and the host and the device use the same
 * address for them ---- */

static CUresult host_allocate(void **out, size_t size, unsigned flags, int kind)
{
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (!out || !size)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t extent = round_up(size, 4096);
    void *p = mmap(NULL, extent, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct allocation a = {.address = (uint64_t)p, .size = size, .extent = extent, .kind = kind,
                           .device = kind == ALLOC_MANAGED ? c->device : -1, .flags = flags, .context = c};
    pthread_mutex_lock(&driver.lock);
    if (!allocation_add(&a)) {
        munmap(p, extent);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        *out = p;
        if (kind == ALLOC_MANAGED)
            managed_count(1);
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemHostAlloc(void **out, size_t size, unsigned flags)
{
    GATED;
    return host_allocate(out, size, flags, ALLOC_HOST);
}

EXPORT CUresult cuMemAllocHost_v2(void **out, size_t size) { return cuMemHostAlloc(out, size, 0); }

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned flags)
{
    REQUIRE(flags == 1 || flags == 2);
    GATED;
    return host_allocate((void **)out, size, flags, ALLOC_MANAGED);
}

EXPORT CUresult cuMemFreeHost(void *p)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find((uint64_t)p);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (a && a->address == (uint64_t)p && a->kind == ALLOC_HOST) {
        munmap(p, a->extent);
        allocation_remove(a);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t size, unsigned flags)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (!p || !size)
        return CUDA_ERROR_INVALID_VALUE;
    struct allocation a = {.address = (uint64_t)p, .size = size, .extent = size,
                           .kind = ALLOC_REGISTERED, .device = -1, .flags = flags, .context = c};
    pthread_mutex_lock(&driver.lock);
    if (allocation_find(a.address) || allocation_find(a.address + size - 1))
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (!allocation_add(&a))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemHostUnregister(void *p)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find((uint64_t)p);
    bool ours = a && a->address == (uint64_t)p && a->kind == ALLOC_REGISTERED;
    if (ours)
        allocation_remove(a);
    pthread_mutex_unlock(&driver.lock);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *p, unsigned flags)
{
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find((uint64_t)p);
    bool host = a && (a->kind == ALLOC_HOST || a->kind == ALLOC_REGISTERED);
    pthread_mutex_unlock(&driver.lock);
    if (!out || flags || !host)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *p)
{
    REQUIRE(flags);
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find((uint64_t)p);
    bool host = a && a->kind == ALLOC_HOST;
    if (host)
        *flags = a->flags;
    pthread_mutex_unlock(&driver.lock);
    return host ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    GATED;
    struct context *c;
    CUresult result = context_current(&c);
    if (result)
        return result;
    if (free)
        *free = machine_free(driver.device[c->device].physical);
    if (total)
        *total = machine_capacity();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr p)
{
    if (!base && !size)
        return CUDA_SUCCESS; /* if the caller asks for no result, the driver checks nothing */
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct allocation *a = allocation_find(p);
    uint64_t start = a ? a->address : p, bytes = a ? a->size : vmm_mapped_bytes(p, &start);
    pthread_mutex_unlock(&driver.lock);
    if (!bytes)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = start;
    if (size)
        *size = bytes;
    return CUDA_SUCCESS;
}
