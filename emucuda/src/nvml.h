/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Declarations that the NVML files share.
 */
#ifndef EMUCUDA_NVML_H
#define EMUCUDA_NVML_H

#include "machine.h"
#include "nvml_abi.h"

struct nvml_device {
    unsigned index;
};

nvmlReturn nvml_check(void);                     /* whether NVML is initialised */
nvmlReturn nvml_device(nvmlDevice d, unsigned *index); /* checks that the handle is valid and that
                                                        * its device is not lost */
nvmlDevice nvml_handle(unsigned index);

#define INITIALISED                            \
    do {                                       \
        nvmlReturn check_result_ = nvml_check(); \
        if (check_result_)                     \
            return check_result_;              \
    } while (0)
/* Declares `index`, the machine index of the device. */
#define DEVICE(handle)                                           \
    unsigned index;                                              \
    do {                                                         \
        nvmlReturn device_result_ = nvml_device(handle, &index); \
        if (device_result_)                                      \
            return device_result_;                               \
    } while (0)
#define REQUIRE(condition)                       \
    do {                                         \
        if (!(condition))                        \
            return NVML_ERROR_INVALID_ARGUMENT;  \
    } while (0)

#endif
