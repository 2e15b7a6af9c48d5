/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The structures and entry points of the driver that conformance.c uses.
 */
#ifndef CONFORMANCE_DRIVER_H
#define CONFORMANCE_DRIVER_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MIB ((size_t)1 << 20)

struct copy2d {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray;
    size_t dstPitch, WidthInBytes, Height;
};
struct prop {
    int type, handle_types, location_type, location_id;
    void *win32;
    char flags[8];
};
struct access {
    int location_type, location_id, flags;
};
struct copy3d {
    size_t srcXInBytes, srcY, srcZ, srcLOD;
    int srcMemoryType;
    const void *srcHost;
    uint64_t srcDevice;
    void *srcArray, *reserved0;
    size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
    int dstMemoryType;
    void *dstHost;
    uint64_t dstDevice;
    void *dstArray, *reserved1;
    size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
};
struct alloc_node {
    int alloc_type, handle_types, location_type, location_id;
    void *security;
    size_t max_size;
    char rest[56];
    const void *access;
    size_t access_count, bytes;
    uint64_t address;
};
struct pool_props {
    int alloc_type, handle_types, location_type, location_id;
    void *security;
    size_t max_size;
    char rest[56];
};
struct kernel_node {
    void *function;
    unsigned grid[3], block[3], shared;
    void **params, **extra;
    void *kernel, *context;
};
struct set_node {
    uint64_t to;
    size_t pitch;
    unsigned value, unit;
    size_t width, height;
};
struct handle { /* an IPC handle: of memory, an event or a pool's pointer */
    unsigned char bytes[64];
};
struct shape {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};
struct resource {
    int type;
    unsigned char rest[140];
};
struct host_node {
    void (*function)(void *);
    void *data;
};

