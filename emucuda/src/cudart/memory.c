/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Memory, copies, pools and sharing.
 */
#include "runtime.h"

#include <string.h>

enum { ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER, ATTRIBUTE_HOST_POINTER, ATTRIBUTE_IS_MANAGED = 8,
       ATTRIBUTE_ORDINAL = 9 };

EXPORT cudaError cudaMalloc(CUdeviceptr *out, size_t bytes)
{
    READY;
    *out = 0;
    return bytes ? noted(drv.cuMemAlloc(out, bytes)) : CUDA_SUCCESS;
}

EXPORT cudaError cudaFree(void *p)
{
    READY;
    return p ? noted(drv.cuMemFree(AT(p))) : CUDA_SUCCESS;
}

EXPORT cudaError cudaMallocPitch(CUdeviceptr *out, size_t *pitch, size_t width, size_t height)
{
    READY;
    return noted(drv.cuMemAllocPitch(out, pitch, width, height, 4));
}

EXPORT cudaError cudaFreeHost(void *p)
{
    READY;
    return p ? noted(drv.cuMemFreeHost(p)) : CUDA_SUCCESS;
}

SAME(cudaMallocManaged, (CUdeviceptr *out, size_t bytes, unsigned flags), cuMemAllocManaged(out, bytes, flags))
SAME(cudaMemGetInfo, (size_t *free, size_t *total), cuMemGetInfo(free, total))
SAME(cudaHostAlloc, (void **out, size_t bytes, unsigned flags), cuMemHostAlloc(out, bytes, flags))
SAME(cudaMallocHost, (void **out, size_t bytes), cuMemHostAlloc(out, bytes, 0))
SAME(cudaHostRegister, (void *p, size_t bytes, unsigned flags), cuMemHostRegister(p, bytes, flags))
SAME(cudaHostUnregister, (void *p), cuMemHostUnregister(p))
SAME(cudaHostGetDevicePointer, (CUdeviceptr *out, void *p, unsigned flags), cuMemHostGetDevicePointer(out, p, flags))
SAME(cudaHostGetFlags, (unsigned *flags, void *p), cuMemHostGetFlags(flags, p))

/* ---- copies ---- */

EXPORT cudaError cudaMemcpy(void *to, const void *from, size_t bytes, int kind)
{
    RESULTS;
    switch (kind) {
    case COPY_HOST_TO_HOST: memcpy(to, from, bytes); return CUDA_SUCCESS;
    case COPY_HOST_TO_DEVICE: return noted(drv.cuMemcpyHtoD(AT(to), from, bytes));
    case COPY_DEVICE_TO_HOST: return noted(drv.cuMemcpyDtoH(to, AT(from), bytes));
    case COPY_DEVICE_TO_DEVICE: return noted(drv.cuMemcpyDtoD(AT(to), AT(from), bytes));
    case COPY_DEFAULT: return noted(drv.cuMemcpy(AT(to), AT(from), bytes));
    default: return noted(cudaErrorInvalidMemcpyDirection);
    }
}

EXPORT cudaError cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, CUstream stream)
{
    RESULTS;
    switch (kind) {
    case COPY_HOST_TO_DEVICE: return noted(drv.cuMemcpyHtoDAsync(AT(to), from, bytes, stream));
    case COPY_DEVICE_TO_HOST: return noted(drv.cuMemcpyDtoHAsync(to, AT(from), bytes, stream));
    case COPY_DEVICE_TO_DEVICE: return noted(drv.cuMemcpyDtoDAsync(AT(to), AT(from), bytes, stream));
    case COPY_HOST_TO_HOST: case COPY_DEFAULT: return noted(drv.cuMemcpyAsync(AT(to), AT(from), bytes, stream));
    default: return noted(cudaErrorInvalidMemcpyDirection);
    }
}

static bool rectangle(CUDA_MEMCPY2D *c, void *to, size_t to_pitch, const void *from, size_t from_pitch,
                      size_t width, size_t height, int kind)
{
    bool from_host = kind == COPY_HOST_TO_DEVICE || kind == COPY_HOST_TO_HOST;
    bool to_host = kind == COPY_DEVICE_TO_HOST || kind == COPY_HOST_TO_HOST;
    *c = (CUDA_MEMCPY2D){.srcPitch = from_pitch, .dstPitch = to_pitch, .WidthInBytes = width, .Height = height};
    c->srcMemoryType = from_host ? MEMORYTYPE_HOST : MEMORYTYPE_UNIFIED;
    c->dstMemoryType = to_host ? MEMORYTYPE_HOST : MEMORYTYPE_UNIFIED;
    c->srcHost = from_host ? from : NULL;
    c->srcDevice = from_host ? 0 : AT(from);
    c->dstHost = to_host ? to : NULL;
    c->dstDevice = to_host ? 0 : AT(to);
    return kind >= COPY_HOST_TO_HOST && kind <= COPY_DEFAULT;
}

EXPORT cudaError cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, int kind)
{
    RESULTS;
    CUDA_MEMCPY2D c;
    bool valid = rectangle(&c, to, to_pitch, from, from_pitch, width, height, kind);
    return noted(valid ? drv.cuMemcpy2D(&c) : cudaErrorInvalidMemcpyDirection);
}

