/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Green contexts: separate contexts for memory and streams. The driver records their number of
 * multiprocessors, but the number has no effect.
 */
#include "driver.h"

#include <stdlib.h>

#define SMS 132u     /* the same as in cuDeviceGetAttribute */
#define SMS_UNIT 8u  /* size of the smallest partition; the size of each partition is a multiple of
                      * this */

struct resource_desc {
    unsigned sms;
};

struct green {
    uint32_t magic;
    unsigned sms;
    struct context *context;
};

static bool green_bad(const struct green *g) { return !g || g->magic != MAGIC_GREEN; }

static CUdevResource resource(unsigned sms)
{
    return (CUdevResource){.type = DEV_RESOURCE_SM, .sm = {sms, SMS_UNIT, SMS_UNIT}};
}

EXPORT CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *out, int type)
{
    CHECKED;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!out || type != DEV_RESOURCE_SM)
        return CUDA_ERROR_INVALID_VALUE;
    *out = resource(SMS);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevSmResourceSplitByCount(CUdevResource *out, unsigned *groups, const CUdevResource *input,
                                            CUdevResource *rest, unsigned flags, unsigned least)
{
    CHECKED;
    if (!groups || !input || input->type != DEV_RESOURCE_SM || flags)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned each = (least + SMS_UNIT - 1) / SMS_UNIT * SMS_UNIT;
    each = each ? each : SMS_UNIT;
    unsigned most = input->sm.smCount / each;
    if (!out) {
        *groups = most;
        return CUDA_SUCCESS;
    }
    if (*groups > most)
        *groups = most;
    for (unsigned i = 0; i < *groups; i++)
        out[i] = resource(each);
    if (rest)
        *rest = resource(input->sm.smCount - *groups * each);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned count)
{
    REQUIRE(out && resources);
    CHECKED;
    unsigned sms = 0;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        if (resources[i].type != DEV_RESOURCE_SM)
            return CUDA_ERROR_INVALID_VALUE;
        sms += resources[i].sm.smCount;
    }
    *out = malloc(sizeof **out); /* never freed: the API has no call to free a descriptor */
    if (!*out)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*out)->sms = sms;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc desc, CUdevice device, unsigned flags)
{
    GATED;
    if (!out || !desc || flags != 1) /* flags must be CU_GREEN_CTX_DEFAULT_STREAM */
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= driver.count)
        return CUDA_ERROR_INVALID_DEVICE;
    struct green *g = calloc(1, sizeof *g);
    if (!g)
        return CUDA_ERROR_OUT_OF_MEMORY;
    g->magic = MAGIC_GREEN;
    g->sms = desc->sms;
    pthread_mutex_lock(&driver.lock);
    CUresult result = context_new(device, 0, &g->context);
    if (!result)
        g->context->green = g;
    pthread_mutex_unlock(&driver.lock);
    if (result)
        free(g);
    else
        *out = g;
    return result;
}

EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx g)
{
    GATED;
    if (green_bad(g))
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&driver.lock);
    g->context->green = NULL;
    context_end(g->context);
    pthread_mutex_unlock(&driver.lock);
    g->magic = 0;
    free(g);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxFromGreenCtx(CUcontext *out, CUgreenCtx g)
{
    REQUIRE(out);
    CHECKED;
    if (green_bad(g))
        return CUDA_ERROR_INVALID_VALUE;
    *out = g->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxGetDevResource(CUgreenCtx g, CUdevResource *out, int type)
{
    REQUIRE(out);
    if (type != DEV_RESOURCE_SM)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    CHECKED;
    if (green_bad(g))
        return CUDA_ERROR_INVALID_VALUE;
    *out = resource(g->sms);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGreenCtxStreamCreate(CUstream *out, CUgreenCtx g, unsigned flags, int priority)
{
    REQUIRE(out);
    if (!g)
        return CUDA_ERROR_INVALID_CONTEXT;
    REQUIRE(flags == STREAM_NON_BLOCKING);
    GATED;
    if (green_bad(g))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&driver.lock);
    *out = stream_new(g->context, flags, priority);
    pthread_mutex_unlock(&driver.lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
