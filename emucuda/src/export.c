/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * cuGetExportTable. The tables through which NVIDIA's runtime reaches the driver are private to NVIDIA,
 * and are not here: that runtime reports that the driver is not usable. The emulation has a table of its
 * own, by which a program tells this driver from a real one, and finds the bytes of device memory.
 */
#include "driver.h"

#include <string.h>

/* What a built-in kernel may read and write on the host, inside its launch. NULL: not device memory. */
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
