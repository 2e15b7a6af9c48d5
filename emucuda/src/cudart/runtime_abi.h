/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The part of the CUDA runtime ABI (64-bit) that libcudart uses here. RUNTIME is the major version,
 * 12 or 13. The two differ in a few structures and signatures.
 *
 * It was written for this project from the published CUDA Runtime API reference
 * (https://docs.nvidia.com/cuda/cuda-runtime-api/). It has only the layouts and numbers that cross
 * the library boundary. Errors, attributes and enumerations have the numbers of the driver API.
 */
#ifndef EMUCUDA_RUNTIME_ABI_H
#define EMUCUDA_RUNTIME_ABI_H

#include "../cuda_abi.h"

#ifndef RUNTIME
#define RUNTIME 12
#endif

typedef int cudaError;

enum {
    cudaErrorMissingConfiguration = 52,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorInvalidMemcpyDirection = 21,
};

enum { COPY_HOST_TO_HOST, COPY_HOST_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_DEVICE_TO_DEVICE, COPY_DEFAULT };
enum { MEMORY_UNREGISTERED, MEMORY_HOST, MEMORY_DEVICE, MEMORY_MANAGED };

typedef struct {
    unsigned x, y, z;
} dim3;

struct cudaDeviceProp {
    char name[256];
    CUuuid uuid;
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if RUNTIME == 12
    int clockRate;
#endif
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
#if RUNTIME == 12
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled;
#else
    int multiProcessorCount;
#endif
    int integrated, canMapHostMemory;
#if RUNTIME == 12
    int computeMode;
#endif
    int maxTexture1D, maxTexture1DMipmap;
#if RUNTIME == 12
    int maxTexture1DLinear;
#endif
    int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2];
    int maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap;
    int maxTexture1DLayered[2], maxTexture2DLayered[3], maxTextureCubemapLayered[2];
    int maxSurface1D, maxSurface2D[2], maxSurface3D[3];
    int maxSurface1DLayered[2], maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver;
    int asyncEngineCount, unifiedAddressing;
#if RUNTIME == 12
    int memoryClockRate;
#endif
    int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID, hostNativeAtomicSupported;
#if RUNTIME == 12
    int singleToDoublePrecisionPerfRatio;
#endif
    int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported;
    int canUseHostPointerForRegisteredMem, cooperativeLaunch;
#if RUNTIME == 12
    int cooperativeMultiDeviceLaunch;
#endif
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost, maxBlocksPerMultiProcessor;
    int accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
    int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions;
    int gpuDirectRDMAWritesOrdering;
    unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
#if RUNTIME == 12
    int reserved[63];
#else
    int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
    unsigned gpuPciDeviceID, gpuPciSubsystemID;
    int hostNumaMultinodeIpcSupported, reserved[56];
#endif
};

struct cudaPointerAttributes {
    int type, device;
    void *devicePointer, *hostPointer;
#if RUNTIME >= 13
    long reserved[8];
#endif
};

struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA;
    int maxDynamicSharedSizeBytes, preferredShmemCarveout, clusterDimMustBeSet;
    int requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
    int clusterSchedulingPolicyAllowed, nonPortableClusterSizeAllowed, reserved[16];
};

typedef struct {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    CUstream stream;
    void *attrs;
    unsigned numAttrs;
} cudaLaunchConfig;

#endif
