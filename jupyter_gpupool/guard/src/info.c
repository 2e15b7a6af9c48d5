/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The calls by which an application asks for free and total memory. They return the figures of the
 * slice (slice_memory in info.h).
 */
#include "info.h"
#include "counting.h"
#include "wraps.h"

#include <stdlib.h>
#include <string.h>

CUresult wrap_cuMemGetInfo_v2(size_t *available, size_t *total)
{
    struct slice_memory m;
    size_t real_free = 0, real_total = 0;
    if (guard_blocked()) {
        /* In a suspended process the driver would block until the session has a lease. So the
         * guard answers from the page. If it does not know the device of the current context, the
         * driver answers, after a wait at the gate. */
        int ordinal = here_recorded().ordinal;
        if (ordinal >= 0 && slice_memory(guard_page, ordinal, UINT64_MAX, UINT64_MAX, &m)) {
            if (available)
                *available = m.available;
            if (total)
                *total = m.total;
            return CUDA_SUCCESS;
        }
    }
    if (guard_page && !guard_has_context()) {
        /* Without a context the driver can only return an error. The driver needs no lease for
         * this. */
        CUresult error = guard_enter_free();
        if (error)
            return error;
        bool none = here_now().ordinal < 0;
        if (none)
            error = REAL(cuMemGetInfo_v2)(available, total);
        guard_leave();
        if (none)
            return error;
    }
    ENTER;
    struct here h = here_now();
    if (h.ordinal < 0)
        return REAL(cuMemGetInfo_v2)(available, total);
    current_seen(h.context); /* for the next call, which may come during a suspend */
    pools_settle(h.ordinal);
    page_lock();
    page_reap(); /* free the slots of the session's dead processes, because their memory is free */
    page_unlock();
    CUresult result = REAL(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result)
        return result;
    if (!slice_memory(guard_page, h.ordinal, real_free, real_total, &m))
        m = (struct slice_memory){.total = real_total, .available = real_free};
    if (available)
        *available = m.available;
    if (total)
        *total = m.total;
    return CUDA_SUCCESS;
}

/* With expandable segments, PyTorch reserves a range of addresses that is 9/8 of the first result
 * of cuDeviceTotalMem. If the slice then grows and the program asks for a block larger than this
 * range, the process ends with SIGSEGV (in PyTorch's alloc_block; seen with PyTorch 2.6 and 2.11).
 * So a process with this setting gets the total of the device, the only figure that never
 * changes. */
static bool keeps_the_total(void)
{
    static const char *const names[] = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"};
    static const char option[] = "expandable_segments";
    for (int i = 0; i < 2; i++) {
        bool keeps = false; /* if the variable has the option several times, the last one counts */
        for (const char *at = getenv(names[i]); at && (at = strstr(at, option));) {
            at += strlen(option);
            at += strspn(at, " :");
            keeps = !strncmp(at, "True", 4);
        }
        if (keeps)
            return true;
    }
    return false;
}

CUresult wrap_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    struct slice_memory m;
    size_t real = 0;
    if (guard_blocked() && bytes) {
        struct here h = here_of_device(device);
        bool keeps = h.ordinal >= 0 && keeps_the_total();
        if (keeps && cached_total(bytes, device))
            return CUDA_SUCCESS;
        /* If `keeps` is true and the cache has no total of the device, do not answer here, but wait
         * for the slice in guard_enter_free(). The slice's own total would be too small after the
         * slice grows. */
        if (h.ordinal >= 0 && !keeps && slice_memory(guard_page, h.ordinal, UINT64_MAX, UINT64_MAX, &m)) {
            *bytes = m.total;
            return CUDA_SUCCESS;
        }
    }
    CUresult result = guard_enter_free();
    if (result)
        return result;
    result = REAL(cuDeviceTotalMem_v2)(bytes ? &real : NULL, device);
    int ordinal = guard_page && !result ? here_of_device(device).ordinal : -1;
    guard_leave();
    if (!result) {
        *bytes = real;
        if (ordinal >= 0 && !keeps_the_total() && slice_memory(guard_page, ordinal, real, real, &m))
            *bytes = m.total;
    }
    return result;
}
