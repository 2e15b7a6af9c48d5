/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The address space and the bytes of device memory; driver.h describes the layout.
 */
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GIB (1ull << 30)

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static bool insert_range(struct ranges *r, size_t at, uint64_t start, uint64_t size)
{
    if (r->count == r->room) {
        size_t room = r->room ? r->room * 2 : 16;
        struct range *item = realloc(r->item, room * sizeof *item);
        if (!item)
            return false;
        r->item = item;
        r->room = room;
    }
    memmove(r->item + at + 1, r->item + at, (r->count - at) * sizeof *r->item);
    r->item[at] = (struct range){start, size};
    r->count++;
    return true;
}

uint64_t ranges_take(struct ranges *r, uint64_t size, uint64_t align, uint64_t fixed)
{
    for (size_t i = 0; i < r->count; i++) {
        struct range *f = &r->item[i];
        uint64_t start = round_up(f->start, align), end = f->start + f->size;
        if (fixed && fixed >= f->start && fixed < end && fixed % align == 0)
            start = fixed;
        else if (fixed)
            continue;
        if (start + size > end || start + size < start)
            continue;
        uint64_t head = start - f->start, tail = end - start - size;
        if (head && tail) {
            f->size = head;
            if (!insert_range(r, i + 1, start + size, tail)) {
                f->size = end - f->start;
                return 0;
            }
        } else if (head) {
            f->size = head;
        } else if (tail) {
            *f = (struct range){start + size, tail};
        } else {
            memmove(f, f + 1, (r->count - i - 1) * sizeof *f);
            r->count--;
        }
        return start;
    }
    return 0;
}

bool ranges_give(struct ranges *r, uint64_t start, uint64_t size)
{
    size_t low = 0, high = r->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (r->item[middle].start < start)
            low = middle + 1;
        else
            high = middle;
    }
    bool before = low > 0 && r->item[low - 1].start + r->item[low - 1].size == start;
    bool after = low < r->count && start + size == r->item[low].start;
    if (before && after) {
        r->item[low - 1].size += size + r->item[low].size;
        memmove(r->item + low, r->item + low + 1, (r->count - low - 1) * sizeof *r->item);
        r->count--;
    } else if (before) {
        r->item[low - 1].size += size;
    } else if (after) {
        r->item[low].start = start;
        r->item[low].size += size;
    } else {
        return insert_range(r, low, start, size);
    }
    return true;
}

CUresult arena_init(void)
{
    uint64_t memory = machine->spec.memory;
    /* The factor is 4, to leave space for fragmentation. It is 1 if two halves with the factor 4
     * might not fit into the 47-bit address space. */
    uint64_t factor = memory * (uint64_t)driver.count > (1ull << 41) ? 1 : 4;
    uint64_t window = round_up(memory * factor + GIB, GIB);
    driver.vmm_size = round_up(memory * (uint64_t)driver.count * factor + 64 * GIB, GIB);
    driver.span = window * (uint64_t)driver.count + driver.vmm_size;
    char *area = mmap(NULL, driver.span * 2, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (area == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(area, driver.span * 2, MADV_DONTFORK);
    madvise(area, driver.span * 2, MADV_DONTDUMP);
    driver.base = round_up((uint64_t)area, GRANULE);
    driver.span -= GRANULE;
    driver.vmm_size -= GRANULE;
    driver.delta = driver.span;
    for (int i = 0; i < driver.count; i++) {
        struct device *d = &driver.device[i];
        d->window = driver.base + (uint64_t)i * window;
        d->window_size = window;
        d->next_physical = window;
        d->fd = -1;
        if (!ranges_give(&d->free, d->window, window))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    driver.vmm_window = driver.base + (uint64_t)driver.count * window;
    if (!ranges_give(&driver.vmm_free, driver.vmm_window, driver.vmm_size))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

CUresult arena_open_device(int device)
{
    struct device *d = &driver.device[device];
    if (d->fd >= 0)
        return CUDA_SUCCESS;
    int fd = memfd_create("emucuda-device", MFD_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    void *alias = arena_host(d->window);
    if (ftruncate(fd, (off_t)(1ull << 52)) ||
        mmap(alias, d->window_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
             fd, 0) == MAP_FAILED) {
        close(fd);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    madvise(alias, d->window_size, MADV_DONTFORK);
    madvise(alias, d->window_size, MADV_DONTDUMP);
    d->fd = fd;
    return CUDA_SUCCESS;
}

void *arena_host(uint64_t user_address) { return (void *)(user_address + driver.delta); }

/* Writes with pwrite() into the device's memfd. If the pages are new, a write through the mapping
 * causes a page fault for each page, and takes three times as long. */
bool arena_write(int device, uint64_t address, const char *from, uint64_t size, bool repeated)
{
    int fd = device >= 0 ? driver.device[device].fd : -1;
    if (fd < 0 || size < GRANULE || address < driver.base || address >= driver.vmm_window)
        return false;
    uint64_t offset = address - driver.device[device].window;
    while (size) {
        ssize_t n = pwrite(fd, from, repeated && size > ARENA_PIECE ? ARENA_PIECE : size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from += repeated ? 0 : n;
        offset += (uint64_t)n;
        size -= (uint64_t)n;
    }
    return true;
}

/* Frees the host memory of all whole pages in the range. A page that is only partly in the range
 * stays, because it may also have bytes of another allocation. */
void arena_punch(int device, uint64_t offset, uint64_t size)
{
    uint64_t page = 4096, start = round_up(offset, page), end = (offset + size) / page * page;
    if (end > start)
        fallocate(driver.device[device].fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)start,
                  (off_t)(end - start));
}

void arena_poison(bool poisoned)
{
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].fd >= 0)
            mprotect(arena_host(driver.device[i].window), driver.device[i].window_size,
                     poisoned ? PROT_NONE : PROT_READ | PROT_WRITE);
    vmm_poison(poisoned);
}

CUresult arena_vmm_map(uint64_t address, uint64_t size, int fd, uint64_t offset)
{
    void *alias = arena_host(address);
    if (mmap(alias, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
             (off_t)offset) == MAP_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM;
    madvise(alias, size, MADV_DONTFORK);
    madvise(alias, size, MADV_DONTDUMP);
    return CUDA_SUCCESS;
}

void arena_vmm_unmap(uint64_t address, uint64_t size)
{
    void *alias = arena_host(address);
    if (mmap(alias, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) !=
        MAP_FAILED)
        madvise(alias, size, MADV_DONTFORK);
}
