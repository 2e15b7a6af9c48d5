/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The processes that use the machine, and the bytes that each process is charged.
 */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

uint64_t process_start(pid_t pid)
{
    char path[32], buffer[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, buffer, sizeof buffer - 1);
    close(fd);
    if (n <= 0)
        return 0;
    buffer[n] = 0;
    char *p = strrchr(buffer, ')'); /* the process's name may contain anything, even parentheses */
    if (!p)
        return 0;
    char state = 0;
    long threads = 0;
    unsigned long long start = 0;
    if (sscanf(p + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
               &state, &threads, &start) != 3)
        return 0;
    /* A zombie has freed its device memory, and counts as dead. One kind of zombie is still alive:
     * its first thread has ended, but other threads run. */
    if ((state == 'Z' || state == 'X') && threads <= 1)
        return 0;
    return start ? start : 1;
}

static bool is_near(const struct slot *slot) { return slot->space == machine_space(); }

pid_t slot_number(const struct slot *slot)
{
    pid_t pid = __atomic_load_n(&slot->pid, __ATOMIC_ACQUIRE);
    if (!pid || is_near(slot))
        return pid;
    pid = machine_holder((unsigned)(slot - machine->slot));
    return pid > 0 ? pid : 0;
}

bool slot_alive(const struct slot *slot)
{
    if (!is_near(slot))
        return machine_holder((unsigned)(slot - machine->slot)) >= 0;
    if (process_start(slot->pid) != slot->start)
        return false;
    /* After an execve() the process has the same pid and start time, but it has lost the service
     * thread and the device memory. So check that the service thread exists. */
    int tid = slot->service_tid;
    return !tid || !syscall(SYS_tgkill, slot->pid, tid, 0) || errno != ESRCH;
}

/* Computes `machine->used` again from the slots. If a process dies while it holds the lock, the
 * sums may be half updated, but the slots are right. */
static void recount(void)
{
    memset(machine->used, 0, sizeof machine->used);
    for (unsigned i = 0; i < machine->slots; i++)
        for (unsigned d = 0; machine->slot[i].pid && d < machine->spec.count; d++)
            machine->used[d] += machine->slot[i].used[d];
}

void machine_lock(void)
{
    if (pthread_mutex_lock(&machine->lock) == EOWNERDEAD) {
        recount();
        pthread_mutex_consistent(&machine->lock);
    }
}

void machine_unlock(void) { pthread_mutex_unlock(&machine->lock); }

static void free_slot(struct slot *slot)
{
    for (unsigned d = 0; d < machine->spec.count; d++) {
        machine->used[d] -= slot->used[d];
        slot->used[d] = 0;
    }
    __atomic_store_n(&slot->pid, 0, __ATOMIC_RELEASE);
}

/* Frees the slot of a dead process. Reads /proc without the lock, because a signal may stop this
 * process during the read. If it then held the lock, all other processes would wait. */
static void reap_slot(struct slot *slot)
{
    int32_t pid = __atomic_load_n(&slot->pid, __ATOMIC_ACQUIRE);
    uint64_t start = slot->start;
    if (!pid || slot_alive(slot))
        return;
    machine_lock();
    if (slot->pid == pid && slot->start == start)
        free_slot(slot);
    machine_unlock();
}

void machine_reap(void)
{
    for (unsigned i = 0; i < machine->slots; i++)
        reap_slot(&machine->slot[i]);
}

struct slot *machine_slot_take(void)
{
    pid_t pid = getpid();
    struct slot *slot = NULL;
    uint64_t start = process_start(pid);
    machine_reap();
    machine_lock();
    /* A slot that already has this pid can only be from before an execve() of this process. */
    for (unsigned i = 0; i < machine->slots; i++)
        if (machine->slot[i].pid == pid && is_near(&machine->slot[i]))
            free_slot(&machine->slot[i]);
    for (unsigned i = 0; i < machine->slots && !slot; i++)
        if (!machine->slot[i].pid)
            slot = &machine->slot[i];
    if (!slot && machine->slots < MAX_SLOTS) {
        slot = &machine->slot[machine->slots++];
        pthread_mutexattr_t attr;
        pthread_mutexattr_init(&attr);
        pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&slot->callers, &attr);
        pthread_mutexattr_destroy(&attr);
    }
    if (slot) {
        memset(slot, 0, offsetof(struct slot, callers));
        slot->uid = geteuid();
        slot->start = start;
        slot->space = machine_space();
        machine_hold((unsigned)(slot - machine->slot));
        __atomic_store_n(&slot->pid, pid, __ATOMIC_RELEASE);
    }
    machine_unlock();
    return slot;
}

