/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Moves the bytes of this process between its devices and its host memory.
 *
 * As with the real driver, the host copy is anonymous memory of the process itself. Bytes move in
 * pieces of 2 MiB. The old place of a piece is freed as soon as the piece is copied, so the host
 * never holds two copies of all bytes. Pages that were never touched are not copied.
 */
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct piece {
    void *host;
    uint64_t offset;
    uint32_t size;
    int32_t device;
};

static struct piece *pieces;
static size_t piece_count, piece_room;
static uint64_t owed[MAX_DEVICES]; /* [i]: bytes that visible device i was charged with before the
                                    * suspend */
static uint64_t kept[MAX_DEVICES]; /* [i]: the part of owed[i] that stays on the device */

/* Limits the copy to the machine's bandwidth: sleeps for the rest of the time that `bytes` need. */
static void pace(uint64_t start, uint64_t bytes, uint64_t bandwidth)
{
    if (bandwidth)
        sleep_until(start + (uint64_t)((unsigned __int128)bytes * 1000000000u / bandwidth));
}

static bool transfer(int fd, bool out, char *host, uint64_t size, uint64_t offset)
{
    while (size) {
        ssize_t n = out ? pread(fd, host, size, (off_t)offset) : pwrite(fd, host, size, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        host += n;
        size -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return true;
}

static bool piece_out(int device, uint64_t offset, uint32_t size)
{
    int fd = driver.device[device].fd;
    if (piece_count == piece_room) {
        size_t room = piece_room ? piece_room * 2 : 256;
        struct piece *p = realloc(pieces, room * sizeof *p);
        if (!p)
            return false;
        pieces = p;
        piece_room = room;
    }
    void *host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host == MAP_FAILED)
        return false;
    if (!transfer(fd, true, host, size, offset)) {
        munmap(host, size);
        return false;
    }
    fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, size);
    pieces[piece_count++] = (struct piece){host, offset, size, device};
    return true;
}

static bool piece_in(size_t i)
{
    struct piece *p = &pieces[i];
    if (!transfer(driver.device[p->device].fd, false, p->host, p->size, p->offset))
        return false;
    munmap(p->host, p->size);
    p->host = NULL;
    return true;
}

/* Moves all pieces back to the device. */
static bool all_in(bool paced, uint64_t *moved)
{
    uint64_t start = now_ns();
    uint64_t bandwidth = 0;
    int last = -1;
    bool good = true;
    *moved = 0;
    for (size_t i = 0; i < piece_count; i++) {
        if (!pieces[i].host)
            continue;
        good = piece_in(i) && good;
        *moved += pieces[i].size;
        if (paced) {
            if (pieces[i].device != last)
                bandwidth = copy_bandwidth(driver.device[last = pieces[i].device].physical,
                                           spec_rates(&machine->spec)->resume);
            pace(start + spec_rates(&machine->spec)->begin_resume, *moved, bandwidth);
        }
    }
    free(pieces);
    pieces = NULL;
    piece_count = piece_room = 0;
    return good;
}

static bool device_out(int device, uint64_t start, uint64_t *moved)
{
    int fd = driver.device[device].fd;
    uint64_t bandwidth = copy_bandwidth(driver.device[device].physical, spec_rates(&machine->spec)->suspend);
    for (off_t at = 0;;) {
        off_t data = lseek(fd, at, SEEK_DATA);
        if (data < 0)
            return errno == ENXIO; /* ENXIO: no more data */
        off_t hole = lseek(fd, data, SEEK_HOLE);
        for (at = data; at < hole;) {
            uint32_t size = (uint32_t)(hole - at < (off_t)GRANULE ? hole - at : (off_t)GRANULE);
            if (!piece_out(device, (uint64_t)at, size))
                return false;
            at += size;
            *moved += size;
            pace(start + spec_rates(&machine->spec)->begin_suspend, *moved, bandwidth);
        }
    }
}

