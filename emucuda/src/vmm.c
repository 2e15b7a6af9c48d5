/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Virtual memory management: address ranges, physical memory, and the mappings of memory into
 * ranges.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Physical memory of a device. A CUmemGenericAllocationHandle is the address of this struct. */
struct physical {
    int device;
    uint64_t offset; /* place in the memfd of the device */
    uint64_t size;
    unsigned references; /* number of handles and mappings together */
    unsigned owners;     /* number of handles that the program must still release */
    int foreign;         /* the memfd of the exporting process; -1: the memory is this process's
                          * own */
    bool shared;         /* the memory is exported */
    CUmemAllocationProp prop;
    struct physical *next;
};

struct map {
    uint64_t address, size;
    struct physical *physical;
    bool accessible;
    uint64_t imported; /* not 0: the address that vmm_import() returned; that call imported and
                        * mapped the memory */
    unsigned opens;    /* number of imports that the program must still close */
    struct context *context; /* of an import that ends with a context */
    struct share from;       /* what was imported */
    struct map *next;
};

struct reservation {
    uint64_t address, size;
    struct reservation *next;
};

static struct physical *physicals;
static struct map *maps; /* driver.lock protects these three lists */
static struct reservation *reservations;

static struct physical *physical_find(uint64_t handle)
{
    for (struct physical *p = physicals; p; p = p->next)
        if ((uint64_t)p == handle)
            return p;
    return NULL;
}

static int physical_fd(const struct physical *p)
{
    return p->foreign >= 0 ? p->foreign : driver.device[p->device].fd;
}

static void physical_drop(struct physical *p)
{
    if (--p->references)
        return;
    if (p->foreign >= 0) {
        close(p->foreign);
    } else {
        arena_punch(p->device, p->offset, p->size);
        machine_release(driver.slot, driver.device[p->device].physical, p->size);
    }
    if (p->shared || p->foreign >= 0)
        shared_count(-1);
    for (struct physical **link = &physicals; *link; link = &(*link)->next)
        if (*link == p) {
            *link = p->next;
            break;
        }
    free(p);
}

static struct map *map_at(uint64_t address)
{
    for (struct map *m = maps; m; m = m->next)
        if (address - m->address < m->size)
            return m;
    return NULL;
}

uint64_t vmm_mapped_bytes(uint64_t address, uint64_t *start)
{
    struct map *m = map_at(address);
    if (!m)
        return 0;
    *start = m->address;
    return m->size;
}

CUresult vmm_resolve(uint64_t address, uint64_t size, void **host, int *device)
{
    /* A copy may go across neighbouring mappings. */
    for (uint64_t at = address; at < address + size || at == address;) {
        struct map *m = map_at(at);
        if (!m || !m->accessible)
            return CUDA_ERROR_INVALID_VALUE;
        if (device)
            *device = m->physical->device;
        at = m->address + m->size;
    }
    *host = arena_host(address);
    return CUDA_SUCCESS;
}

void vmm_poison(bool poisoned)
{
    for (struct map *m = maps; m; m = m->next)
        mprotect(arena_host(m->address), m->size, poisoned ? PROT_NONE : PROT_READ | PROT_WRITE);
}

