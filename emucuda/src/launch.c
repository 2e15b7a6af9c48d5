/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Kernel launches, and occupancy.
 */
#include "module.h"

enum { LAUNCH_ATTRIBUTE_COOPERATIVE = 2 };
/* Numbers of a device's attributes. The attributes for Y and Z follow the one for X. */
enum { MAX_THREADS_PER_BLOCK = 1, MAX_BLOCK_DIM_X, MAX_GRID_DIM_X = 5 };

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

CUresult launch_now(CUfunction k, CUstream stream, const struct launch *launch, void **params)
{
    struct stream *s;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    int device = result ? 0 : s->context->device;
    pthread_mutex_unlock(&driver.lock);
    if (result)
        return result;
    uint64_t duration = kernel_run(k, device, launch, params, &result);
    if (result) {
        /* As on hardware, the context cannot be used from now on. */
        __atomic_store_n(&driver.sticky, (uint32_t)result, __ATOMIC_RELAXED);
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&driver.lock);
    uint64_t end = stream_submit(s, duration);
    pthread_mutex_unlock(&driver.lock);
    busy_record(driver.slot, driver.device[device].physical, end - duration, end);
    return CUDA_SUCCESS;
}

/* Returns the kernel's parameters as a list. The caller may pass them in one buffer. Then `extra`
 * has pairs of a tag and a value. The tags are CU_LAUNCH_PARAM_BUFFER_POINTER (1),
 * CU_LAUNCH_PARAM_BUFFER_SIZE (2) and CU_LAUNCH_PARAM_END (0). */
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

bool launch_bad(CUfunction k, const struct launch *l)
{
    uint64_t threads = 1;
    for (int i = 0; i < 3; i++) {
        if (!l->grid[i] || l->grid[i] > (unsigned)device_attribute(MAX_GRID_DIM_X + i, 0) ||
            !l->block[i] || l->block[i] > (unsigned)device_attribute(MAX_BLOCK_DIM_X + i, 0))
            return true;
        threads *= l->block[i];
    }
    return threads > (unsigned)device_attribute(MAX_THREADS_PER_BLOCK, 0) || l->shared > (unsigned)k->dynamic_shared;
}

static CUresult launch_any(CUfunction k, CUstream stream, const struct launch *launch, void **params, void **extra)
{
    GATED;
    void *list[MAX_PARAMS];
    struct stream *s;
    if (kernel_bad(k))
        return CUDA_ERROR_INVALID_HANDLE;
    params = launch_params(k, params, extra, list);
    if (launch_bad(k, launch) || (k->params && !params))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    CUresult result = stream_resolve(stream, &s);
    int device = result ? 0 : s->context->device;
    pthread_mutex_unlock(&driver.lock);
    if (!result)
        result = kernel_check(k, device);
    if (result)
        return result;
    return capture_launch(stream, k, launch, params, &result) ? result : launch_now(k, stream, launch, params);
}

EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                               unsigned bz, unsigned shared, CUstream stream, void **params, void **extra)
{
    struct launch launch = {{gx, gy, gz}, {bx, by, bz}, shared, false};
    return launch_any(f, stream, &launch, params, extra);
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    struct launch launch = {{c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                            c->sharedMemBytes, false};
    for (unsigned i = 0; c->attrs && i < c->numAttrs; i++) {
        const struct { int id; char pad[4]; int value; char rest[60]; } *attribute = c->attrs;
        if (attribute[i].id == LAUNCH_ATTRIBUTE_COOPERATIVE)
            launch.cooperative = attribute[i].value;
    }
    return launch_any(f, c->hStream, &launch, params, extra);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                          unsigned by, unsigned bz, unsigned shared, CUstream stream, void **params)
{
    struct launch launch = {{gx, gy, gz}, {bx, by, bz}, shared, true};
    return launch_any(f, stream, &launch, params, NULL);
}
