/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Modules and kernels, for loading and launching.
 */
#ifndef EMUCUDA_MODULE_H
#define EMUCUDA_MODULE_H

#include "driver.h"

#define MAX_PARAMS 64

struct kernel {
    uint32_t magic;
    struct module *module;
    char *name;
    uint32_t params;
    uint32_t offset[MAX_PARAMS], size[MAX_PARAMS];
    int dynamic_shared;
    struct code *code[MAX_DEVICES]; /* compiled for a launch on the device: ptx/ */
    uint64_t storage[MAX_DEVICES];  /* where its module's variables were */
    struct kernel *next;
};

struct module {
    uint32_t magic;
    unsigned count;
    struct kernel *kernels; /* in the order of the text */
    struct ptx *ptx;
    pthread_mutex_t compiling;
    struct module *next;
};

/* launch.c: the parameters as a list, made in `list` if they came as a buffer. */
void **launch_params(CUfunction k, void **params, void **extra, void **list);

bool launch_bad(const struct launch *launch); /* launch.c */

static inline bool kernel_bad(const struct kernel *k) { return !k || k->magic != MAGIC_KERNEL; }

#endif
