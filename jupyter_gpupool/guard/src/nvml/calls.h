/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What the guard (nvml_calls.c) does for the NVML facade, which finds these functions by name in the process.
 */
#ifndef GPUPOOL_GUARD_NVML_CALLS_H
#define GPUPOOL_GUARD_NVML_CALLS_H

#include "../page.h"

#define EXPORTED __attribute__((visibility("default")))

enum nvml_call {
    NVML_CALL_PASSES,  /* make it */
    NVML_CALL_COUNTED, /* make it, then call gpupool_nvml_leave() */
    NVML_CALL_FAILS,   /* the call would block, and the wait for the slice failed: it was interrupted, or no
                        * broker answers */
    NVML_CALL_ENDS,    /* the call would block, and the process is ending or `waits` is false */
};

/* Before an NVML call of the main thread: if the process is suspended and `waits`, waits for the resume. `seen`: the
 * session's page, for a process in which the guard has not mapped it yet; or NULL. */
EXPORTED int gpupool_nvml_enter(const struct page *seen, bool waits);
EXPORTED void gpupool_nvml_leave(void);

#endif
