/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuInit and CUDA_VISIBLE_DEVICES.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

extern uint32_t *driver_alive;
static int init_result = -1;

/* Returns a device by its index, its UUID, or a unique beginning of its UUID. -1: no such
 * device. */
static int device_by_text(const char *text, size_t length)
{
    if (length >= 4 && !strncasecmp(text, "GPU-", 4)) {
        int found = -1;
        for (unsigned i = 0; i < machine->spec.count; i++) {
            char uuid[41];
            uuid_text(machine->uuid[i], uuid);
            if (length <= 40 && !strncasecmp(uuid, text, length)) {
                if (found >= 0)
                    return -1;
                found = (int)i;
            }
        }
        return found;
    }
    uint64_t index = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9' || index > MAX_DEVICES)
            return -1;
        index = index * 10 + (unsigned)(text[i] - '0');
    }
    return length && index < machine->spec.count ? (int)index : -1;
}

/* The list ends at its first invalid entry. If the list names a device twice, no device is
 * visible. */
static void choose_visible(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    bool taken[MAX_DEVICES] = {false};
    driver.count = 0;
    if (!text) {
        for (unsigned i = 0; i < machine->spec.count; i++)
            driver.device[driver.count++].physical = i;
        return;
    }
    for (;;) {
        text += strspn(text, " ");
        size_t length = strcspn(text, ", ");
        int device = device_by_text(text, length);
        if (device < 0)
            return;
        if (taken[device]) {
            driver.count = 0;
            return;
        }
        taken[device] = true;
        driver.device[driver.count++].physical = (uint32_t)device;
        text += length;
        text += strspn(text, " ");
        if (*text++ != ',')
            return;
    }
}

static void in_forked_child(void)
{
    /* Close the parent's device files. A child with open files could outlive its parent and keep
     * the parent's device memory. */
    for (int i = 0; i < driver.count; i++)
        if (driver.device[i].fd >= 0)
            close(driver.device[i].fd);
}

static CUresult initialise(void)
{
    if (!driver_alive) {
        uint32_t *alive = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (alive == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        madvise(alive, 4096, MADV_WIPEONFORK);
        *alive = 1;
        driver_alive = alive;
    }
    switch (machine_open()) {
    case MACHINE_OK:
        break;
    case MACHINE_CONFLICT:
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    default:
        return CUDA_ERROR_NO_DEVICE;
    }
    choose_visible();
    if (!driver.count)
        return CUDA_ERROR_NO_DEVICE;
    for (int i = 0; i < driver.count; i++)
        driver.device[i].pci_index = driver.device[i].physical;
    CUresult result = arena_init();
    if (result)
        return result;
    driver.slot = machine_slot_take();
    if (!driver.slot)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_atfork(NULL, NULL, in_forked_child);
    driver.initialised = true;
    machine_device_file(true);
    for (int i = 0; i < driver.count; i++)
        machine_gpu_file(driver.device[i].physical);
    /* Observed with driver 580.159.04: cuInit alone starts the process's restore thread, and a
     * suspend of such a process frees 0 bytes. */
    if (fault_active(FAULT_INIT_NOT_ENOUGH, getpid(), -1, NULL))
        return CUDA_SUCCESS;
    return service_start();
}

EXPORT CUresult cuInit(unsigned flags)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    /* This process is the child of a fork(). If cuInit succeeded in the parent, cuInit in the child
     * returns NOT_INITIALIZED with all drivers (reported, not observed). If cuInit found no device
     * in the parent, cuInit in the child returns OPERATING_SYSTEM with drivers 550 and 555
     * (observed). */
    if (driver_alive && !*driver_alive)
        return driver.initialised ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_lock(&once);
    /* Try again after two errors. After "no device", driver 580.159.04 looks for devices again at
     * the next call, and reads CUDA_VISIBLE_DEVICES again. A conflict with another machine in the
     * state directory may also have ended. */
    if (init_result < 0 || init_result == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH || init_result == CUDA_ERROR_NO_DEVICE)
        init_result = initialise();
    CUresult result = init_result;
    pthread_mutex_unlock(&once);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
