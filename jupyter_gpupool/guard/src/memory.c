/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Plain device memory, managed memory, and the calls that free memory by its address.
 */
#include "counting.h"
#include "wraps.h"

#define MIB (1ull << 20)
#define PAGE (2 * MIB)

/* Bytes of the device that an allocation takes; UINT64_MAX if the sum overflows. The driver
 * allocates device pages of 2 MiB, and allocations below 1 MiB share these pages. */
static uint64_t extent(uint64_t bytes)
{
    uint64_t unit = bytes >= MIB ? PAGE : 512, up;
    return __builtin_add_overflow(bytes, unit - 1, &up) ? UINT64_MAX : up / unit * unit;
}

/* ---- common steps of all wrappers */

void settle_stale(const struct own *own)
{
    if (own->kind == OWN_POOLED)
        pool_freed(own);
    else if (own->kind == OWN_CAPTURE)
        capture_over(own);
    else if (own->kind == OWN_REGISTERED)
        registered_over(own);
    else if (own->kind == OWN_DEVICE || own->kind == OWN_MANAGED || own->kind == OWN_ARRAY)
        guard_credit(own->ordinal, own->bytes);
}

CUresult keep(CUresult result, const struct own *own, CUresult (*undo)(CUdeviceptr key))
{
    struct own stale;
    if (!result && !table_put(own, &stale)) {
        undo(own->key);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (!result) {
        settle_stale(&stale);
    }
    if (result)
        guard_credit(own->ordinal, own->bytes);
    return result;
}

CUresult wrap_cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    ENTER;
    struct here h = here_now();
    if (h.ordinal < 0 || !out || !bytes)
        return REAL(cuMemAlloc_v2)(out, bytes);
    current_seen(h.context);
    struct own own = {.bytes = extent(bytes), .owner = h.number,
                      .kind = OWN_DEVICE, .ordinal = (int16_t)h.ordinal};
    CUresult result = guard_charge(h.ordinal, own.bytes);
    if (result)
        return result;
    result = REAL(cuMemAlloc_v2)(out, bytes);
    if (!result)
        own.key = *out;
    return keep(result, &own, REAL(cuMemFree_v2));
}

/* The driver chooses the pitch (the bytes from one row to the next): the width rounded up to the
 * alignment of rows, or more. The guard learns the pitch only after the call. It then charges the
 * bytes beyond its estimate. If these bytes do not fit in the grant, it undoes the allocation. */
CUresult wrap_cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    ENTER;
    struct here h = here_now();
    uint64_t least;
    if (h.ordinal < 0 || !out || !pitch || !width || !height)
        return REAL(cuMemAllocPitch_v2)(out, pitch, width, height, element);
    if (__builtin_mul_overflow((uint64_t)width, (uint64_t)height, &least))
        least = UINT64_MAX;
    struct own own = {.bytes = extent(least), .owner = h.number,
                      .kind = OWN_DEVICE, .ordinal = (int16_t)h.ordinal};
    CUresult result = guard_charge(h.ordinal, own.bytes);
    if (result)
        return result;
    result = REAL(cuMemAllocPitch_v2)(out, pitch, width, height, element);
    if (!result) {
        own.key = *out;
        uint64_t truth = extent((uint64_t)*pitch * height);
        if (truth > own.bytes) {
            result = guard_charge(h.ordinal, truth - own.bytes);
            if (result)
                REAL(cuMemFree_v2)(own.key);
            else
                own.bytes = truth;
        }
    }
    return keep(result, &own, REAL(cuMemFree_v2));
}

/* The driver cannot suspend managed memory, because it moves such memory itself. If the policy
 * forbids managed memory, the guard refuses the call. If the policy allows it, the guard counts the
 * bytes as device memory, and the driver cannot suspend the session any more. */
CUresult wrap_cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    ENTER;
    if (!guard_page)
        return REAL(cuMemAllocManaged)(out, bytes, flags);
    struct here h = here_now(); /* call this before managed_allowed(), because it may find a context
                                 * that was made without the guard */
    if (!managed_allowed())
        return CUDA_ERROR_NOT_SUPPORTED;
    if (h.ordinal < 0 || !out || !bytes)
        return REAL(cuMemAllocManaged)(out, bytes, flags);
    struct own own = {.bytes = extent(bytes), .owner = h.number,
                      .kind = OWN_MANAGED, .ordinal = (int16_t)h.ordinal};
    CUresult result = guard_charge(h.ordinal, own.bytes);
    if (result)
        return result;
    result = REAL(cuMemAllocManaged)(out, bytes, flags);
    if (!result) {
        guard_pin(PIN_MANAGED);
        own.key = *out;
    }
    return keep(result, &own, REAL(cuMemFree_v2));
}

/* ---- frees: if an address is not in the table, the guard passes the call on and counts nothing */

static bool take_address(uint64_t address, struct own *own)
{
    return table_take(OWN_DEVICE, address, own) ||
           (table_seen(OWN_POOLED) && table_take(OWN_POOLED, address, own)) ||
           (table_seen(OWN_MANAGED) && table_take(OWN_MANAGED, address, own));
}

/* The same as take_address, for a stream-ordered free. The memory usually comes from a
 * stream-ordered allocation, so look for an entry of kind OWN_POOLED first. */
static bool take_ordered(uint64_t address, struct own *own)
{
    return (table_seen(OWN_POOLED) && table_take(OWN_POOLED, address, own)) || take_address(address, own);
}

static CUresult freed(CUresult result, const struct own *own)
{
    struct own stale;
    if (!result)
        settle_stale(own);
    else if (table_put(own, &stale)) /* the driver has not freed the allocation */
        settle_stale(&stale);
    return result;
}

CUresult wrap_cuMemFree_v2(CUdeviceptr address)
{
    ENTER_BACK(cuMemFree_v2, address);
    struct own own;
    bool ours = guard_page && take_address(address, &own);
    CUresult result = REAL(cuMemFree_v2)(address);
    return ours ? freed(result, &own) : result;
}

CUresult wrap_cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    ENTER_BACK(cuMemFreeAsync, address, (uint64_t)stream);
    struct own own;
    bool ours = guard_page && take_ordered(address, &own);
    CUresult result = REAL(cuMemFreeAsync)(address, stream);
    return ours ? freed(result, &own) : result;
}

CUresult wrap_cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    ENTER_BACK(cuMemFreeAsync_ptsz, address, (uint64_t)stream);
    struct own own;
    bool ours = guard_page && take_ordered(address, &own);
    CUresult result = REAL(cuMemFreeAsync_ptsz)(address, stream);
    return ours ? freed(result, &own) : result;
}
