/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The guard's functions for the NVML facade (nvml_calls.c). The facade finds them by name in the
 * process.
 */
#ifndef GPUPOOL_GUARD_NVML_CALLS_H
#define GPUPOOL_GUARD_NVML_CALLS_H

#include "../page.h"

#define EXPORTED __attribute__((visibility("default")))

enum nvml_call {
    NVML_CALL_PASSES,  /* make the call */
    NVML_CALL_COUNTED, /* make the call, then call gpupool_nvml_leave() */
    NVML_CALL_FAILS,   /* the call would block, and the wait for the slice failed: an interrupt
                        * ended the wait, or no broker answers */
    NVML_CALL_ENDS,    /* the call would block, and either the process is ending or `waits` is
                        * false */
};

/* The facade calls this function before every NVML call. The guard counts the main thread's calls,
 * and no others. If the process is suspended and `waits` is true, a call of the main thread waits
 * here for the resume. `seen`: the page that the facade has mapped, or NULL. The guard uses this
 * page until the guard itself has mapped the page. */
EXPORTED int gpupool_nvml_enter(const struct page *seen, bool waits);
EXPORTED void gpupool_nvml_leave(void);

#endif
