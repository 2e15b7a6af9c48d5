/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The driver's own thread in a CUDA process. It performs the checkpoint calls of other processes.
 * The thread runs in the target process, so the calls behave as on hardware. If the target is
 * stopped, the calls hang. If the target is killed, the calls end. If a caller dies, the thread
 * still completes its request.
 */
#include "driver.h"

#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

static void set_state(uint32_t state)
{
    __atomic_store_n(&driver.suspend_state, state, __ATOMIC_RELEASE);
    __atomic_store_n(&driver.slot->state, state, __ATOMIC_RELEASE);
}

/* Makes this process's NVML calls block if `on` is true, or continue if `on` is false. */
static void asleep(bool on)
{
    __atomic_store_n(&driver.slot->asleep, on, __ATOMIC_RELEASE);
    futex_wake(&driver.slot->asleep, true);
}

static void moving(bool on) { __atomic_store_n(&driver.slot->moving, on, __ATOMIC_RELEASE); }

static CUresult do_lock(uint32_t timeout_ms)
{
    struct fault fault;
    uint64_t deadline = timeout_ms ? now_ns() + timeout_ms * 1000000ull : 0;
    if (driver.suspend_state != PROCESS_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (fault_hit(FAULT_LOCK_TIMEOUT, getpid(), -1, NULL, &fault)) {
        sleep_until(deadline);
        return fault.code ? (CUresult)fault.code : CUDA_ERROR_NOT_READY;
    }
    /* With the quirk lock-ignores-timeout, running work does not end before the quirk is removed,
     * and the lock ignores its time-out. */
    while (fault_active(FAULT_LOCK_IGNORES_TIMEOUT, getpid(), -1, NULL)) {
        deadline = 0;
        sleep_until(now_ns() + 5000000);
    }
    if (!gate_close(deadline))
        return CUDA_ERROR_NOT_READY;
    set_state(PROCESS_LOCKED);
    asleep(true);
    return CUDA_SUCCESS;
}

static CUresult do_checkpoint(void)
{
    if (driver.suspend_state != PROCESS_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    moving(true);
    CUresult result = suspend_out();
    moving(false);
    if (!result) {
        machine_device_file(false); /* a suspended process does not use the device */
        set_state(PROCESS_CHECKPOINTED);
    }
    return result;
}

static CUresult do_restore(const struct request *request)
{
    static bool lost; /* used by the quirk restore-hides-loss */
    bool fatal = false;
    if (lost || driver.suspend_state == PROCESS_FAILED)
        return CUDA_ERROR_OPERATING_SYSTEM; /* NVIDIA/cuda-checkpoint #44: after a lost state, each
                                             * later restore returns 304 */
    if (driver.suspend_state != PROCESS_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    moving(true);
    machine_device_file(true);
    CUresult result = suspend_in(request->map, request->pairs, &fatal);
    moving(false);
    if (!result) {
        for (int i = 0; i < driver.count; i++)
            machine_gpu_file(driver.device[i].physical);
        set_state(PROCESS_LOCKED);
    } else if (fatal && fault_active(FAULT_RESTORE_HIDES_LOSS, getpid(), -1, NULL)) {
        lost = true;
        machine_device_file(false);
    } else if (fatal) {
        set_state(PROCESS_FAILED);
        asleep(false);
    } else
        machine_device_file(false);
    return result;
}

static CUresult do_unlock(void)
{
    if (driver.suspend_state != PROCESS_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    set_state(PROCESS_RUNNING);
    asleep(false);
    gate_open();
    return CUDA_SUCCESS;
}

static CUresult perform(struct request *r)
{
    switch (r->op) {
    case OP_STATE:
        r->state = driver.suspend_state;
        return CUDA_SUCCESS;
    case OP_LOCK: return do_lock(r->timeout_ms);
    case OP_CHECKPOINT: return do_checkpoint();
    case OP_RESTORE: return do_restore(r);
    case OP_UNLOCK: return do_unlock();
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

static void *serve(void *started)
{
    struct request *r = &driver.slot->request;
    /* A number in service_tid announces that this thread serves requests, so store it only now. */
    __atomic_store_n(&driver.slot->service_tid, (int32_t)syscall(SYS_gettid), __ATOMIC_RELEASE);
    __atomic_store_n((uint32_t *)started, 1, __ATOMIC_RELEASE);
    futex_wake(started, false);
    for (;;) {
        uint32_t posted = __atomic_load_n(&r->posted, __ATOMIC_ACQUIRE);
        if (posted == r->done) {
            futex_wait(&r->posted, posted, -1, true);
            continue;
        }
        r->result = perform(r);
        __atomic_store_n(&r->done, posted, __ATOMIC_RELEASE);
        futex_wake(&r->done, true);
    }
    return NULL;
}

/* Starts the service thread at the first call. cuInit calls this function. Each new context also
 * calls it, with the lock held. */
CUresult service_start(void)
{
    static uint32_t started;
    pthread_t thread;
    pthread_attr_t attr;
    sigset_t all, old;
    if (started)
        return CUDA_SUCCESS;
    sigfillset(&all); /* signals must go to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, 256 * 1024);
    int failed = pthread_create(&thread, &attr, serve, &started);
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_setname_np(thread, "cuda-emulated");
    while (!__atomic_load_n(&started, __ATOMIC_ACQUIRE))
        futex_wait(&started, 0, -1, false);
    return CUDA_SUCCESS;
}
