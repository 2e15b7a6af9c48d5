/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML: initialising the library, and finding devices.
 */
#include "nvml.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static int references;
static struct nvml_device devices[MAX_DEVICES];
static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

nvmlReturn nvml_check(void)
{
    if (__atomic_load_n(&references, __ATOMIC_ACQUIRE) <= 0)
        return NVML_ERROR_UNINITIALIZED;
    machine_wait_awake();
    return NVML_SUCCESS;
}

nvmlDevice nvml_handle(unsigned index) { return &devices[index]; }

nvmlReturn nvml_device(nvmlDevice d, unsigned *index)
{
    INITIALISED;
    if (d < devices || d >= devices + machine->spec.count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *index = (unsigned)(d - devices);
    if (fault_active(FAULT_NVML_WAITS, -1, (int)*index, NULL))
        machine_wait_still();
    return fault_active(FAULT_DEVICE_LOST, -1, (int)*index, NULL) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn result = NVML_SUCCESS;
    pthread_mutex_lock(&init_mutex);
    switch (machine_open()) {
    case MACHINE_OK:
        machine_wait_awake();
        __atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
        machine_device_file(true);
        break;
    case MACHINE_CONFLICT:
        result = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
        break;
    default:
        result = NVML_ERROR_DRIVER_NOT_LOADED;
    }
    pthread_mutex_unlock(&init_mutex);
    return result;
}

EXPORT nvmlReturn nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
EXPORT nvmlReturn nvmlInit(void) { return nvmlInitWithFlags(0); }

/* Since driver 580, a shutdown is an error if NVML is not initialised. Older drivers returned
 * success (tests/driver_records). */
EXPORT nvmlReturn nvmlShutdown(void)
{
    pthread_mutex_lock(&init_mutex);
    nvmlReturn result = nvml_check();
    if (!result && !__atomic_sub_fetch(&references, 1, __ATOMIC_RELEASE))
        machine_device_file(false);
    pthread_mutex_unlock(&init_mutex);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn code)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
        "Resource not in correct state to perform requested operation",
        "Reset type is not supported for given device",
    };
    return code < 0 || code >= (int)(sizeof texts / sizeof *texts) ? "Unknown Error" : texts[code];
}

static nvmlReturn text(char *out, unsigned length, const char *value)
{
    REQUIRE(out);
    if (strlen(value) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    INITIALISED;
    return text(out, length, DRIVER_VERSION);
}

/* This call also works before nvmlInit. */
EXPORT nvmlReturn nvmlSystemGetNVMLVersion(char *out, unsigned length)
{
    return text(out, length, "13." DRIVER_VERSION);
}

EXPORT nvmlReturn nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    INITIALISED;
    REQUIRE(version);
    *version = CUDA_VERSION;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT nvmlReturn nvmlSystemGetProcessName(unsigned pid, char *out, unsigned length)
{
    INITIALISED;
    REQUIRE(out && length);
    char path[40];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NVML_ERROR_NOT_FOUND;
    ssize_t n = read(fd, out, length - 1); /* the file has the program's name and its arguments,
                                            * with a NUL after each; NVML reports only the program's
                                            * name */
    close(fd);
    out[n > 0 ? n : 0] = 0;
    return n > 0 ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn nvmlDeviceGetCount_v2(unsigned *count)
{
    INITIALISED;
    REQUIRE(count);
    *count = (unsigned)machine->spec.count;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }

EXPORT nvmlReturn nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice *out)
{
    INITIALISED;
    REQUIRE(out && i < machine->spec.count);
    if (fault_active(FAULT_DEVICE_LOST, -1, (int)i, NULL))
        return NVML_ERROR_GPU_IS_LOST;
    machine_gpu_file(i); /* a handle keeps the file of its GPU open */
    *out = nvml_handle(i);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetHandleByIndex(unsigned i, nvmlDevice *out)
{
    return nvmlDeviceGetHandleByIndex_v2(i, out);
}

EXPORT nvmlReturn nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice *out)
{
    INITIALISED;
    REQUIRE(uuid && out);
    for (unsigned i = 0; i < machine->spec.count; i++) {
        char name[41];
        uuid_text(machine->uuid[i], name);
        machine_gpu_file(i); /* as in NVML's manual: "NVML may initialize additional GPUs as it
                              * searches" */
        if (!strcasecmp(name, uuid))
            return nvmlDeviceGetHandleByIndex_v2(i, out);
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice *out)
{
    unsigned domain, bus, slot;
    INITIALISED;
    REQUIRE(id && out && sscanf(id, "%x:%x:%x", &domain, &bus, &slot) == 3);
    if (domain || slot || bus < 1 || bus > machine->spec.count)
        return NVML_ERROR_NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, out);
}

EXPORT nvmlReturn nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice *out)
{
    return nvmlDeviceGetHandleByPciBusId_v2(id, out);
}

EXPORT nvmlReturn nvmlDeviceGetName(nvmlDevice d, char *out, unsigned length)
{
    DEVICE(d);
    (void)index;
    char name[64];
    device_name(name, sizeof name);
    return text(out, length, name);
}

EXPORT nvmlReturn nvmlDeviceGetUUID(nvmlDevice d, char *out, unsigned length)
{
    DEVICE(d);
    char name[41];
    uuid_text(machine->uuid[index], name);
    return text(out, length, name);
}

EXPORT nvmlReturn nvmlDeviceGetIndex(nvmlDevice d, unsigned *out)
{
    DEVICE(d);
    REQUIRE(out);
    *out = index;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetMinorNumber(nvmlDevice d, unsigned *out) { return nvmlDeviceGetIndex(d, out); }
EXPORT nvmlReturn nvmlDeviceGetModuleId(nvmlDevice d, unsigned *out) { return nvmlDeviceGetIndex(d, out); }

EXPORT nvmlReturn nvmlDeviceGetPciInfo_v3(nvmlDevice d, nvmlPciInfo *out)
{
    DEVICE(d);
    REQUIRE(out);
    memset(out, 0, sizeof *out);
    pci_bus_id(index, out->busId, sizeof out->busId);
    memcpy(out->busIdLegacy, out->busId + 4, 12);
    out->bus = index + 1;
    out->pciDeviceId = 0x233510de; /* vendor 10de */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetPciInfo_v2(nvmlDevice d, nvmlPciInfo *out) { return nvmlDeviceGetPciInfo_v3(d, out); }

EXPORT nvmlReturn nvmlDeviceGetCudaComputeCapability(nvmlDevice d, int *major, int *minor)
{
    DEVICE(d);
    (void)index;
    REQUIRE(major && minor);
    *major = 8;
    *minor = 0;
    return NVML_SUCCESS;
}
