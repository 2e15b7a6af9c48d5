/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Synchronising calls: afterwards the driver has given back what its pools keep beyond their
 * release thresholds, so the page can say so, and the session's other processes can have it.
 */
#include "allocator.h"
#include "wraps.h"

static CUresult after(CUresult result)
{
    if (guard_page && !result)
        pools_synced();
    return result;
}

CUresult wrap_cuCtxSynchronize(void)
{
    ENTER;
    return after(REAL(cuCtxSynchronize)());
}

CUresult wrap_cuCtxSynchronize_v2(CUcontext context)
{
    ENTER;
    return after(REAL(cuCtxSynchronize_v2)(context));
}

CUresult wrap_cuStreamSynchronize(CUstream stream)
{
    ENTER;
    return after(REAL(cuStreamSynchronize)(stream));
}

CUresult wrap_cuStreamSynchronize_ptsz(CUstream stream)
{
    ENTER;
    return after(REAL(cuStreamSynchronize_ptsz)(stream));
}

CUresult wrap_cuEventSynchronize(void *event)
{
    ENTER;
    return after(REAL(cuEventSynchronize)(event));
}
