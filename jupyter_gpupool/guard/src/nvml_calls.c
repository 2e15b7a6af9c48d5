/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML calls, for the facade in nvml/, which is another library of the process. In a suspended process the driver
 * blocks every NVML call until the resume (observed with 580.159.04), and nothing would ask for that. So calls of the
 * main thread, which runs the cells, wait at the gate. On other threads they block in the driver: a thread that
 * polls figures must not bring its session back.
 *
 * These calls are no use of the device, so they never change the gate. The main thread's are counted while they
 * run, in a word of their own, and a suspend waits for them: a call that is inside the driver when the process is
 * suspended blocks there, without a request for the slice.
 */
#include "guard.h"
#include "nvml/calls.h"

#include <sys/syscall.h>
#include <unistd.h>

/* The word that counts this process's call; only its main thread uses it. */
static uint32_t *counted;

/* A killed process leaves its slot, and nothing of it is suspended. */
static bool suspends(void)
{
    if (landing_moves())
        return true;
    if (!page_suspends(guard_page))
        return false;
    if (page_deaths()) {
        page_lock();
        page_reap();
        page_unlock();
    }
    return page_suspends(guard_page);
}

static CUresult wait_for_resume(void)
{
    return landing_moves() && !landing_aside() ? landing_wait() : broker_attach();
}

EXPORTED int gpupool_nvml_enter(const struct page *seen, bool waits)
{
    if (syscall(SYS_gettid) != getpid() || gate_inside())
        return NVML_CALL_PASSES;
    if (!__atomic_load_n(&guard_settled, __ATOMIC_ACQUIRE)) {
        /* It has not called CUDA. An NVML call is no reason to load the driver and take a slot, unless it would
         * block. */
        if (!seen || !page_suspends(seen))
            return NVML_CALL_PASSES;
        CUresult error = guard_settle();
        if (error)
            return error == CUDA_ERROR_NO_DEVICE ? NVML_CALL_PASSES : NVML_CALL_FAILS;
    }
    struct page_slot *slot = guard_slot();
    if (!guard_page || !slot)
        return NVML_CALL_PASSES;
    for (;;) {
        /* A full barrier before the load of the gate; the broker closes the gate before it reads the count. */
        __atomic_add_fetch(&slot->nvml, 1, __ATOMIC_SEQ_CST);
        if (!suspends()) {
            counted = &slot->nvml;
            return NVML_CALL_COUNTED;
        }
        __atomic_sub_fetch(&slot->nvml, 1, __ATOMIC_SEQ_CST);
        if (!waits || gate_ends())
            return NVML_CALL_ENDS;
        if (wait_for_resume())
            return NVML_CALL_FAILS;
    }
}

EXPORTED void gpupool_nvml_leave(void)
{
    if (counted) /* NULL in a process that another thread has forked during the call */
        __atomic_sub_fetch(counted, 1, __ATOMIC_SEQ_CST);
}

void nvml_calls_fork(enum fork_when when)
{
    if (when == FORK_CHILD)
        counted = NULL;
}
