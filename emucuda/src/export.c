/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuGetExportTable. NVIDIA's runtime reaches the driver through tables that are private to NVIDIA.
 * The emulation lacks these tables, so NVIDIA's runtime reports that the driver is not usable. The
 * emulation has a separate table. It shows a program that this driver is emulated, and lets the
 * program find the bytes of device memory.
 */
#include "driver.h"

#include <string.h>

/* Returns the address at which the host can read and write the bytes that a built-in kernel uses
 * during its launch. NULL: the address is not device memory. */
static void *bytes_at(uint64_t address, uint64_t size)
{
    void *host = NULL;
    pthread_mutex_lock(&driver.lock);
    bool known = driver.initialised && !resolve(address, size, &host, NULL);
    pthread_mutex_unlock(&driver.lock);
    return known ? host : NULL;
}

static const char own_id[16] = "emucuda: devices";
static const struct {
    size_t size;
    void *(*bytes_at)(uint64_t address, uint64_t size);
} own = {sizeof own, bytes_at};

EXPORT CUresult cuGetExportTable(const void **table, const void *id)
{
    REQUIRE(table && id);
    bool found = !memcmp(id, own_id, sizeof own_id);
    *table = found ? &own : NULL;
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
