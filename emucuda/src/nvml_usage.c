/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML: memory, processes and utilisation.
 */
#include "nvml.h"

#include <string.h>
#include <time.h>

static uint64_t used_bytes(unsigned index) { return machine_capacity() - machine_free(index); }

EXPORT nvmlReturn nvmlDeviceGetMemoryInfo_v2(nvmlDevice d, nvmlMemory_v2 *out)
{
    DEVICE(d);
    REQUIRE(out);
    if (out->version != MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    out->used = used_bytes(index);
    out->reserved = machine->spec.reserved;
    out->total = machine->spec.memory;
    out->free = out->total - out->reserved - out->used;
    return NVML_SUCCESS;
}

/* The first version of this call has no field `reserved`, so those bytes count as used. */
EXPORT nvmlReturn nvmlDeviceGetMemoryInfo(nvmlDevice d, nvmlMemory *out)
{
    DEVICE(d);
    REQUIRE(out);
    out->total = machine->spec.memory;
    out->used = used_bytes(index) + machine->spec.reserved;
    out->free = out->total - out->used;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetBAR1MemoryInfo(nvmlDevice d, nvmlMemory *out)
{
    DEVICE(d);
    (void)index;
    REQUIRE(out);
    *out = (nvmlMemory){.total = 1ull << 36, .free = (1ull << 36) - MIB, .used = MIB};
    return NVML_SUCCESS;
}

/* The quirks that change NVML's list of processes. */
struct view {
    bool late, lag, keeps, less;
    struct fault late_by, lag_by, kept, missing;
    uint64_t now;
};

static struct view view_of(unsigned index)
{
    struct view v = {.now = now_ns()};
    v.late = fault_active(FAULT_NVML_LATE, -1, (int)index, &v.late_by);
    v.lag = fault_active(FAULT_NVML_LAG, -1, (int)index, &v.lag_by);
    v.keeps = fault_active(FAULT_SUSPEND_KEEPS, -1, (int)index, &v.kept);
    v.less = fault_active(FAULT_NVML_LESS, -1, (int)index, &v.missing);
    return v;
}

static bool about(const struct fault *f, const struct slot *s) { return f->pid < 0 || f->pid == slot_number(s); }

/* Whether NVML lists a process, and with how many bytes. */
static bool listed(const struct slot *s, unsigned index, const struct view *v, uint64_t *bytes)
{
    *bytes = s->used[index];
    if (!s->pid || !(*bytes || s->had[index]))
        return false;
    if (s->had[index]) { /* by default NVML does not list a suspended process */
        bool kept = v->keeps && about(&v->kept, s);
        if (v->lag && about(&v->lag_by, s) && v->now - s->suspended_at < v->lag_by.ms * 1000000u)
            *bytes = s->had[index];
        else if (!kept)
            return *bytes > 0;
    }
    if (v->late && about(&v->late_by, s) && v->now - s->charged_at < v->late_by.ms * 1000000u)
        return false;
    if (v->less && about(&v->missing, s))
        *bytes -= *bytes < v->missing.bytes ? *bytes : v->missing.bytes;
    return true;
}

/* The quirk nvml-host-pids adds this number to a pid. The number is as large as Linux's limit of
 * pids (PID_MAX_LIMIT), so no process has the sum as its pid. */
#define HOST_NUMBERS (1 << 22)

/* Returns the pid that NVML lists for a process. This is the process's pid in the caller's PID
 * namespace. With the quirk nvml-host-pids, it is the process's pid on the host. */
static unsigned number_of(unsigned pid, unsigned index)
{
    struct fault fault;
    if (!fault_active(FAULT_NVML_HOST_PIDS, (pid_t)pid, (int)index, &fault))
        return pid;
    return fault.number < 0 ? pid + HOST_NUMBERS : (unsigned)fault.number;
}

/* Lists the processes that have a context on the device, with their bytes. Returns the number of
 * these processes. By default a suspended process does not count. */
static unsigned processes(unsigned index, nvmlProcessInfo *out, unsigned room)
{
    unsigned count = 0;
    uint64_t bytes;
    if (fault_active(FAULT_NVML_MISSING_PIDS, -1, (int)index, NULL))
        return 0;
    struct view view = view_of(index);
    machine_reap();
    machine_lock();
    for (unsigned i = 0; i < machine->slots; i++) {
        const struct slot *s = &machine->slot[i];
        pid_t pid = listed(s, index, &view, &bytes) ? slot_number(s) : 0;
        if (!pid) /* a process that has no pid in this namespace is not listed */
            continue;
        if (count < room)
            out[count] = (nvmlProcessInfo){(unsigned)pid, bytes, 0xffffffffu, 0xffffffffu};
        count++;
    }
    machine_unlock();
    for (unsigned i = 0; i < count && i < room; i++)
        out[i].pid = number_of(out[i].pid, index);
    return count;
}

EXPORT nvmlReturn nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice d, unsigned *count, nvmlProcessInfo *out)
{
    DEVICE(d);
    REQUIRE(count);
    unsigned room = out ? *count : 0;
    *count = processes(index, out, room);
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice d, unsigned *count, nvmlProcessInfo *out)
{
    return nvmlDeviceGetComputeRunningProcesses_v3(d, count, out);
}

EXPORT nvmlReturn nvmlDeviceGetComputeRunningProcesses(nvmlDevice d, unsigned *count, nvmlProcessInfo_v1 *out)
{
    DEVICE(d);
    REQUIRE(count);
    nvmlProcessInfo all[MAX_SLOTS];
    unsigned room = out ? *count : 0;
    *count = processes(index, all, MAX_SLOTS);
    for (unsigned i = 0; i < *count && i < room; i++)
        out[i] = (nvmlProcessInfo_v1){all[i].pid, all[i].usedGpuMemory};
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn nobody(nvmlDevice d, unsigned *count)
{
    DEVICE(d);
    (void)index;
    REQUIRE(count);
    *count = 0;
    return NVML_SUCCESS;
}

#define NOBODY(name)                                                    \
    EXPORT nvmlReturn name(nvmlDevice d, unsigned *count, void *out)    \
    {                                                                   \
        (void)out;                                                      \
        return nobody(d, count);                                        \
    }
NOBODY(nvmlDeviceGetGraphicsRunningProcesses)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v2)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v3)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v3)

