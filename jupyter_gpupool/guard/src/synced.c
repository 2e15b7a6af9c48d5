/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Synchronising calls. When such a call returns, the driver has given back the memory that its
 * pools keep beyond their release thresholds. The guard then lowers the figures in the page, so
 * that the session's other processes can use this memory.
 *
 * A suspended process has no work under way. So the guard needs no lease to answer a query whether
 * work is done. A synchronise waits for a lease, although no work is left, for two reasons. First,
 * a program learns from its result that the work has failed, before it reads the output of the work
 * in host memory. Second, a program that measures time synchronises before it starts the clock. The
 * device must be attached at that moment.
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
