/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML: the board. The values are plausible constants of a data-centre GPU; none of them was
 * measured.
 */
#include "nvml.h"

#include <string.h>

/* Defines a call that returns one unsigned value, the same for all devices. */
#define CONSTANT(name, value)                             \
    EXPORT nvmlReturn name(nvmlDevice d, unsigned *out)   \
    {                                                     \
        DEVICE(d);                                        \
        (void)index;                                      \
        REQUIRE(out);                                     \
        *out = (value);                                   \
        return NVML_SUCCESS;                              \
    }
CONSTANT(nvmlDeviceGetPersistenceMode, 1)
CONSTANT(nvmlDeviceGetComputeMode, 0)
CONSTANT(nvmlDeviceGetDisplayMode, 0)
CONSTANT(nvmlDeviceGetDisplayActive, 0)
CONSTANT(nvmlDeviceGetPowerManagementMode, 1)
CONSTANT(nvmlDeviceGetPowerManagementLimit, 700000)        /* mW */
CONSTANT(nvmlDeviceGetPowerManagementDefaultLimit, 700000)
CONSTANT(nvmlDeviceGetEnforcedPowerLimit, 700000)
CONSTANT(nvmlDeviceGetBoardId, 0)
CONSTANT(nvmlDeviceGetMultiGpuBoard, 0)
CONSTANT(nvmlDeviceGetBrand, 2)        /* Tesla */
CONSTANT(nvmlDeviceGetArchitecture, 7) /* Ampere */
CONSTANT(nvmlDeviceGetNumGpuCores, 16896)
CONSTANT(nvmlDeviceGetMemoryBusWidth, 5120)
CONSTANT(nvmlDeviceGetCurrPcieLinkGeneration, 5)
CONSTANT(nvmlDeviceGetMaxPcieLinkGeneration, 5)
CONSTANT(nvmlDeviceGetCurrPcieLinkWidth, 16)
CONSTANT(nvmlDeviceGetMaxPcieLinkWidth, 16)

static unsigned busy(unsigned index)
{
    unsigned gpu = 0;
    uint64_t now = now_ns();
    machine_lock();
    for (unsigned i = 0; i < machine->slots; i++)
        if (machine->slot[i].pid)
            gpu += busy_percent(&machine->slot[i], index, now);
    machine_unlock();
    return gpu > 100 ? 100 : gpu;
}

