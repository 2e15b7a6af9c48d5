/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Devices and their properties.
 */
#include "runtime.h"

#include <string.h>

SAME_RESULTS(cudaDeviceSynchronize, (void), cuCtxSynchronize())
SAME(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), cuCtxGetStreamPriorityRange(least, greatest))
SAME(cudaDeviceGetLimit, (size_t *value, int limit), cuCtxGetLimit(value, limit))
SAME(cudaDeviceSetLimit, (int limit, size_t value), cuCtxSetLimit(limit, value))

EXPORT cudaError cudaDeviceGetAttribute(int *value, int which, int device)
{
    STARTED;
    return noted(drv.cuDeviceGetAttribute(value, which, device));
}

EXPORT cudaError cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    STARTED;
    return noted(drv.cuDeviceGetPCIBusId(text, length, device));
}

EXPORT cudaError cudaDeviceGetByPCIBusId(int *device, const char *text)
{
    STARTED;
    return noted(drv.cuDeviceGetByPCIBusId(device, text));
}

EXPORT cudaError cudaDeviceGetP2PAttribute(int *value, int which, int device, int peer)
{
    STARTED;
    return noted(drv.cuDeviceGetP2PAttribute(value, which, device, peer));
}

EXPORT cudaError cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    STARTED;
    *can = 0;
    return device == peer ? CUDA_SUCCESS : noted(drv.cuDeviceCanAccessPeer(can, device, peer));
}

/* Makes the primary contexts of both devices. Afterwards the thread's current device is the same as
 * before. */
static cudaError with_peer(int peer, CUcontext *out)
{
    int mine = device_now();
    cudaError error = enter_device(peer), back = enter_device(mine);
    *out = error ? NULL : primary_of(peer);
    return error ? error : back;
}

EXPORT cudaError cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    STARTED;
    CUcontext c;
    cudaError error = with_peer(peer, &c);
    return noted(error ? error : drv.cuCtxEnablePeerAccess(c, flags));
}

EXPORT cudaError cudaDeviceDisablePeerAccess(int peer)
{
    STARTED;
    CUcontext c;
    cudaError error = with_peer(peer, &c);
    return noted(error ? error : drv.cuCtxDisablePeerAccess(c));
}

EXPORT cudaError cudaGetDeviceFlags(unsigned *flags)
{
    STARTED;
    int active;
    return noted(drv.cuDevicePrimaryCtxGetState(device_now(), flags, &active));
}

EXPORT cudaError cudaSetDeviceFlags(unsigned flags)
{
    STARTED;
    return noted(drv.cuDevicePrimaryCtxSetFlags(device_now(), flags));
}

static int asked(int which, int device)
{
    int value = 0;
    drv.cuDeviceGetAttribute(&value, which, device);
    return value;
}

/* Returns the total memory of a device. Asks the driver only once and keeps the answer, as NVIDIA's
 * runtime does. Under a guard, the driver's answer may change later. */
static size_t memory_of(int d)
{
    static size_t known[64];
    size_t bytes = 0;
    if (d >= (int)(sizeof known / sizeof *known))
        return drv.cuDeviceTotalMem(&bytes, d) ? 0 : bytes;
    bytes = __atomic_load_n(&known[d], __ATOMIC_RELAXED);
    if (!bytes && !drv.cuDeviceTotalMem(&bytes, d))
        __atomic_store_n(&known[d], bytes, __ATOMIC_RELAXED);
    return bytes;
}

static cudaError properties(struct cudaDeviceProp *p, int d)
{
    STARTED;
    if (d < 0 || d >= drv.count)
        return noted(CUDA_ERROR_INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    drv.cuDeviceGetName(p->name, (int)sizeof p->name, d);
    drv.cuDeviceGetUuid(&p->uuid, d);
    p->totalGlobalMem = memory_of(d);
#define IS(field, number) p->field = (__typeof__(p->field))asked(number, d)
    IS(maxThreadsPerBlock, 1); IS(maxThreadsDim[0], 2); IS(maxThreadsDim[1], 3); IS(maxThreadsDim[2], 4);
    IS(maxGridSize[0], 5); IS(maxGridSize[1], 6); IS(maxGridSize[2], 7);
    IS(sharedMemPerBlock, 8); IS(totalConstMem, 9); IS(warpSize, 10); IS(memPitch, 11); IS(regsPerBlock, 12);
    IS(textureAlignment, 14); IS(multiProcessorCount, 16); IS(integrated, 18); IS(canMapHostMemory, 19);
    IS(concurrentKernels, 31); IS(ECCEnabled, 32); IS(pciBusID, 33); IS(pciDeviceID, 34);
    IS(memoryBusWidth, 37); IS(l2CacheSize, 38); IS(maxThreadsPerMultiProcessor, 39); IS(asyncEngineCount, 40);
    IS(unifiedAddressing, 41); IS(pciDomainID, 50); IS(major, 75); IS(minor, 76); IS(streamPrioritiesSupported, 78);
    IS(sharedMemPerMultiprocessor, 81); IS(regsPerMultiprocessor, 82); IS(managedMemory, 83);
    IS(pageableMemoryAccess, 88); IS(concurrentManagedAccess, 89); IS(computePreemptionSupported, 90);
    IS(canUseHostPointerForRegisteredMem, 91); IS(cooperativeLaunch, 95); IS(sharedMemPerBlockOptin, 97);
    IS(hostRegisterSupported, 99); IS(maxBlocksPerMultiProcessor, 106); IS(reservedSharedMemPerBlock, 111);
    IS(memoryPoolsSupported, 115); IS(memoryPoolSupportedHandleTypes, 119);
#if RUNTIME == 12
    IS(clockRate, 13); IS(deviceOverlap, 15); IS(computeMode, 20); IS(memoryClockRate, 36);
#endif
    return CUDA_SUCCESS;
}

EXPORT cudaError cudaGetDeviceProperties(struct cudaDeviceProp *p, int d);
EXPORT cudaError cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d);
#if RUNTIME == 12 /* in 12, the name without _v2 is for CUDA 11's shorter structure */
EXPORT cudaError cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { return properties(p, d); }
#else
EXPORT cudaError cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) { return properties(p, d); }
#endif
