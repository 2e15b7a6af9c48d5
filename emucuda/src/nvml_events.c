/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * NVML: event sets. They report only one event: the critical Xid of a device that is lost.
 */
#include "nvml.h"

#include <stdlib.h>
#include <string.h>

/* The time between two checks of a waiting event set for an injected loss. Every broker always
 * waits in an event set, and one test machine may run dozens of brokers. With a shorter time, these
 * checks would take more processor time than the broker's samples. */
#define POLL_NS 50000000ull

struct event_set {
    uint64_t magic;
    uint64_t registered; /* one bit for each device */
    uint32_t seen[MAX_DEVICES];
};

#define MAGIC_SET 0x6e766d6c73657431ull

EXPORT nvmlReturn nvmlEventSetCreate(struct event_set **out)
{
    INITIALISED;
    REQUIRE(out);
    *out = calloc(1, sizeof **out);
    if (!*out)
        return NVML_ERROR_MEMORY;
    (*out)->magic = MAGIC_SET;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlEventSetFree(struct event_set *set)
{
    INITIALISED;
    REQUIRE(set && set->magic == MAGIC_SET);
    set->magic = 0;
    free(set);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceGetSupportedEventTypes(nvmlDevice d, unsigned long long *types)
{
    DEVICE(d);
    (void)index;
    REQUIRE(types);
    *types = EVENT_XID;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn nvmlDeviceRegisterEvents(nvmlDevice d, unsigned long long types, struct event_set *set)
{
    DEVICE(d);
    REQUIRE(set && set->magic == MAGIC_SET);
    if (types & ~EVENT_XID)
        return NVML_ERROR_NOT_SUPPORTED;
    if (types) {
        set->seen[index] = machine->xid_sequence[index]; /* report only events after this one */
        set->registered |= 1ull << index;
    }
    return NVML_SUCCESS;
}

static bool poll_events(struct event_set *set, nvmlEventData *out)
{
    fault_active(FAULT_DEVICE_LOST, -1, -1, NULL); /* this reads the faults file again if it has
                                                    * changed */
    for (unsigned i = 0; i < machine->spec.count; i++) {
        if (!(set->registered >> i & 1) || set->seen[i] == machine->xid_sequence[i])
            continue;
        set->seen[i] = machine->xid_sequence[i];
        *out = (nvmlEventData){nvml_handle(i), EVENT_XID, machine->xid_code[i], 0xffffffffu, 0xffffffffu};
        return true;
    }
    return false;
}

EXPORT nvmlReturn nvmlEventSetWait_v2(struct event_set *set, nvmlEventData *out, unsigned timeout_ms)
{
    INITIALISED;
    REQUIRE(set && set->magic == MAGIC_SET && out);
    uint64_t deadline = now_ns() + timeout_ms * 1000000ull;
    for (;;) {
        if (poll_events(set, out))
            return NVML_SUCCESS;
        uint64_t now = now_ns();
        if (now >= deadline)
            return NVML_ERROR_TIMEOUT;
        sleep_until(now + POLL_NS < deadline ? now + POLL_NS : deadline);
    }
}

EXPORT nvmlReturn nvmlEventSetWait(struct event_set *set, nvmlEventData *out, unsigned timeout_ms)
{
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
