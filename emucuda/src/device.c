/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Device queries.
 */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE(d)                                  \
    do {                                           \
        CHECKED;                                   \
        if ((d) < 0 || (d) >= driver.count)        \
            return CUDA_ERROR_INVALID_DEVICE;      \
    } while (0)

EXPORT CUresult cuDeviceGetCount(int *count)
{
    CHECKED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = driver.count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    DEVICE(ordinal);
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice d)
{
    DEVICE(d);
    if (!name || length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    device_name(name, (size_t)length);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d)
{
    DEVICE(d);
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(uuid, machine->uuid[driver.device[d].physical], 16);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice d) { return cuDeviceGetUuid_v2(uuid, d); }

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice d)
{
    DEVICE(d);
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = machine_capacity();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice d)
{
    DEVICE(d);
    if (!id || length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    char full[32];
    pci_bus_id(driver.device[d].pci_index, full, sizeof full);
    snprintf(id, (size_t)length, "%s", full + 4); /* the driver writes the PCI domain with 4
                                                   * digits */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    CHECKED;
    unsigned domain = 0, bus = 0, slot = 0;
    if (!device || !id)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < driver.count; i++)
        if (!domain && !slot && driver.device[i].pci_index + 1 == bus) {
            *device = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetLuid(char *luid, unsigned *mask, CUdevice d)
{
    DEVICE(d);
    (void)luid;
    (void)mask;
    return CUDA_ERROR_NOT_SUPPORTED; /* LUIDs exist only on Windows */
}

/* Returns an attribute of a device. `number` is the attribute's number in the Driver API. The
 * values are those of an Ampere-class board; 0 stands for a feature that the emulation lacks, and
 * for an attribute that is not listed. If the values were those of a later board, compilers would
 * make instructions that ptx/ does not interpret (wgmma). */
int device_attribute(int number, int d)
{
    switch (number) {
    case 1: return 1024;        /* MAX_THREADS_PER_BLOCK */
    case 2: return 1024;        /* MAX_BLOCK_DIM_X */
    case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;  /* MAX_GRID_DIM_X */
    case 6: return 65535;
    case 7: return 65535;
    case 8: return 49152;       /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 9: return 65536;       /* TOTAL_CONSTANT_MEMORY */
    case 10: return 32;         /* WARP_SIZE */
    case 11: return 2147483647; /* MAX_PITCH */
    case 12: return 65536;      /* MAX_REGISTERS_PER_BLOCK */
    case 13: return 1980000;    /* CLOCK_RATE, kHz */
    case 14: return 512;        /* TEXTURE_ALIGNMENT */
    case 15: return 1;          /* GPU_OVERLAP */
    case 16: return 132;        /* MULTIPROCESSOR_COUNT */
    case 19: return 1;          /* CAN_MAP_HOST_MEMORY */
    case 20: return 0;          /* COMPUTE_MODE_DEFAULT */
    case 31: return 1;          /* CONCURRENT_KERNELS */
    case 33: return (int)driver.device[d].pci_index + 1; /* PCI_BUS_ID */
    case 36: return 2619000;    /* MEMORY_CLOCK_RATE, kHz */
    case 37: return 5120;       /* GLOBAL_MEMORY_BUS_WIDTH, bits */
    case 38: return 52428800;   /* L2_CACHE_SIZE */
    case 39: return 2048;       /* MAX_THREADS_PER_MULTIPROCESSOR */
    case 40: return 3;          /* ASYNC_ENGINE_COUNT */
    case 41: return 1;          /* UNIFIED_ADDRESSING */
    case 75: return 8;          /* COMPUTE_CAPABILITY_MAJOR */
    case 76: return 0;
    case 78: return 1;          /* STREAM_PRIORITIES_SUPPORTED */
    case 81: return 167936;     /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
    case 82: return 65536;      /* MAX_REGISTERS_PER_MULTIPROCESSOR */
    case 83: return 1;          /* MANAGED_MEMORY */
    case 89: return 1;          /* CONCURRENT_MANAGED_ACCESS */
    case 90: return 1;          /* COMPUTE_PREEMPTION_SUPPORTED */
    case 91: return 1;          /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 97: return 166912;     /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    case 99: return 1;          /* HOST_REGISTER_SUPPORTED */
    case 102: return 1;         /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 103: return 1;         /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    case 106: return 32;        /* MAX_BLOCKS_PER_MULTIPROCESSOR */
    case 111: return 1024;      /* RESERVED_SHARED_MEMORY_PER_BLOCK */
    case 115: return 1;         /* MEMORY_POOLS_SUPPORTED */
    case 142: case 144: return 1; /* HOST_NUMA_MEMORY_POOLS_SUPPORTED, HOST_MEMORY_POOLS_SUPPORTED */
    case 119: return HANDLE_TYPE_FD; /* MEMPOOL_SUPPORTED_HANDLE_TYPES */
    default: return 0;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int number, CUdevice d)
{
    REQUIRE(value);
    DEVICE(d);
    if (number < 1 || number > 200)
        return CUDA_ERROR_INVALID_VALUE;
    *value = device_attribute(number, d);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice d)
{
    DEVICE(d);
    if (!major || !minor)
        return CUDA_ERROR_INVALID_VALUE;
    *major = device_attribute(75, d);
    *minor = device_attribute(76, d);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetProperties(int *properties, CUdevice d)
{
    DEVICE(d);
    if (!properties)
        return CUDA_ERROR_INVALID_VALUE;
    /* CUdevprop: threads per block, block xyz, grid xyz, shared, const, warp, pitch, registers,
     * clock, texture alignment. */
    static const int numbers[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14};
    for (unsigned i = 0; i < 14; i++)
        properties[i] = device_attribute(numbers[i], d);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice d, CUdevice peer)
{
    DEVICE(d);
    DEVICE(peer);
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    *can = d != peer;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetP2PAttribute(int *value, int attrib, CUdevice d, CUdevice peer)
{
    DEVICE(d);
    DEVICE(peer);
    if (!value || d == peer)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attrib == 2; /* only ACCESS_SUPPORTED is 1: the emulation has no peer atomics and no
                           * peer arrays */
    return CUDA_SUCCESS;
}
