/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The _ptsz and _ptds variants. They are the same calls, except that a null stream is the
 * per-thread stream.
 */
#include "cuda_abi.h"

/* Defines the variant of a call whose last parameter is the stream. */
#define LAST(name, parameters, ...)                                           \
    extern CUresult name parameters;                                          \
    EXPORT CUresult name##_ptsz parameters                                    \
    {                                                                         \
        return name(__VA_ARGS__, stream ? stream : STREAM_PER_THREAD);        \
    }
/* Defines the variant of a call whose first parameter is the stream. */
#define FIRST(name, parameters, ...)                                          \
    extern CUresult name parameters;                                          \
    EXPORT CUresult name##_ptsz parameters                                    \
    {                                                                         \
        return name(stream ? stream : STREAM_PER_THREAD, __VA_ARGS__);        \
    }

LAST(cuMemcpyPeerAsync, (CUdeviceptr t, CUcontext tc, CUdeviceptr f, CUcontext fc, size_t n, CUstream stream),
     t, tc, f, fc, n)
LAST(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *p, CUstream stream), p)
LAST(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *p, CUstream stream), p)
LAST(cuMemcpyBatchAsync_v2, (CUdeviceptr *t, CUdeviceptr *f, size_t *sizes, size_t n, void *a, size_t *i, size_t na,
                             CUstream stream), t, f, sizes, n, a, i, na)
LAST(cuMemAllocAsync, (CUdeviceptr *p, size_t n, CUstream stream), p, n)
LAST(cuMemAllocFromPoolAsync, (CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream stream), p, n, pool)
LAST(cuMemFreeAsync, (CUdeviceptr p, CUstream stream), p)
LAST(cuEventRecord, (CUevent e, CUstream stream), e)
FIRST(cuStreamGetFlags, (CUstream stream, unsigned *v), v)
FIRST(cuStreamGetPriority, (CUstream stream, int *v), v)
FIRST(cuStreamGetId, (CUstream stream, unsigned long long *v), v)
FIRST(cuStreamGetCtx, (CUstream stream, CUcontext *v), v)
FIRST(cuStreamGetDevice, (CUstream stream, CUdevice *v), v)
FIRST(cuStreamIsCapturing, (CUstream stream, int *v), v)
FIRST(cuStreamBeginCapture_v2, (CUstream stream, int mode), mode)
FIRST(cuStreamEndCapture, (CUstream stream, CUgraph *v), v)
FIRST(cuStreamGetCaptureInfo_v2, (CUstream stream, int *v, uint64_t *id, CUgraph *g, const CUgraphNode **d, size_t *n),
      v, id, g, d, n)
FIRST(cuStreamGetCaptureInfo_v3, (CUstream stream, int *v, uint64_t *id, CUgraph *g, const CUgraphNode **d,
                                  const void **e, size_t *n), v, id, g, d, e, n)
FIRST(cuStreamWaitEvent, (CUstream stream, CUevent e, unsigned flags), e, flags)
FIRST(cuLaunchHostFunc, (CUstream stream, void (*f)(void *), void *data), f, data)

FIRST(cuStreamAddCallback, (CUstream stream, void (*f)(CUstream, CUresult, void *), void *data, unsigned flags),
      f, data, flags)
FIRST(cuStreamGetCtx_v2, (CUstream stream, CUcontext *v, void **green), v, green)

extern CUresult cuStreamSynchronize(CUstream stream);
EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    return cuStreamSynchronize(stream ? stream : STREAM_PER_THREAD);
}

extern CUresult cuStreamQuery(CUstream stream);
EXPORT CUresult cuStreamQuery_ptsz(CUstream stream)
{
    return cuStreamQuery(stream ? stream : STREAM_PER_THREAD);
}

extern CUresult cuEventRecordWithFlags(CUevent e, CUstream stream, unsigned flags);
EXPORT CUresult cuEventRecordWithFlags_ptsz(CUevent e, CUstream stream, unsigned flags)
{
    return cuEventRecordWithFlags(e, stream ? stream : STREAM_PER_THREAD, flags);
}

extern CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **params, void **extra);
EXPORT CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                    unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream ? stream : STREAM_PER_THREAD, params, extra);
}

extern CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                          unsigned bz, unsigned shared, CUstream stream, void **params);
EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                               unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                               void **params)
{
    return cuLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, shared, stream ? stream : STREAM_PER_THREAD, params);
}

extern CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra);
EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUlaunchConfig config = *c;
    if (!config.hStream)
        config.hStream = STREAM_PER_THREAD;
    return cuLaunchKernelEx(&config, f, params, extra);
}

extern CUresult cuGraphLaunch(CUgraphExec e, CUstream stream);
EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec e, CUstream stream)
{
    return cuGraphLaunch(e, stream ? stream : STREAM_PER_THREAD);
}

extern CUresult cuGraphUpload(CUgraphExec e, CUstream stream);
EXPORT CUresult cuGraphUpload_ptsz(CUgraphExec e, CUstream stream)
{
    return cuGraphUpload(e, stream ? stream : STREAM_PER_THREAD);
}

extern CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p);
EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph g, CUDA_GRAPH_INSTANTIATE_PARAMS *p)
{
    if (p && !p->hUploadStream)
        p->hUploadStream = STREAM_PER_THREAD;
    return cuGraphInstantiateWithParams(out, g, p);
}