struct slot *machine_slot_find(pid_t pid)
{
    for (unsigned i = 0; i < machine->slots && pid > 0; i++) {
        struct slot *slot = &machine->slot[i];
        if (slot_number(slot) != pid)
            continue;
        reap_slot(slot);
        if (slot_number(slot) == pid)
            return slot;
    }
    return NULL;
}

uint64_t machine_capacity(void) { return machine->spec.memory - machine->spec.reserved; }

bool machine_charge(struct slot *slot, unsigned device, uint64_t bytes)
{
    uint64_t capacity = machine_capacity() - device_residue(device);
    bool fits = false;
    /* If the device is full, a part of the charges may belong to dead processes. So free these
     * charges, and try once more. */
    for (int attempt = 0; attempt < 2 && !fits && bytes <= capacity; attempt++) {
        if (attempt)
            machine_reap();
        machine_lock();
        fits = machine->used[device] + bytes <= capacity;
        if (fits) {
            slot->used[device] += bytes;
            machine->used[device] += bytes;
            if (!slot->charged_at)
                slot->charged_at = now_ns();
        }
        machine_unlock();
    }
    return fits;
}

void machine_release(struct slot *slot, unsigned device, uint64_t bytes)
{
    machine_lock();
    slot->used[device] -= bytes;
    machine->used[device] -= bytes;
    machine_unlock();
}

uint64_t machine_free(unsigned device)
{
    machine_reap();
    uint64_t capacity = machine_capacity() - device_residue(device);
    machine_lock();
    uint64_t free = capacity > machine->used[device] ? capacity - machine->used[device] : 0;
    machine_unlock();
    return free;
}

void machine_wait_still(void)
{
    for (unsigned i = 0; i < machine->slots; i++) {
        const struct slot *s = &machine->slot[i];
        while (s->pid && __atomic_load_n(&s->moving, __ATOMIC_ACQUIRE) && slot_alive(s))
            sleep_until(now_ns() + 2000000);
    }
}

/* Waits until this process is neither locked nor suspended. Observed with driver 580.159.04: an
 * NVML call of a locked or suspended process blocks in the driver, and continues normally after the
 * unlock. As with CUDA calls, a signal does not end this wait. */
void machine_wait_awake(void)
{
    pid_t pid = getpid();
    for (unsigned i = 0; i < machine->slots; i++) {
        const struct slot *s = &machine->slot[i];
        while (__atomic_load_n(&s->pid, __ATOMIC_ACQUIRE) == pid && __atomic_load_n(&s->asleep, __ATOMIC_ACQUIRE) &&
               /* A slot from before an execve() also has this pid, but it is dead. */
               slot_alive(s))
            futex_wait(&s->asleep, 1, -1, true);
    }
}

/* ---- utilisation ---- */

void busy_record(struct slot *slot, unsigned device, uint64_t from, uint64_t until)
{
    struct busy *busy = &slot->busy[device];
    if (until - from > BUSY_BUCKET_NS * BUSY_BUCKETS / 2) {
        busy->from = from; /* too long for the ring, so stored as one interval */
        busy->until = until;
        return;
    }
    while (from < until) {
        uint64_t number = from / BUSY_BUCKET_NS, end = (number + 1) * BUSY_BUCKET_NS;
        uint64_t part = (until < end ? until : end) - from;
        uint64_t *bucket = &busy->bucket[number % BUSY_BUCKETS];
        uint64_t old = __atomic_load_n(bucket, __ATOMIC_RELAXED);
        uint64_t sum = (old >> 32) == (number & 0xffffffff) ? (old & 0xffffffff) + part : part;
        if (sum > BUSY_BUCKET_NS)
            sum = BUSY_BUCKET_NS;
        __atomic_store_n(bucket, (number & 0xffffffff) << 32 | sum, __ATOMIC_RELAXED);
        from += part;
    }
}

unsigned busy_percent(const struct slot *slot, unsigned device, uint64_t now)
{
    const struct busy *busy = &slot->busy[device];
    const uint64_t window = 10 * BUSY_BUCKET_NS;
    uint64_t last = now / BUSY_BUCKET_NS, sum = 0;
    for (uint64_t number = last - 9; number <= last; number++) {
        uint64_t bucket = __atomic_load_n(&busy->bucket[number % BUSY_BUCKETS], __ATOMIC_RELAXED);
        if (bucket >> 32 == (number & 0xffffffff))
            sum += bucket & 0xffffffff;
    }
    uint64_t from = busy->from > now - window ? busy->from : now - window;
    uint64_t until = busy->until < now ? busy->until : now;
    if (until > from)
        sum += until - from;
    return sum >= window ? 100 : (unsigned)(sum * 100 / window);
}