CUresult suspend_out(void)
{
    struct fault fault;
    uint64_t moved = 0, start = now_ns();
    if (__atomic_load_n(&driver.slot->managed, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_SUPPORTED; /* managed memory: see plugins/cuda/README.md of CRIU */
    if (__atomic_load_n(&driver.slot->shared, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_SUPPORTED; /* exported or imported memory: see share.c */
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].charged && fault_active(FAULT_DEVICE_LOST, getpid(), (int)driver.device[i].physical, NULL))
            return CUDA_ERROR_LAUNCH_FAILED;
    bool empty = true; /* the process has no memory: a fault without a device hits it, too */
    for (int i = 0; i < driver.count; i++) {
        empty = empty && !driver.device[i].charged;
        if (driver.device[i].charged &&
            fault_hit(FAULT_CHECKPOINT_REFUSED, getpid(), (int)driver.device[i].physical, NULL, &fault))
            return fault.code ? (CUresult)fault.code : CUDA_ERROR_NOT_SUPPORTED;
    }
    if (empty && fault_hit(FAULT_CHECKPOINT_REFUSED, getpid(), NO_DEVICE, NULL, &fault))
        return fault.code ? (CUresult)fault.code : CUDA_ERROR_NOT_SUPPORTED;
    arena_poison(true);
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].fd >= 0 && !device_out(i, start, &moved)) {
            all_in(false, &moved); /* the host has no memory: undo everything */
            arena_poison(false);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    for (int i = 0; i < driver.count; i++) {
        bool keeps = fault_active(FAULT_SUSPEND_KEEPS, getpid(), (int)driver.device[i].physical, &fault);
        kept[i] = keeps ? fault.bytes : 0;
    }
    machine_lock();
    driver.slot->suspended_at = now_ns();
    for (int i = 0; i < driver.count; i++) {
        uint32_t physical = driver.device[i].physical;
        owed[i] = driver.slot->used[physical];
        if (kept[i] > owed[i])
            kept[i] = owed[i];
        machine->used[physical] -= owed[i] - kept[i];
        driver.slot->used[physical] = kept[i];
        driver.slot->had[physical] = owed[i];
    }
    driver.slot->suspended = moved;
    machine_unlock();
    return CUDA_SUCCESS;
}

/* Call this with the lock held. */
static void charge(uint32_t physical, int64_t bytes)
{
    driver.slot->used[physical] += (uint64_t)bytes;
    machine->used[physical] += (uint64_t)bytes;
}

/* Charges the owed bytes on the target devices. Returns false if a device has too little room. In
 * that case, if `nothing` is true, the charges stay as they are. If `nothing` is false, each device
 * is charged up to its free room. */
static bool charge_all(const uint32_t *target, bool nothing)
{
    bool fits = true;
    uint64_t capacity[MAX_DEVICES];
    for (int i = 0; i < driver.count; i++)
        capacity[i] = machine_capacity() - device_residue(target[i]);
    machine_reap();
    machine_lock();
    for (int i = 0; i < driver.count; i++)
        charge(driver.device[i].physical, -(int64_t)kept[i]);
    for (int i = 0; i < driver.count; i++)
        fits = fits && owed[i] + machine->used[target[i]] <= capacity[i];
    for (int i = 0; i < driver.count; i++) {
        uint64_t used = machine->used[target[i]], room = used < capacity[i] ? capacity[i] - used : 0;
        if (fits || !nothing)
            charge(target[i], (int64_t)(owed[i] < room ? owed[i] : room));
        else
            charge(driver.device[i].physical, (int64_t)kept[i]);
    }
    if (fits)
        driver.slot->suspended = 0;
    machine_unlock();
    return fits;
}

/* Undoes charge_all() after a restore that has failed. charge_all() has charged all owed bytes. */
static void uncharge_all(const uint32_t *target, uint64_t moved)
{
    machine_lock();
    for (int i = 0; i < driver.count; i++) {
        charge(target[i], -(int64_t)owed[i]);
        charge(driver.device[i].physical, (int64_t)kept[i]);
    }
    driver.slot->suspended = moved;
    machine_unlock();
}

/* Quirk restore-more: charges a restored process with extra bytes, if the device has room for
 * them. */
static void charge_more(void)
{
    struct fault fault;
    for (int i = 0; i < driver.count; i++) {
        unsigned physical = driver.device[i].physical;
        if (owed[i] && fault_hit(FAULT_RESTORE_MORE, getpid(), (int)physical, NULL, &fault))
            machine_charge(driver.slot, physical, fault.bytes);
    }
}

CUresult suspend_in(const uint8_t *map, unsigned pairs, bool *fatal)
{
    struct fault fault, mild;
    uint32_t target[MAX_DEVICES];
    uint64_t moved = driver.slot->suspended;
    bool moves = false, keeps = fault_active(FAULT_RESTORE_KEEPS_STATE, getpid(), -1, &mild);
    CUresult result = CUDA_SUCCESS;
    *fatal = !keeps;
    for (int i = 0; i < driver.count; i++) {
        target[i] = pairs ? map[driver.device[i].physical] : driver.device[i].physical;
        if (owed[i] && fault_active(FAULT_DEVICE_LOST, getpid(), (int)target[i], NULL))
            result = CUDA_ERROR_UNKNOWN;
        moves = moves || (owed[i] && target[i] != driver.device[i].physical);
    }
    if (moves && fault_hit(FAULT_MIGRATION_REFUSED, getpid(), -1, NULL, &fault)) {
        *fatal = false;
        return fault.code ? (CUresult)fault.code : CUDA_ERROR_NOT_SUPPORTED;
    }
    bool fits = charge_all(target, keeps), empty = true;
    for (int i = 0; i < driver.count && !result; i++) {
        empty = empty && !owed[i];
        if (owed[i] && fault_hit(FAULT_RESTORE_FAILED, getpid(), (int)target[i], NULL, &fault))
            result = fault.code ? (CUresult)fault.code : CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (empty && !result && fault_hit(FAULT_RESTORE_FAILED, getpid(), NO_DEVICE, NULL, &fault))
        result = fault.code ? (CUresult)fault.code : CUDA_ERROR_OPERATING_SYSTEM;
    if (!fits && !result)
        result = keeps ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    if (result && keeps) {
        if (fits)
            uncharge_all(target, moved);
        return mild.code ? (CUresult)mild.code : result;
    }
    for (int i = 0; i < driver.count; i++)
        driver.device[i].physical = target[i];
    if (result)
        return result;
    if (!all_in(true, &moved))
        return CUDA_ERROR_OPERATING_SYSTEM;
    arena_poison(false);
    memset(driver.slot->had, 0, sizeof driver.slot->had);
    charge_more();
    *fatal = false;
    return CUDA_SUCCESS;
}
