/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The six cuCheckpointProcess* calls on the caller's side. The caller needs no context and no
 * cuInit (the emulated machine has persistence mode on).
 */
#include "driver.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define LIVENESS_NS 20000000 /* how often a waiting caller checks that its target still lives */

/* Finds the slot of a CUDA process. Returns an error if the caller may not act on the process. */
static CUresult find(int pid, struct slot **out)
{
    if (pid <= 0 || !process_start(pid))
        return CUDA_ERROR_OPERATING_SYSTEM; /* observed with 580.159.04 */
    if (machine_open())
        return CUDA_ERROR_NOT_INITIALIZED;
    *out = machine_slot_find(pid);
    if (!*out)
        return CUDA_ERROR_NOT_INITIALIZED;
    /* Refuse other users, as the real driver does: it uses /proc/<pid>, which other users cannot
     * read. */
    if (geteuid() && (*out)->uid != geteuid())
        return CUDA_ERROR_OPERATING_SYSTEM;
    return CUDA_SUCCESS;
}

static void hang_if_asked(int pid, const char *op)
{
    static const uint32_t never;
    if (fault_hit(FAULT_HANG, pid, -1, op, NULL))
        for (;;)
            futex_wait(&never, 0, -1, false);
}

static bool same_process(const struct slot *slot, int pid, uint64_t start)
{
    return slot_number(slot) == pid && slot->start == start && slot_alive(slot);
}

/* Waits until the service thread has answered the last request. */
static bool settle(struct slot *slot, int pid, uint64_t start)
{
    struct request *r = &slot->request;
    uint32_t done;
    while ((done = __atomic_load_n(&r->done, __ATOMIC_ACQUIRE)) != r->posted) {
        futex_wait(&r->done, done, LIVENESS_NS, true);
        if (__atomic_load_n(&r->done, __ATOMIC_ACQUIRE) == done && !same_process(slot, pid, start))
            return false;
    }
    return true;
}

static CUresult ask(int pid, struct slot *slot, const struct request *wanted, uint32_t *state)
{
    uint64_t start = slot->start;
    struct request *r = &slot->request;
    CUresult result = CUDA_ERROR_OPERATING_SYSTEM;
    if (!__atomic_load_n(&slot->service_tid, __ATOMIC_ACQUIRE))
        return CUDA_ERROR_NOT_INITIALIZED; /* with the quirk init-not-enough: after cuInit alone,
                                            * the process has nothing to suspend */
    /* Only one caller at a time may send a request. If the previous caller died while it held this
     * lock, the target still completes its request, and settle() waits for that. */
    if (pthread_mutex_lock(&slot->callers) == EOWNERDEAD)
        pthread_mutex_consistent(&slot->callers);
    if (same_process(slot, pid, start) && settle(slot, pid, start)) {
        uint32_t posted = r->posted;
        r->op = wanted->op;
        r->timeout_ms = wanted->timeout_ms;
        r->pairs = wanted->pairs;
        memcpy(r->map, wanted->map, sizeof r->map);
        __atomic_store_n(&r->posted, posted + 1, __ATOMIC_RELEASE);
        futex_wake(&r->posted, true);
        if (settle(slot, pid, start)) {
            result = r->result;
            if (state)
                *state = r->state;
        }
    }
    pthread_mutex_unlock(&slot->callers);
    return result;
}

static CUresult call(int pid, const char *name, const struct request *wanted, uint32_t *state)
{
    struct slot *slot;
    CUresult result = find(pid, &slot);
    if (result)
        return result;
    hang_if_asked(pid, name);
    return ask(pid, slot, wanted, state);
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    struct request wanted = {.op = OP_STATE};
    struct slot *slot;
    uint32_t answer = 0;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find(pid, &slot);
    if (result)
        return result;
    if (!__atomic_load_n(&slot->service_tid, __ATOMIC_ACQUIRE)) {
        *state = PROCESS_RUNNING;
        return CUDA_SUCCESS;
    }
    result = call(pid, "state", &wanted, &answer);
    if (!result)
        *state = (int)answer;
    return result;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    struct slot *slot;
    if (!tid)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = find(pid, &slot);
    if (result)
        return result;
    int found = __atomic_load_n(&slot->service_tid, __ATOMIC_ACQUIRE);
    if (!found)
        return CUDA_ERROR_NOT_INITIALIZED;
    *tid = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args)
{
    struct request wanted = {.op = OP_LOCK, .timeout_ms = args ? args->timeoutMs : 0};
    return call(pid, "lock", &wanted, NULL);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const void *args)
{
    struct request wanted = {.op = OP_CHECKPOINT};
    (void)args;
    return call(pid, "checkpoint", &wanted, NULL);
}

static int device_by_uuid(const CUuuid *uuid)
{
    for (unsigned i = 0; i < machine->spec.count; i++)
        if (!memcmp(machine->uuid[i], uuid, 16))
            return (int)i;
    return -1;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args)
{
    struct request wanted = {.op = OP_RESTORE};
    struct slot *slot;
    CUresult result = find(pid, &slot);
    if (result)
        return result;
    if (args && args->gpuPairsCount) {
        uint64_t from = 0, to = 0;
        /* Every GPU of the machine must be listed, even those outside CUDA_VISIBLE_DEVICES
         * (NVIDIA/cuda-checkpoint #35). */
        if (!args->gpuPairs || args->gpuPairsCount != machine->spec.count)
            return CUDA_ERROR_INVALID_VALUE;
        for (unsigned i = 0; i < args->gpuPairsCount; i++) {
            int a = device_by_uuid(&args->gpuPairs[i].oldUuid), b = device_by_uuid(&args->gpuPairs[i].newUuid);
            if (a < 0 || b < 0 || from >> a & 1 || to >> b & 1)
                return CUDA_ERROR_INVALID_VALUE;
            from |= 1ull << a;
            to |= 1ull << b;
            wanted.map[a] = (uint8_t)b;
        }
        wanted.pairs = args->gpuPairsCount;
    }
    return call(pid, "restore", &wanted, NULL);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const void *args)
{
    struct request wanted = {.op = OP_UNLOCK};
    (void)args;
    return call(pid, "unlock", &wanted, NULL);
}
