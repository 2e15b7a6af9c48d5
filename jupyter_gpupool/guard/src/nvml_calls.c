/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML calls, for the facade in nvml/, which is a separate library in the same process. In a
 * suspended process the driver blocks every NVML call until the resume (observed with 580.159.04),
 * and such a call does not ask the broker for the slice. So calls of the main thread, which runs
 * the cells, wait at the gate. Calls of other threads block in the driver, because a thread that
 * polls figures must not cause a resume of its session.
 *
 * These calls do not use the device, so they never change the gate. The guard counts the main
 * thread's calls in a separate word, and a suspend waits for these calls. Otherwise the driver
 * could block a call that has passed the gate, and nobody would ask for the slice.
 */
#include "guard.h"
#include "nvml/calls.h"

#include <sys/syscall.h>
#include <unistd.h>

/* The word in which this process counts its NVML call; NULL: no call is counted. Only the main
 * thread writes it, so the guard stores 1 or 0 instead of adding. Otherwise, after a longjmp out of
 * a call, an added 1 would stay in the count until the process ends. */
static uint32_t *counted;

/* Low half: the pid of the process at its first use of CUDA or NVML. High half: 1 + the lease's
 * epoch if the session was suspended at that moment, otherwise 0. */
static uint64_t began;

/* Whether the session is suspended, or has had no lease yet. When the driver has suspended the
 * processes, the broker removes the lease from the page. It writes the next lease before it opens
 * the gate. */
static bool suspended(const struct page *page)
{
    return !page_has_lease(page) && __atomic_load_n(&page->gate, __ATOMIC_SEQ_CST) == GATE_CLOSED;
}

void nvml_calls_began(const struct page *page)
{
    uint64_t before = __atomic_load_n(&began, __ATOMIC_ACQUIRE), now = (uint32_t)getpid();
    if ((uint32_t)before != now) {
        /* In the child of a fork(), `began` still has the parent's value. If the driver had
         * suspended the parent, the child has inherited the locked state of the driver. So the
         * child counts as suspended, too. */
        uint32_t epoch = page ? (uint32_t)page->epoch + 1 : 0;
        if (page && suspended(page) && (!before || before >> 32 == epoch))
            now |= (uint64_t)epoch << 32;
    } else if (before == now || !page || suspended(page)) {
        return;
    }
    __atomic_compare_exchange_n(&began, &before, now, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* Whether the driver answers the NVML calls of this process, although its session is suspended. The
 * driver can suspend only a process that has called CUDA or NVML. So if the process's first call
 * came after the suspend, the driver has not suspended the process. The epoch proves that there was
 * no later suspend. An admin's pause also suspends processes without a context; LANDING_ASIDE shows
 * such a pause. */
static bool spared(const struct page *page)
{
    uint64_t word = __atomic_load_n(&began, __ATOMIC_ACQUIRE);
    if (guard_has_context() || word >> 32 == 0 || word >> 32 != (uint32_t)page->epoch + 1)
        return false;
    for (int i = 0; i < PAGE_SLOTS; i++)
        if (__atomic_load_n(&page->slot[i].landing, __ATOMIC_SEQ_CST) == LANDING_ASIDE)
            return false;
    return true;
}

/* Whether the driver blocks this process's NVML calls. The slot of a killed process may still show
 * a context, although there is nothing to suspend. So free such slots before the last check. */
static bool suspends(void)
{
    if (landing_moves())
        return true;
    if (!page_suspends(guard_page) || spared(guard_page))
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
    nvml_calls_began(guard_page ? guard_page : seen);
    if (syscall(SYS_gettid) != getpid() || gate_inside())
        return NVML_CALL_PASSES;
    if (!__atomic_load_n(&guard_settled, __ATOMIC_ACQUIRE)) {
        /* The process has not called CUDA. The guard loads the driver and takes a slot only if
         * the call would block, so that an NVML call stays cheap. */
        if (!seen || !page_suspends(seen) || spared(seen))
            return NVML_CALL_PASSES;
        CUresult error = guard_settle();
        if (error)
            return error == CUDA_ERROR_NO_DEVICE ? NVML_CALL_PASSES : NVML_CALL_FAILS;
    }
    struct page_slot *slot = guard_slot();
    if (!guard_page || !slot)
        return NVML_CALL_PASSES;
    for (;;) {
        /* The exchange is a full barrier: this thread counts its call before it loads the gate. The
         * broker closes the gate before it reads the count. So the broker sees the call, or this
         * thread sees the closed gate. */
        __atomic_exchange_n(&slot->nvml, 1, __ATOMIC_SEQ_CST);
        if (!suspends()) {
            counted = &slot->nvml;
            return NVML_CALL_COUNTED;
        }
        __atomic_store_n(&slot->nvml, 0, __ATOMIC_SEQ_CST);
        if (!waits || gate_ends())
            return NVML_CALL_ENDS;
        if (wait_for_resume())
            return NVML_CALL_FAILS;
    }
}

EXPORTED void gpupool_nvml_leave(void)
{
    if (counted) /* it is NULL at the end of the main thread if no call is counted, and in the child
                  * of a fork() during the call */
        __atomic_store_n(counted, 0, __ATOMIC_SEQ_CST);
    counted = NULL;
}

void nvml_calls_thread_ends(void)
{
    if (syscall(SYS_gettid) == getpid())
        gpupool_nvml_leave();
}

void nvml_calls_fork(enum fork_when when)
{
    if (when == FORK_CHILD)
        counted = NULL;
}