#define CALLS(X)                                                                                   \
    X(cuInit, (unsigned)) X(cuDriverGetVersion, (int *))                                           \
    X(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *))                          \
    X(cuGetErrorName, (int, const char **)) X(cuGetErrorString, (int, const char **))              \
    X(cuDeviceGet, (int *, int)) X(cuDeviceGetCount, (int *)) X(cuDeviceGetName, (char *, int, int)) \
    X(cuDeviceGetUuid_v2, (unsigned char *, int)) X(cuDeviceTotalMem_v2, (size_t *, int))          \
    X(cuDeviceGetAttribute, (int *, int, int)) X(cuDeviceGetPCIBusId, (char *, int, int))          \
    X(cuDevicePrimaryCtxRetain, (void **, int)) X(cuCtxSetCurrent, (void *)) X(cuDevicePrimaryCtxReset_v2, (int))                       \
    X(cuCtxCreate_v2, (void **, unsigned, int)) X(cuCtxDestroy_v2, (void *))                       \
    X(cuCtxSynchronize, (void)) X(cuMemAlloc_v2, (uint64_t *, size_t)) X(cuMemFree_v2, (uint64_t)) \
    X(cuMemAllocPitch_v2, (uint64_t *, size_t *, size_t, size_t, unsigned))                        \
    X(cuMemAllocManaged, (uint64_t *, size_t, unsigned)) X(cuMemGetInfo_v2, (size_t *, size_t *))  \
    X(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t)) X(cuMemcpyDtoH_v2, (void *, uint64_t, size_t)) \
    X(cuMemcpyDtoD_v2, (uint64_t, uint64_t, size_t)) X(cuMemcpy, (uint64_t, uint64_t, size_t))     \
    X(cuMemcpy2D_v2, (const struct copy2d *)) X(cuMemsetD8_v2, (uint64_t, unsigned char, size_t))  \
    X(cuMemsetD16_v2, (uint64_t, unsigned short, size_t)) X(cuMemsetD32_v2, (uint64_t, unsigned, size_t)) \
    X(cuMemsetD32Async, (uint64_t, unsigned, size_t, void *)) X(cuMemHostAlloc, (void **, size_t, unsigned)) \
    X(cuMemFreeHost, (void *)) X(cuMemHostGetDevicePointer_v2, (uint64_t *, void *, unsigned))     \
    X(cuPointerGetAttribute, (void *, int, uint64_t)) X(cuStreamCreate, (void **, unsigned))       \
    X(cuStreamDestroy_v2, (void *)) X(cuStreamQuery, (void *)) X(cuStreamSynchronize, (void *))    \
    X(cuEventCreate, (void **, unsigned)) X(cuEventDestroy_v2, (void *)) X(cuEventRecord, (void *, void *)) \
    X(cuEventQuery, (void *)) X(cuEventSynchronize, (void *)) X(cuEventElapsedTime, (float *, void *, void *)) \
    X(cuModuleLoadData, (void **, const void *)) X(cuModuleGetFunction, (void **, void *, const char *)) \
    X(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **)) \
    X(cuFuncSetAttribute, (void *, int, int))                                                      \
    X(cuDeviceGetDefaultMemPool, (void **, int)) X(cuMemPoolGetAttribute, (void *, int, void *))   \
    X(cuMemPoolTrimTo, (void *, size_t)) X(cuMemAllocAsync, (uint64_t *, size_t, void *))          \
    X(cuMemFreeAsync, (uint64_t, void *))                                                          \
    X(cuMemGetAllocationGranularity, (size_t *, const struct prop *, int))                         \
    X(cuMemAddressReserve, (uint64_t *, size_t, size_t, uint64_t, unsigned long long))             \
    X(cuMemAddressFree, (uint64_t, size_t))                                                        \
    X(cuMemCreate, (uint64_t *, size_t, const struct prop *, unsigned long long))                  \
    X(cuMemMap, (uint64_t, size_t, size_t, uint64_t, unsigned long long)) X(cuMemUnmap, (uint64_t, size_t)) \
    X(cuMemSetAccess, (uint64_t, size_t, const struct access *, size_t)) X(cuMemRelease, (uint64_t)) \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *)) X(cuCtxGetCurrent, (void **))       \
    X(cuGraphCreate, (void **, unsigned)) X(cuGraphDestroy, (void *))                              \
    X(cuGraphAddEmptyNode, (void **, void *, void *const *, size_t))                               \
    X(cuGraphAddKernelNode_v2, (void **, void *, void *const *, size_t, const struct kernel_node *)) \
    X(cuGraphAddMemcpyNode, (void **, void *, void *const *, size_t, const struct copy3d *, void *)) \
    X(cuGraphAddMemsetNode, (void **, void *, void *const *, size_t, const struct set_node *, void *)) \
    X(cuGraphAddHostNode, (void **, void *, void *const *, size_t, const struct host_node *))      \
    X(cuGraphAddChildGraphNode, (void **, void *, void *const *, size_t, void *))                  \
    X(cuGraphChildGraphNodeGetGraph, (void *, void **))                                            \
    X(cuGraphAddMemAllocNode, (void **, void *, void *const *, size_t, struct alloc_node *))       \
    X(cuGraphAddMemFreeNode, (void **, void *, void *const *, size_t, uint64_t))                   \
    X(cuGraphNodeGetType, (void *, int *)) X(cuGraphGetNodes, (void *, void **, size_t *))         \
    X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                          \
    X(cuGraphUpload, (void *, void *)) X(cuGraphLaunch, (void *, void *)) X(cuGraphExecDestroy, (void *)) \
    X(cuDeviceGetGraphMemAttribute, (int, int, void *)) X(cuDeviceGraphMemTrim, (int))             \
    X(cuStreamBeginCapture_v2, (void *, int)) X(cuStreamEndCapture, (void *, void **))             \
    X(cuStreamIsCapturing, (void *, int *)) X(cuStreamWaitEvent, (void *, void *, unsigned))                                                        \
    X(cuStreamGetCaptureInfo_v2, (void *, int *, uint64_t *, void **, const void **, size_t *))    \
    X(cuMipmappedArrayCreate, (void **, const struct shape *, unsigned)) X(cuMipmappedArrayDestroy, (void *)) \
    X(cuMipmappedArrayGetLevel, (void **, void *, unsigned)) X(cuArrayDestroy, (void *))           \
    X(cuArray3DGetDescriptor_v2, (struct shape *, void *))                                         \
    X(cuIpcGetMemHandle, (struct handle *, uint64_t)) X(cuIpcCloseMemHandle, (uint64_t))           \
    X(cuIpcOpenMemHandle_v2, (uint64_t *, struct handle, unsigned))                                \
    X(cuIpcGetEventHandle, (struct handle *, void *)) X(cuIpcOpenEventHandle, (void **, struct handle)) \
    X(cuStreamWriteValue32_v2, (void *, uint64_t, uint32_t, unsigned))                             \
    X(cuStreamWriteValue64_v2, (void *, uint64_t, uint64_t, unsigned))                             \
    X(cuMemExportToShareableHandle, (void *, uint64_t, int, unsigned long long))                   \
    X(cuMemImportFromShareableHandle, (uint64_t *, void *, int))                                   \
    X(cuMemPoolCreate, (void **, const struct pool_props *)) X(cuMemPoolDestroy, (void *))         \
    X(cuMemAllocFromPoolAsync, (uint64_t *, size_t, void *, void *))                               \
    X(cuMemPoolExportToShareableHandle, (void *, void *, int, unsigned long long))                 \
    X(cuMemPoolImportFromShareableHandle, (void **, void *, int, unsigned long long))              \
    X(cuMemPoolExportPointer, (struct handle *, uint64_t))                                         \
    X(cuMemPoolImportPointer, (uint64_t *, void *, struct handle *))                               \
    X(cuDeviceGetDevResource, (int, struct resource *, int))                                       \
    X(cuDevResourceGenerateDesc, (void **, struct resource *, unsigned))                           \
    X(cuGreenCtxStreamCreate, (void **, void *, unsigned, int))                                     \
    X(cuGreenCtxCreate, (void **, void *, int, unsigned)) X(cuGreenCtxDestroy, (void *))           \
    X(cuCtxFromGreenCtx, (void **, void *))                                                        \
    X(cuMemHostRegister_v2, (void *, size_t, unsigned)) X(cuMemHostUnregister, (void *))           \
    X(cuCheckpointProcessGetState, (int, int *)) X(cuCheckpointProcessGetRestoreThreadId, (int, int *)) \
    X(cuCheckpointProcessLock, (int, void *)) X(cuCheckpointProcessCheckpoint, (int, void *))      \
    X(cuCheckpointProcessRestore, (int, void *)) X(cuCheckpointProcessUnlock, (int, void *))

#define DECLARE(name, args) static int(*name) args;
CALLS(DECLARE)

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("Bail out! %s\n", dlerror());
        exit(2);
    }
#define LOAD(name, args)                                        \
    *(void **)&name = dlsym(library, #name);                    \
    if (!name) {                                                \
        printf("Bail out! the driver has no %s\n", #name);      \
        exit(2);                                                \
    }
    CALLS(LOAD)
}

#endif
