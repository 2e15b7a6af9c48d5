/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Virtual memory management. The guard counts the physical block of cuMemCreate. The block exists
 * until its last handle is released and its last mapping is removed, in either order. An imported
 * handle belongs to another process's block. If that process belongs to a session, it counts the
 * block. Otherwise no process counts the block.
 */
#include "counting.h"
#include "own.h"
#include "wraps.h"

struct vmm {
    uint32_t lock; /* protects the entries of a block, of its handles and of its mappings */
    uint64_t blocks;
};

static void *the_vmm;

static struct vmm *vmm(void) { return own_block(&the_vmm, sizeof(struct vmm)); }

static void put(const struct own *own)
{
    struct own stale;
    table_put(own, &stale); /* `stale` stays empty: only this file enters these kinds, and it first
                             * takes out the old entry */
}

/* Adds to a block's counts of handles and mappings; the caller holds the lock. If both counts are
 * zero afterwards, returns the block, and the caller must give its bytes back. Otherwise returns a
 * block with ordinal -1. */
static struct own change(uint64_t number, int handles, int maps)
{
    struct own block, nothing = {.ordinal = -1};
    if (!table_take(OWN_BLOCK, number, &block))
        return nothing;
    block.count += (uint32_t)handles;
    block.extra += (uint32_t)maps;
    if (!block.count && !block.extra)
        return block;
    put(&block);
    return nothing;
}

/* Changes the number of references to a handle; the caller holds the lock. */
static void references(uint64_t handle, uint64_t number, int more)
{
    struct own own;
    if (!table_take(OWN_HANDLE, handle, &own))
        own = (struct own){.key = handle, .owner = number, .kind = OWN_HANDLE};
    own.count += (uint32_t)more;
    if (own.count)
        put(&own);
}

CUresult wrap_cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                          unsigned long long flags)
{
    ENTER;
    struct here h = {.ordinal = -1};
    if (guard_page && guard_initialised() && prop && prop->location.type == MEM_LOCATION_DEVICE)
        h = here_of_device(prop->location.id);
    struct vmm *v = vmm();
    if (h.ordinal < 0 || !out || !bytes || !v)
        return REAL(cuMemCreate)(out, bytes, prop, flags);
    CUresult result = guard_charge(h.ordinal, bytes);
    if (result)
        return result;
    result = REAL(cuMemCreate)(out, bytes, prop, flags);
    if (result) {
        guard_credit(h.ordinal, bytes);
        return result;
    }
    own_lock(&v->lock);
    struct own stale, block = {.key = ++v->blocks, .bytes = bytes, .count = 1, .kind = OWN_BLOCK,
                               .ordinal = (int16_t)h.ordinal};
    bool entered = table_put(&block, &stale);
    if (entered)
        references(*out, block.key, 1);
    own_unlock(&v->lock);
    if (!entered) {
        REAL(cuMemRelease)(*out);
        guard_credit(h.ordinal, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Take the handle out of the table before the driver's call, because another thread may get the
 * same handle afterwards. */
CUresult wrap_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    ENTER_BACK(cuMemRelease, handle);
    struct vmm *v = table_seen(OWN_HANDLE) ? vmm() : NULL;
    struct own own = {.kind = 0}, block = {.ordinal = -1};
    if (v) {
        own_lock(&v->lock);
        if (table_get(OWN_HANDLE, handle, &own))
            references(handle, own.owner, -1);
        own_unlock(&v->lock);
    }
    CUresult result = REAL(cuMemRelease)(handle);
    if (own.kind) {
        own_lock(&v->lock);
        if (result)
            references(handle, own.owner, 1);
        else
            block = change(own.owner, -1, 0);
        own_unlock(&v->lock);
        guard_credit(block.ordinal, block.bytes);
    }
    return result;
}

CUresult wrap_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                       unsigned long long flags)
{
    ENTER;
    struct vmm *v = table_seen(OWN_HANDLE) ? vmm() : NULL;
    struct own own, map = {.kind = 0};
    if (v) {
        own_lock(&v->lock);
        if (table_get(OWN_HANDLE, handle, &own)) {
            map = (struct own){.key = address, .bytes = bytes, .owner = own.owner, .kind = OWN_MAP};
            change(own.owner, 0, 1); /* count the mapping before the driver makes it */
        }
        own_unlock(&v->lock);
    }
    CUresult result = REAL(cuMemMap)(address, bytes, offset, handle, flags);
    if (map.kind) {
        struct own block = {.ordinal = -1};
        own_lock(&v->lock);
        if (result)
            block = change(map.owner, 0, -1);
        else
            put(&map);
        own_unlock(&v->lock);
        guard_credit(block.ordinal, block.bytes);
    }
    return result;
}

/* One call may remove several adjacent mappings, but only whole mappings. */
CUresult wrap_cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    ENTER_BACK(cuMemUnmap, address, bytes);
    struct vmm *v = table_seen(OWN_MAP) ? vmm() : NULL;
    /* The address range stays reserved, so no other thread gets these addresses before this call ends. */
    CUresult result = REAL(cuMemUnmap)(address, bytes);
    for (uint64_t at = address; v && !result && at < address + bytes;) {
        struct own map, block = {.ordinal = -1};
        own_lock(&v->lock);
        bool ours = table_take(OWN_MAP, at, &map);
        if (ours)
            block = change(map.owner, 0, -1);
        own_unlock(&v->lock);
        guard_credit(block.ordinal, block.bytes);
        /* If the mapping is of an imported block, the table does not have it: try the next
         * granule. */
        at += ours && map.bytes ? map.bytes : 65536;
    }
    return result;
}

struct search {
    uint64_t address;
    uint64_t block;
};

static bool around(const struct own *own, void *with)
{
    struct search *s = with;
    if (own->kind == OWN_MAP && s->address - own->key < own->bytes)
        s->block = own->owner;
    return false;
}

static void never(const struct own *own, void *with)
{
    (void)own;
    (void)with;
}

/* The program gets one more handle to the block that is mapped at the address. The address need not
 * be the first of the mapping. */
CUresult wrap_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    ENTER;
    CUresult result = REAL(cuMemRetainAllocationHandle)(out, address);
    struct vmm *v = !result && table_seen(OWN_MAP) ? vmm() : NULL;
    struct search s = {.address = (uint64_t)address};
    struct own map;
    if (!v)
        return result;
    own_lock(&v->lock);
    if (table_get(OWN_MAP, s.address, &map))
        s.block = map.owner;
    else
        table_sweep(around, never, &s);
    if (s.block) {
        change(s.block, 1, 0);
        references(*out, s.block, 1);
    }
    own_unlock(&v->lock);
    return result;
}

/* The guard does not count an imported block, because the process that made the block counts it.
 * But a process may import a block that it has exported itself. The driver may then return the old
 * handle, and the program must release this handle once more. So count another reference. */
CUresult wrap_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, int type)
{
    ENTER;
    CUresult result = REAL(cuMemImportFromShareableHandle)(out, handle, type);
    struct vmm *v = !result && table_seen(OWN_HANDLE) ? vmm() : NULL;
    struct own own;
    if (!result)
        guard_pin(PIN_IPC);
    if (v) {
        own_lock(&v->lock);
        if (table_get(OWN_HANDLE, *out, &own)) {
            change(own.owner, 1, 0);
            references(*out, own.owner, 1);
        }
        own_unlock(&v->lock);
    }
    return result;
}