EXPORT nvmlReturn nvmlDeviceGetPowerUsage(nvmlDevice d, unsigned *out)
{
    DEVICE(d);
    REQUIRE(out);
    *out = 75000 + 5000 * busy(index); /* mW: from idle power to nearly the limit */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetTemperature(nvmlDevice d, int sensor, unsigned *out)
{
    DEVICE(d);
    REQUIRE(out && !sensor);
    *out = 33 + busy(index) / 4; /* degrees Celsius */
    return NVML_SUCCESS;
}

/* `value` is {version, sensor, temperature}. */
EXPORT nvmlReturn nvmlDeviceGetTemperatureV(nvmlDevice d, unsigned *value)
{
    DEVICE(d);
    (void)index;
    REQUIRE(value);
    return nvmlDeviceGetTemperature(d, (int)value[1], &value[2]);
}

EXPORT nvmlReturn nvmlDeviceGetTemperatureThreshold(nvmlDevice d, int kind, unsigned *out)
{
    DEVICE(d);
    (void)index;
    REQUIRE(out);
    *out = kind == 0 ? 95 : 92;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetPerformanceState(nvmlDevice d, int *out)
{
    DEVICE(d);
    (void)index;
    REQUIRE(out);
    *out = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetPowerState(nvmlDevice d, int *out) { return nvmlDeviceGetPerformanceState(d, out); }

EXPORT nvmlReturn nvmlDeviceGetMaxClockInfo(nvmlDevice d, int kind, unsigned *out)
{
    static const unsigned mhz[] = {1980, 1980, 2619, 1545}; /* graphics, SM, memory, video */
    DEVICE(d);
    (void)index;
    REQUIRE(out && kind >= 0 && kind < 4);
    *out = mhz[kind];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetClockInfo(nvmlDevice d, int kind, unsigned *out)
{
    return nvmlDeviceGetMaxClockInfo(d, kind, out);
}

EXPORT nvmlReturn nvmlDeviceGetMigMode(nvmlDevice d, unsigned *current, unsigned *pending)
{
    DEVICE(d);
    (void)index;
    REQUIRE(current && pending);
    *current = *pending = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetMaxMigDeviceCount(nvmlDevice d, unsigned *count)
{
    DEVICE(d);
    (void)index;
    REQUIRE(count);
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceIsMigDeviceHandle(nvmlDevice d, unsigned *out)
{
    DEVICE(d);
    (void)index;
    REQUIRE(out);
    *out = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice d, unsigned i, nvmlDevice *out)
{
    DEVICE(d);
    (void)index;
    (void)i;
    (void)out;
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn nvmlDeviceGetPcieThroughput(nvmlDevice d, int counter, unsigned *out)
{
    DEVICE(d);
    (void)index;
    (void)counter;
    REQUIRE(out);
    *out = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetP2PStatus(nvmlDevice a, nvmlDevice b, int kind, int *status)
{
    DEVICE(a);
    REQUIRE(status && b != a);
    (void)index;
    (void)kind;
    *status = 0;
    return NVML_SUCCESS;
}

/* Defines a call for a feature that this board lacks. The call returns NOT_SUPPORTED. If no file of
 * this folder defines a call, the library has no such call, and a client gets "function not
 * found". */
#define ABSENT(name)                                                             \
    EXPORT nvmlReturn name(nvmlDevice d, void *a, void *b, void *c)              \
    {                                                                            \
        DEVICE(d);                                                               \
        (void)index;                                                             \
        (void)a;                                                                 \
        (void)b;                                                                 \
        (void)c;                                                                 \
        return NVML_ERROR_NOT_SUPPORTED;                                         \
    }
ABSENT(nvmlDeviceGetFanSpeed)
ABSENT(nvmlDeviceGetFanSpeed_v2)
ABSENT(nvmlDeviceGetNumFans)
ABSENT(nvmlDeviceGetEccMode)
ABSENT(nvmlDeviceGetDefaultEccMode)
ABSENT(nvmlDeviceGetTotalEccErrors)
ABSENT(nvmlDeviceGetMemoryErrorCounter)
ABSENT(nvmlDeviceGetSerial)
ABSENT(nvmlDeviceGetBoardPartNumber)
ABSENT(nvmlDeviceGetVbiosVersion)
ABSENT(nvmlDeviceGetInforomVersion)
ABSENT(nvmlDeviceGetGpuInstanceId)
ABSENT(nvmlDeviceGetComputeInstanceId)
ABSENT(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)
ABSENT(nvmlDeviceGetGpuOperationMode)
ABSENT(nvmlDeviceGetDriverModel)
ABSENT(nvmlDeviceGetDriverModel_v2)
ABSENT(nvmlDeviceGetTotalEnergyConsumption)
ABSENT(nvmlDeviceGetAccountingMode)
ABSENT(nvmlDeviceGetAccountingStats)
ABSENT(nvmlDeviceGetAccountingPids)
ABSENT(nvmlDeviceGetRunningProcessDetailList)
ABSENT(nvmlDeviceGetNvLinkState)
ABSENT(nvmlDeviceGetNvLinkCapability)
ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlDeviceGetNvLinkVersion)
ABSENT(nvmlDeviceGetFieldValues)
ABSENT(nvmlDeviceGetConfComputeMemSizeInfo)
ABSENT(nvmlDeviceGetVirtualizationMode)
ABSENT(nvmlDeviceSetMigMode)