EXPORT cudaError cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                   size_t height, int kind, CUstream stream)
{
    RESULTS;
    CUDA_MEMCPY2D c;
    bool valid = rectangle(&c, to, to_pitch, from, from_pitch, width, height, kind);
    return noted(valid ? drv.cuMemcpy2DAsync(&c, stream) : cudaErrorInvalidMemcpyDirection);
}

static cudaError both(int to, int from)
{
    int mine = device_now();
    cudaError error = enter_device(to);
    if (!error)
        error = enter_device(from);
    cudaError back = enter_device(mine);
    return error ? error : back;
}

EXPORT cudaError cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes)
{
    RESULTS;
    cudaError error = both(to_device, from_device);
    if (error)
        return noted(error);
    return noted(drv.cuMemcpyPeer(AT(to), primary_of(to_device), AT(from), primary_of(from_device), bytes));
}

EXPORT cudaError cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                     CUstream stream)
{
    RESULTS;
    cudaError error = both(to_device, from_device);
    if (error)
        return noted(error);
    return noted(drv.cuMemcpyPeerAsync(AT(to), primary_of(to_device), AT(from), primary_of(from_device), bytes, stream));
}

SAME(cudaMemset, (void *p, int value, size_t bytes), cuMemsetD8(AT(p), (unsigned char)value, bytes))
SAME(cudaMemsetAsync, (void *p, int value, size_t bytes, CUstream stream),
     cuMemsetD8Async(AT(p), (unsigned char)value, bytes, stream))
SAME(cudaMemset2DAsync, (void *p, size_t pitch, int value, size_t width, size_t height, CUstream stream),
     cuMemsetD2D8Async(AT(p), pitch, (unsigned char)value, width, height, stream))

/* A pointer that the driver does not know is no error: its type is "unregistered". */
EXPORT cudaError cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    READY;
    int type = 0, ordinal = -2, managed = 0;
    memset(out, 0, sizeof *out);
    out->device = -2;
    out->hostPointer = (void *)(uintptr_t)p;
    if (drv.cuPointerGetAttribute(&type, ATTRIBUTE_MEMORY_TYPE, AT(p)))
        return CUDA_SUCCESS;
    drv.cuPointerGetAttribute(&managed, ATTRIBUTE_IS_MANAGED, AT(p));
    drv.cuPointerGetAttribute(&ordinal, ATTRIBUTE_ORDINAL, AT(p));
    out->type = managed ? MEMORY_MANAGED : type == MEMORYTYPE_HOST ? MEMORY_HOST : MEMORY_DEVICE;
    out->device = ordinal;
    if (drv.cuPointerGetAttribute(&out->devicePointer, ATTRIBUTE_DEVICE_POINTER, AT(p)))
        out->devicePointer = NULL;
    if (out->type == MEMORY_DEVICE || drv.cuPointerGetAttribute(&out->hostPointer, ATTRIBUTE_HOST_POINTER, AT(p)))
        out->hostPointer = NULL;
    return CUDA_SUCCESS;
}

/* ---- sharing ---- */

SAME(cudaIpcGetMemHandle, (CUipcMemHandle *out, void *p), cuIpcGetMemHandle(out, AT(p)))
SAME(cudaIpcOpenMemHandle, (CUdeviceptr *out, CUipcMemHandle handle, unsigned flags),
     cuIpcOpenMemHandle(out, handle, flags))
SAME(cudaIpcCloseMemHandle, (void *p), cuIpcCloseMemHandle(AT(p)))
SAME(cudaIpcGetEventHandle, (CUipcMemHandle *out, CUevent e), cuIpcGetEventHandle(out, e))
SAME(cudaIpcOpenEventHandle, (CUevent *out, CUipcMemHandle handle), cuIpcOpenEventHandle(out, handle))

/* ---- pools ---- */

SAME(cudaMallocAsync, (CUdeviceptr *out, size_t bytes, CUstream stream), cuMemAllocAsync(out, bytes, stream))
SAME(cudaFreeAsync, (void *p, CUstream stream), cuMemFreeAsync(AT(p), stream))
SAME(cudaMallocFromPoolAsync, (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream),
     cuMemAllocFromPoolAsync(out, bytes, pool, stream))
SAME(cudaDeviceGetDefaultMemPool, (CUmemoryPool *out, int device), cuDeviceGetDefaultMemPool(out, device))
SAME(cudaDeviceGetMemPool, (CUmemoryPool *out, int device), cuDeviceGetMemPool(out, device))
SAME(cudaDeviceSetMemPool, (int device, CUmemoryPool pool), cuDeviceSetMemPool(device, pool))
SAME(cudaMemPoolCreate, (CUmemoryPool *out, const CUmemPoolProps *props), cuMemPoolCreate(out, props))
SAME(cudaMemPoolDestroy, (CUmemoryPool pool), cuMemPoolDestroy(pool))
SAME(cudaMemPoolGetAttribute, (CUmemoryPool pool, int which, void *value), cuMemPoolGetAttribute(pool, which, value))
SAME(cudaMemPoolSetAttribute, (CUmemoryPool pool, int which, void *value), cuMemPoolSetAttribute(pool, which, value))
SAME(cudaMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *list, size_t count),
     cuMemPoolSetAccess(pool, list, count))
SAME(cudaMemPoolTrimTo, (CUmemoryPool pool, size_t keep), cuMemPoolTrimTo(pool, keep))
