/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Synchronising calls: afterwards the driver has given back what its pools keep beyond their
 * release thresholds, so the page can say so, and the session's other processes can have it.
 *
 * A suspended process has no work under way. A question whether work is done is answered so without
 * a lease. A synchronise is not, although nothing is left to wait for: by its answer a program
 * learns that its work has failed, before it reads what that work left in host memory, and a program
 * that measures time has its device attached by it before the clock starts.
 */
#include "counting.h"
#include "wraps.h"

static CUresult after(CUresult result)
{
    if (guard_page && !result)
        pools_synced();
    return result;
}

static CUresult after_all(CUresult result)
{
    if (!result)
        window_synced();
    return after(result);
}

static CUresult after_stream(CUresult result, CUstream stream, bool per_thread)
{
    if (!result)
        window_stream_synced(stream, per_thread);
    return after(result);
}

CUresult wrap_cuCtxSynchronize(void)
{
    ENTER;
    return after_all(REAL(cuCtxSynchronize)());
}

CUresult wrap_cuCtxSynchronize_v2(CUcontext context)
{
    ENTER;
    return after_all(REAL(cuCtxSynchronize_v2)(context));
}

CUresult wrap_cuStreamSynchronize(CUstream stream)
{
    ENTER;
    return after_stream(REAL(cuStreamSynchronize)(stream), stream, false);
}

CUresult wrap_cuStreamSynchronize_ptsz(CUstream stream)
{
    ENTER;
    return after_stream(REAL(cuStreamSynchronize_ptsz)(stream), stream, true);
}

CUresult wrap_cuStreamQuery(CUstream stream)
{
    ENTER_QUERY;
    return REAL(cuStreamQuery)(stream);
}

CUresult wrap_cuStreamQuery_ptsz(CUstream stream)
{
    ENTER_QUERY;
    return REAL(cuStreamQuery_ptsz)(stream);
}

CUresult wrap_cuEventQuery(void *event)
{
    ENTER_QUERY;
    return REAL(cuEventQuery)(event);
}

CUresult wrap_cuEventSynchronize(void *event)
{
    ENTER;
    return after(REAL(cuEventSynchronize)(event));
}
