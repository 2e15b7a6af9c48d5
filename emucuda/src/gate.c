/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The gate. Every call that reaches a device passes it, and the checkpoint lock closes it.
 */
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>

struct driver driver = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* The kernel zeroes this page in the child of a fork(). A child has no device, and the driver
 * returns CUDA_ERROR_NOT_INITIALIZED there. */
uint32_t *driver_alive;

CUresult driver_check(void)
{
    if (!driver_alive || !__atomic_load_n(driver_alive, __ATOMIC_RELAXED) || !driver.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    return CUDA_SUCCESS;
}

static void leave(void)
{
    if (!__atomic_sub_fetch(&driver.inflight, 1, __ATOMIC_SEQ_CST) &&
        __atomic_load_n(&driver.closed, __ATOMIC_SEQ_CST))
        futex_wake(&driver.inflight, false);
}

/* Returns the error that has ended the contexts, or success. If a device is lost, the contexts of
 * the process end permanently. */
CUresult driver_sticky(void)
{
    uint32_t error = __atomic_load_n(&driver.sticky, __ATOMIC_RELAXED);
    if (error || !faults_pending())
        return (CUresult)error;
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].charged && device_is_lost(driver.device[i].physical)) {
            __atomic_store_n(&driver.sticky, CUDA_ERROR_LAUNCH_FAILED, __ATOMIC_RELAXED);
            return CUDA_ERROR_LAUNCH_FAILED;
        }
    return CUDA_SUCCESS;
}

/* Not 0 while this thread is inside a host call. The lock waits for the end of the host call. So a
 * call that the host function makes must not wait for the lock, or both would wait endlessly. */
static __thread int inside;

void gate_inside(int change) { inside += change; }

CUresult gate_enter(int *passed)
{
    CUresult result = driver_check();
    if (result)
        return result;
    for (;;) {
        __atomic_add_fetch(&driver.inflight, 1, __ATOMIC_SEQ_CST);
        if (inside || !__atomic_load_n(&driver.closed, __ATOMIC_SEQ_CST))
            break;
        leave();
        /* As in the real driver, a signal does not end this wait. */
        futex_wait(&driver.closed, 1, -1, false);
    }
    *passed = 1;
    return driver_sticky();
}

int gate_try(void)
{
    __atomic_add_fetch(&driver.inflight, 1, __ATOMIC_SEQ_CST);
    if (inside || !__atomic_load_n(&driver.closed, __ATOMIC_SEQ_CST))
        return 1;
    leave();
    return 0;
}

void gate_leave(const int *passed)
{
    if (*passed)
        leave();
}

void gate_open(void)
{
    __atomic_store_n(&driver.closed, 0, __ATOMIC_SEQ_CST);
    futex_wake(&driver.closed, false);
}

bool gate_close(uint64_t deadline)
{
    __atomic_store_n(&driver.closed, 1, __ATOMIC_SEQ_CST);
    uint32_t calls;
    while ((calls = __atomic_load_n(&driver.inflight, __ATOMIC_SEQ_CST))) {
        uint64_t now = now_ns();
        if (deadline && now >= deadline) {
            gate_open();
            return false;
        }
        futex_wait(&driver.inflight, calls, deadline ? (int64_t)(deadline - now) : -1, false);
    }
    pthread_mutex_lock(&driver.lock);
    uint64_t tail = driver_tail(NULL);
    pthread_mutex_unlock(&driver.lock);
    if (deadline && tail > deadline) {
        sleep_until(deadline);
        gate_open();
        return false;
    }
    sleep_until(tail);
    return true;
}

bool sync_returns_early(void)
{
    uint32_t state = __atomic_load_n(&driver.suspend_state, __ATOMIC_ACQUIRE);
    /* Observed on drivers 580 and 595 (gpunap, validation/FINDINGS.md): a synchronise call of a
     * suspended process causes a segmentation fault inside libcuda. Here a write to a device
     * address causes the fault, because such an address is never accessible. */
    if (state == PROCESS_CHECKPOINTED || state == PROCESS_FAILED)
        *(volatile char *)driver.base = 0;
    return state != PROCESS_RUNNING;
}
