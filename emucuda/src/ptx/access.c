/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Finds the bytes of an address: in memory that the driver knows, or in a window of the launch,
 * such as its shared memory.
 */
#include "ptx.h"

/* Finds the mapping or the allocation that contains the address. Returns false if there is none. */
static bool look_up(uint64_t address, struct range_of_memory *out)
{
    bool found = false;
    pthread_mutex_lock(&driver.lock);
    uint64_t start, size;
    if (address >= driver.vmm_window && address < driver.base + driver.span) {
        void *host;
        size = vmm_mapped_bytes(address, &start);
        found = size && !vmm_resolve(address, 1, &host, NULL);
        if (found)
            *out = (struct range_of_memory){start, size, driver.delta};
    } else {
        const struct allocation *a = allocation_find(address);
        bool on_device = address >= driver.base && address < driver.base + driver.span;
        found = a;
        if (found)
            *out = (struct range_of_memory){a->address, a->size, on_device ? driver.delta : 0};
    }
    pthread_mutex_unlock(&driver.lock);
    return found;
}

static void *in_memory(struct warp *w, uint64_t address, unsigned size)
{
    struct run *run = w->block->run;
    for (unsigned n = 0; n < sizeof run->known / sizeof *run->known; n++) {
        const struct range_of_memory *r = &run->known[n];
        if (address - r->start < r->size && size <= r->size - (address - r->start)) {
            run->bytes += size;
            return (void *)(address + r->delta);
        }
    }
    struct range_of_memory found;
    if (!look_up(address, &found) || size > found.size - (address - found.start))
        return NULL;
    run->known[run->next_known++ % (sizeof run->known / sizeof *run->known)] = found;
    run->bytes += size;
    return (void *)(address + found.delta);
}

void *bytes_of(struct warp *w, unsigned lane, uint64_t address, unsigned size, int mode)
{
    struct run *run = w->block->run;
    uint64_t at = address & (SHARED_WINDOW - 1);
    void *found = NULL;
    if (address % size)
        fail(w, CUDA_ERROR_MISALIGNED_ADDRESS, "the address %#llx is not a multiple of %u",
             (unsigned long long)address, size);
    switch (address >> 48) {
    case 0: found = in_memory(w, address, size); break;
    case SHARED_WINDOW >> 48:
        if (at + size <= run->shared_size)
            found = w->block->shared + at;
        break;
    case LOCAL_WINDOW >> 48:
        if (at + size <= run->code->local)
            found = w->local + (size_t)lane * run->code->local + at;
        break;
    case PARAM_WINDOW >> 48:
        if (at + size <= run->params_size && mode == READ)
            found = (uint8_t *)run->params + at;
        break;
    default: break;
    }
    if (!found)
        fail(w, CUDA_ERROR_ILLEGAL_ADDRESS, "%u bytes at %#llx are not memory that it can %s", size,
             (unsigned long long)address, mode == READ ? "read" : "write");
    return found;
}
