/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Kernel launches, and occupancy.
 */
#include "module.h"

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction f, int size,
                                                                     size_t shared, unsigned flags)
{
    CHECKED;
    (void)shared;
    (void)flags;
    if (kernel_bad(f) || !blocks || size < 1 || size > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = 2048 / size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction f, int size, size_t shared)
{
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, size, shared, 0);
}

CUresult launch_now(CUfunction k, CUstream stream, void **params)
{
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    int device = result ? 0 : s->context->device;
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    uint64_t duration = kernel_run(k->name, params, k->params, &result);
    if (result) {
        /* As on hardware, the context is unusable from now on. */
        __atomic_store_n(&driver.sticky, (uint32_t)result, __ATOMIC_RELAXED);
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&driver.lock);
    uint64_t end = stream_submit(s, duration);
    pthread_mutex_unlock(&driver.lock);
    busy_record(driver.slot, driver.device[device].physical, end - duration, end);
    return CUDA_SUCCESS;
}

/* Parameters may also come as one buffer: CU_LAUNCH_PARAM_BUFFER_POINTER (1), _SIZE (2), end (0). */
void **launch_params(CUfunction k, void **params, void **extra, void **list)
{
    char *buffer = NULL;
    if (params || !extra)
        return params;
    for (void **e = extra; *e && e - extra < 8; e += 2)
        if (*e == (void *)1)
            buffer = e[1];
    for (uint32_t i = 0; buffer && i < k->params; i++)
        list[i] = buffer + k->offset[i];
    return buffer ? list : NULL;
}

static CUresult launch_any(CUfunction k, CUstream stream, void **params, void **extra, unsigned blocks,
                           unsigned threads)
{
    GATED;
    void *list[MAX_PARAMS];
    CUresult result;
    if (kernel_bad(k))
        return CUDA_ERROR_INVALID_HANDLE;
    params = launch_params(k, params, extra, list);
    if (!blocks || !threads || threads > 1024 || (k->params && !params))
        return CUDA_ERROR_INVALID_VALUE;
    return capture_launch(stream, k, params, &result) ? result : launch_now(k, stream, params);
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    (void)shared;
    return launch_any(f, stream, params, extra, gx && gy && gz, bx * by * bz);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    return launch_any(f, c->hStream, params, extra, c->gridDimX && c->gridDimY && c->gridDimZ,
                      c->blockDimX * c->blockDimY * c->blockDimZ);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                          unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params)
{
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, NULL);
}
