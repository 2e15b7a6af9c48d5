/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Queries about the memory that a pointer points to.
 */
#include "driver.h"

#include <string.h>

enum {
    ATTR_CONTEXT = 1, ATTR_MEMORY_TYPE, ATTR_DEVICE_POINTER, ATTR_HOST_POINTER, ATTR_P2P_TOKENS,
    ATTR_SYNC_MEMOPS, ATTR_BUFFER_ID, ATTR_IS_MANAGED, ATTR_DEVICE_ORDINAL, ATTR_LEGACY_IPC,
    ATTR_RANGE_START, ATTR_RANGE_SIZE, ATTR_MAPPED, ATTR_HANDLE_TYPES, ATTR_RDMA, ATTR_ACCESS_FLAGS,
    ATTR_MEMPOOL_HANDLE, ATTR_MAPPING_SIZE, ATTR_MAPPING_BASE, ATTR_BLOCK_ID, ATTR_HW_DECOMPRESS,
};

/* Copies the allocation that contains the address to `out`. A VMM mapping has no entry in the table
 * of allocations, so this function fills `out` from the mapping. Returns false if the address is
 * unknown. */
static bool describe(uint64_t address, struct allocation *out)
{
    struct allocation *a = allocation_find(address);
    if (a) {
        *out = *a;
        return true;
    }
    uint64_t start = 0, size = vmm_mapped_bytes(address, &start);
    void *host;
    if (!size)
        return false;
    *out = (struct allocation){.address = start, .size = size, .kind = ALLOC_VMM, .device = 0};
    (void)vmm_resolve(address, 1, &host, &out->device);
    return true;
}

static bool is_managed(const struct allocation *a)
{
    return a->kind == ALLOC_MANAGED ||
           (a->kind == ALLOC_POOL && a->pool->props.allocType == MEM_ALLOCATION_MANAGED);
}

static CUresult attribute(void *data, int which, uint64_t address, const struct allocation *a)
{
    bool host = a->device < 0 && !is_managed(a);
    switch (which) {
    case ATTR_CONTEXT: *(void **)data = a->context; break;
    case ATTR_MEMORY_TYPE: *(unsigned *)data = host ? MEMORYTYPE_HOST : MEMORYTYPE_DEVICE; break;
    case ATTR_DEVICE_POINTER: *(uint64_t *)data = address; break;
    case ATTR_HOST_POINTER:
        if (!host && !is_managed(a))
            return CUDA_ERROR_INVALID_VALUE;
        *(uint64_t *)data = address;
        break;
    case ATTR_SYNC_MEMOPS: *(unsigned *)data = 0; break;
    case ATTR_BUFFER_ID: *(uint64_t *)data = a->id; break;
    case ATTR_IS_MANAGED: *(unsigned *)data = is_managed(a); break;
    case ATTR_DEVICE_ORDINAL:
        *(int *)data = a->device >= 0 ? a->device : a->context ? a->context->device : 0;
        break;
    case ATTR_LEGACY_IPC: *(unsigned char *)data = a->kind == ALLOC_DEVICE; break;
    case ATTR_RANGE_START: *(uint64_t *)data = a->address; break;
    case ATTR_RANGE_SIZE: *(size_t *)data = a->size; break;
    case ATTR_MAPPED: *(unsigned char *)data = 1; break;
    case ATTR_HANDLE_TYPES: *(uint64_t *)data = 0; break;
    case ATTR_RDMA: *(unsigned char *)data = 0; break;
    case ATTR_ACCESS_FLAGS: *(unsigned *)data = 3; break;
    case ATTR_MEMPOOL_HANDLE: *(void **)data = a->kind == ALLOC_POOL ? a->pool : NULL; break;
    case ATTR_MAPPING_SIZE: *(size_t *)data = a->size; break;
    case ATTR_MAPPING_BASE: *(uint64_t *)data = a->address; break;
    case ATTR_BLOCK_ID: *(uint64_t *)data = a->id; break;
    case ATTR_HW_DECOMPRESS: *(unsigned char *)data = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, int which, CUdeviceptr address)
{
    CHECKED;
    struct allocation a;
    if (!data)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = describe(address, &a) ? attribute(data, which, address, &a) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&driver.lock);
    return result;
}

/* Returns success and zeros for an unknown pointer, because programs use this call to find out
 * whether a pointer is CUDA memory. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, int *which, void **data, CUdeviceptr address)
{
    CHECKED;
    struct allocation a;
    if (!which || !data)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    bool known = describe(address, &a);
    for (unsigned i = 0; i < count; i++) {
        if (known && !attribute(data[i], which[i], address, &a))
            continue;
        switch (which[i]) {
        case ATTR_LEGACY_IPC: case ATTR_MAPPED: case ATTR_RDMA: case ATTR_HW_DECOMPRESS:
            *(unsigned char *)data[i] = 0;
            break;
        case ATTR_MEMORY_TYPE: case ATTR_IS_MANAGED: case ATTR_SYNC_MEMOPS: case ATTR_ACCESS_FLAGS:
            *(unsigned *)data[i] = 0;
            break;
        case ATTR_DEVICE_ORDINAL:
            *(int *)data[i] = -2;
            break;
        case ATTR_P2P_TOKENS:
            memset(data[i], 0, 16);
            break;
        default:
            *(uint64_t *)data[i] = 0;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, int which, CUdeviceptr address)
{
    CHECKED;
    struct allocation a;
    if (!value || which != ATTR_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    bool known = describe(address, &a);
    pthread_mutex_unlock(&driver.lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