static CUresult check_prop(const CUmemAllocationProp *prop)
{
    if (!prop || prop->type != MEM_ALLOCATION_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != MEM_LOCATION_DEVICE)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->location.id < 0 || prop->location.id >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option)
{
    CHECKED;
    CUresult result = check_prop(prop);
    if (result || !out || option < 0 || option > 1)
        return result ? result : CUDA_ERROR_INVALID_VALUE;
    *out = GRANULE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t align, CUdeviceptr hint, unsigned long long flags)
{
    GATED;
    if (!out || !size || size % GRANULE || flags || (align & (align - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    struct reservation *r = malloc(sizeof *r);
    if (!r)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (align < GRANULE)
        align = GRANULE;
    pthread_mutex_lock(&driver.lock);
    uint64_t address = hint ? ranges_take(&driver.vmm_free, size, align, hint) : 0;
    if (!address)
        address = ranges_take(&driver.vmm_free, size, align, 0);
    if (address) {
        *r = (struct reservation){address, size, reservations};
        reservations = r;
        *out = address;
    }
    pthread_mutex_unlock(&driver.lock);
    if (!address)
        free(r);
    return address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    GATED;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    bool mapped = false;
    for (struct map *m = maps; m; m = m->next)
        mapped = mapped || (m->address < address + size && address < m->address + m->size);
    for (struct reservation **link = &reservations; *link && !mapped; link = &(*link)->next)
        if ((*link)->address == address && (*link)->size == size) {
            struct reservation *r = *link;
            *link = r->next;
            free(r);
            ranges_give(&driver.vmm_free, address, size);
            result = CUDA_SUCCESS;
            break;
        }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop,
                            unsigned long long flags)
{
    GATED;
    CUresult result = check_prop(prop);
    if (result)
        return result;
    if (!out || !size || size % GRANULE || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes & ~HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct physical *p = calloc(1, sizeof *p);
    if (!p)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct device *d = &driver.device[prop->location.id];
    pthread_mutex_lock(&driver.lock);
    result = arena_open_device(prop->location.id);
    if (!result && !machine_charge(driver.slot, d->physical, size))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) {
        *p = (struct physical){.device = prop->location.id, .offset = d->next_physical, .size = size,
                               .references = 1, .owners = 1, .foreign = -1, .prop = *prop,
                               .next = physicals};
        d->next_physical += size;
        physicals = p;
        *out = (uint64_t)p;
    }
    pthread_mutex_unlock(&driver.lock);
    if (result)
        free(p);
    return result;
}

EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    GATED;
    pthread_mutex_lock(&driver.lock);
    struct physical *p = physical_find(handle);
    bool valid = p && p->owners;
    if (valid) {
        p->owners--;
        physical_drop(p);
    }
    pthread_mutex_unlock(&driver.lock);
    return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool reserved(uint64_t address, uint64_t size)
{
    for (struct reservation *r = reservations; r; r = r->next)
        if (address >= r->address && size <= r->size && address - r->address <= r->size - size)
            return true;
    return false;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags)
{
    GATED;
    if (!size || size % GRANULE || address % GRANULE || offset || flags)
        return CUDA_ERROR_INVALID_VALUE;
    struct map *m = calloc(1, sizeof *m);
    if (!m)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&driver.lock);
    struct physical *p = physical_find(handle);
    CUresult result = CUDA_SUCCESS;
    if (!p || size > p->size || !reserved(address, size))
        result = CUDA_ERROR_INVALID_VALUE;
    for (struct map *o = maps; o && !result; o = o->next)
        if (o->address < address + size && address < o->address + o->size)
            result = CUDA_ERROR_INVALID_VALUE;
    if (!result)
        result = arena_vmm_map(address, size, physical_fd(p), p->offset);
    if (!result) {
        *m = (struct map){.address = address, .size = size, .physical = p, .next = maps};
        maps = m;
        p->references++;
    }
    pthread_mutex_unlock(&driver.lock);
    if (result)
        free(m);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    GATED;
    uint64_t covered = 0;
    pthread_mutex_lock(&driver.lock);
    for (struct map *m = maps; m; m = m->next)
        if (m->address >= address && m->address + m->size <= address + size)
            covered += m->size;
    bool whole = covered == size && size;
    for (struct map **link = &maps; *link && whole;) {
        struct map *m = *link;
        if (m->address >= address && m->address + m->size <= address + size) {
            *link = m->next;
            arena_vmm_unmap(m->address, m->size);
            physical_drop(m->physical);
            free(m);
        } else {
            link = &m->next;
        }
    }
    pthread_mutex_unlock(&driver.lock);
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    GATED;
    if (!desc || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (desc[i].location.type == MEM_LOCATION_DEVICE &&
            (desc[i].location.id < 0 || desc[i].location.id >= driver.count))
            return CUDA_ERROR_INVALID_DEVICE;
    uint64_t covered = 0;
    pthread_mutex_lock(&driver.lock);
    for (struct map *m = maps; m; m = m->next)
        if (m->address >= address && m->address + m->size <= address + size)
            covered += m->size;
    for (struct map *m = maps; m && covered == size; m = m->next)
        if (m->address >= address && m->address + m->size <= address + size)
            m->accessible = desc[0].flags != 0;
    pthread_mutex_unlock(&driver.lock);
    return covered == size && size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct map *m = map_at(address);
    if (m && flags)
        *flags = m->accessible ? 3 : 0;
    pthread_mutex_unlock(&driver.lock);
    return m && flags && location ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct physical *p = physical_find(handle);
    if (p && prop)
        *prop = p->prop;
    pthread_mutex_unlock(&driver.lock);
    return p && prop ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    CHECKED;
    pthread_mutex_lock(&driver.lock);
    struct map *m = map_at((uint64_t)address);
    if (m && out) {
        m->physical->references++;
        m->physical->owners++;
        *out = (uint64_t)m->physical;
    }
    pthread_mutex_unlock(&driver.lock);
    return m && out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- memory that other processes see ---- */

static struct physical *physical_import(const struct share *share, const CUmemAllocationProp *prop)
{
    struct physical *p = calloc(1, sizeof *p);
    int fd = share_open(share);
    if (!p || fd < 0) {
        free(p);
        if (fd >= 0)
            close(fd);
        return NULL;
    }
    *p = (struct physical){.device = share->device, .offset = share->offset, .size = share->size,
                           .references = 1, .foreign = fd, .prop = *prop, .next = physicals};
    physicals = p;
    shared_count(1);
    return p;
}

static CUmemAllocationProp prop_of(int device)
{
    return (CUmemAllocationProp){.type = MEM_ALLOCATION_PINNED, .requestedHandleTypes = HANDLE_TYPE_FD,
                                 .location = {MEM_LOCATION_DEVICE, device}};
}

static bool same_memory(const struct share *a, const struct share *b)
{
    return a->pid == b->pid && a->start == b->start && a->fd == b->fd && a->offset == b->offset && a->size == b->size;
}

/* Maps all pages that contain the shared memory. `*out` is the address of the shared memory, which
 * may begin inside the first page. */
CUresult vmm_import(const struct share *share, struct context *context, CUdeviceptr *out)
{
    for (struct map *m = maps; m && context; m = m->next)
        if (m->context == context && same_memory(&m->from, share)) {
            m->opens++;
            *out = m->imported;
            return CUDA_SUCCESS;
        }
    struct share pages = *share;
    uint64_t head = share->offset % 4096;
    CUmemAllocationProp prop = prop_of(share->device);
    pages.offset -= head;
    pages.size = (share->size + head + 4095) / 4096 * 4096;
    struct map *m = calloc(1, sizeof *m);
    struct physical *p = m ? physical_import(&pages, &prop) : NULL;
    uint64_t room = (pages.size + GRANULE - 1) / GRANULE * GRANULE;
    uint64_t address = p ? ranges_take(&driver.vmm_free, room, GRANULE, 0) : 0;
    CUresult result = address ? arena_vmm_map(address, pages.size, p->foreign, pages.offset) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result) {
        if (address)
            ranges_give(&driver.vmm_free, address, room);
        if (p)
            physical_drop(p);
        free(m);
        return result;
    }
    *m = (struct map){.address = address, .size = pages.size, .physical = p, .accessible = true,
                      .imported = address + head, .opens = 1, .context = context, .from = *share, .next = maps};
    maps = m;
    *out = m->imported;
    return CUDA_SUCCESS;
}

static void import_end(struct map **link)
{
    struct map *m = *link;
    *link = m->next;
    arena_vmm_unmap(m->address, m->size);
    ranges_give(&driver.vmm_free, m->address, (m->size + GRANULE - 1) / GRANULE * GRANULE);
    physical_drop(m->physical);
    free(m);
}

bool vmm_import_close(uint64_t address)
{
    for (struct map **link = &maps; *link && address; link = &(*link)->next)
        if ((*link)->imported == address) {
            if (!--(*link)->opens)
                import_end(link);
            return true;
        }
    return false;
}

void vmm_imports_end(const struct context *c)
{
    for (struct map **link = &maps; *link;)
        if ((*link)->context == c)
            import_end(link);
        else
            link = &(*link)->next;
}

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type,
                                             unsigned long long flags)
{
    GATED;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (type != HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&driver.lock);
    struct physical *p = physical_find(handle);
    if (p && out && !flags && p->foreign < 0 && p->prop.requestedHandleTypes & type)
        result = share_file(out, SHARE_VMM, p->device, p->offset, p->size);
    if (!result && !p->shared) {
        p->shared = true;
        shared_count(1);
    }
    pthread_mutex_unlock(&driver.lock);
    return result;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *fd, int type)
{
    GATED;
    struct share share;
    if (type != HANDLE_TYPE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult result = out ? share_read((int)(intptr_t)fd, SHARE_VMM, &share) : CUDA_ERROR_INVALID_VALUE;
    if (result)
        return result;
    CUmemAllocationProp prop = prop_of(share.device);
    struct physical *p = NULL;
    pthread_mutex_lock(&driver.lock);
    if (share.own) {
        for (p = physicals; p; p = p->next)
            if (p->foreign < 0 && p->device == share.device && p->offset == share.offset)
                break;
        if (p)
            p->references++;
    } else {
        p = physical_import(&share, &prop);
    }
    if (p) {
        p->owners++;
        *out = (uint64_t)p;
    }
    pthread_mutex_unlock(&driver.lock);
    return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