EXPORT nvmlReturn nvmlDeviceGetUtilizationRates(nvmlDevice d, nvmlUtilization *out)
{
    DEVICE(d);
    REQUIRE(out);
    unsigned gpu = 0;
    uint64_t now = now_ns();
    machine_lock();
    for (unsigned i = 0; i < machine->slots; i++)
        if (machine->slot[i].pid)
            gpu += busy_percent(&machine->slot[i], index, now);
    machine_unlock();
    *out = (nvmlUtilization){gpu > 100 ? 100 : gpu, gpu > 100 ? 50 : gpu / 2};
    return NVML_SUCCESS;
}

static uint64_t wall_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000ull + (uint64_t)t.tv_nsec / 1000;
}

/* Returns one sample for each process that had work in the last second. */
static unsigned samples(unsigned index, nvmlProcessUtilizationSample *out, unsigned room)
{
    unsigned count = 0;
    uint64_t now = now_ns(), stamp = wall_us();
    if (fault_active(FAULT_NVML_MISSING_PIDS, -1, (int)index, NULL))
        return 0;
    machine_reap();
    machine_lock();
    for (unsigned i = 0; i < machine->slots; i++) {
        const struct slot *s = &machine->slot[i];
        unsigned percent = s->pid && s->used[index] ? busy_percent(s, index, now) : 0;
        pid_t pid = percent ? slot_number(s) : 0;
        if (!pid)
            continue;
        if (count < room)
            out[count] = (nvmlProcessUtilizationSample){(unsigned)pid, stamp, percent, percent / 2, 0, 0};
        count++;
    }
    machine_unlock();
    for (unsigned i = 0; i < count && i < room; i++)
        out[i].pid = number_of(out[i].pid, index);
    return count;
}

EXPORT nvmlReturn nvmlDeviceGetProcessUtilization(nvmlDevice d, nvmlProcessUtilizationSample *out,
                                                  unsigned *count, unsigned long long since)
{
    DEVICE(d);
    REQUIRE(count);
    (void)since;
    unsigned room = out ? *count : 0;
    *count = samples(index, out, room);
    if (!*count)
        return NVML_ERROR_NOT_FOUND; /* as the driver does if no work ran */
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice d, nvmlProcessesUtilizationInfo *info)
{
    DEVICE(d);
    REQUIRE(info);
    nvmlProcessUtilizationSample all[MAX_SLOTS];
    unsigned room = info->procUtilArray ? info->processSamplesCount : 0;
    unsigned count = samples(index, all, MAX_SLOTS);
    info->processSamplesCount = count;
    if (!count)
        return NVML_ERROR_NOT_FOUND;
    if (count > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < count; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo){
            all[i].timeStamp, all[i].pid, all[i].smUtil, all[i].memUtil, 0, 0, 0, 0};
    return NVML_SUCCESS;
}

static nvmlReturn idle_engine(nvmlDevice d, unsigned *percent, unsigned *period)
{
    DEVICE(d);
    (void)index;
    REQUIRE(percent);
    *percent = 0;
    if (period)
        *period = 1000000;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetEncoderUtilization(nvmlDevice d, unsigned *percent, unsigned *period)
{
    return idle_engine(d, percent, period);
}

EXPORT nvmlReturn nvmlDeviceGetDecoderUtilization(nvmlDevice d, unsigned *percent, unsigned *period)
{
    return idle_engine(d, percent, period);
}
