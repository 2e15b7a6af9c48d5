/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * guard_calls DRIVER ROUNDS: nanoseconds of calls of every kind that the guard has, through the
 * guard and straight to the driver (the library at DRIVER, which is the one that the guard has
 * opened), in turns in one process. Prints lines of KIND CALL GUARD BARE.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CALLS 10000

static void *need(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s is not there\n", name);
        exit(2);
    }
    return found;
}

static void check(int error)
{
    if (error) {
        fprintf(stderr, "the driver says %d\n", error);
        exit(2);
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

typedef int (*function)(void *, long);

/* Returns the nanoseconds of a call. All calls of this program but the launch accept these two
 * arguments, and return 0. */
static double round_of(function call, void *a, long b)
{
    double begin = now();
    for (int i = 0; i < CALLS; i++)
        check(call(a, b));
    return (now() - begin) / CALLS;
}

typedef int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void *, void *);

/* Returns the nanoseconds of a launch. The launch names no function, so the driver refuses it at
 * once. So most of this time is the way of the call to the driver. */
static double launches_of(function call)
{
    launch submit = (launch)call;
    double begin = now();
    for (int i = 0; i < CALLS; i++)
        if (!submit(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL))
            exit(2);
    return (now() - begin) / CALLS;
}

int main(int argc, char **argv)
{
    void *context, *out[4], *guard = dlopen("libcuda.so.1", RTLD_NOW);
    if (argc != 3 || !guard)
        return 2;
    check(((int (*)(unsigned))need(guard, "cuInit"))(0));
    check(((int (*)(void **, int))need(guard, "cuDevicePrimaryCtxRetain"))(&context, 0));
    check(((int (*)(void *))need(guard, "cuCtxSetCurrent"))(context));
    void *driver = dlopen(argv[1], RTLD_NOW);
    if (!driver)
        return 2;
    const struct {
        const char *kind, *name;
        void *a;
        long b;
    } rows[] = {
        {"free", "cuCtxGetFlags", out, 0},
        {"gate", "cuCtxGetLimit", out, 1 /* CU_LIMIT_PRINTF_FIFO_SIZE */},
        {"peek", "cuDriverGetVersion", out, 0},
        {"peek", "cuCtxGetCurrent", out, 0},
        {"launch", "cuLaunchKernel", NULL, 0},
        {"wait", "cuCtxSetLimit", (void *)1, 1 << 20},
        {"wrap", "cuStreamQuery", NULL, 0},
        {"wrap", "cuDeviceGetCount", out, 0},
    };
    int rounds = atoi(argv[2]);
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        function through, bare;
        *(void **)&through = need(guard, rows[r].name);
        *(void **)&bare = need(driver, rows[r].name);
        for (int i = 0; i < rounds; i++) {
            double t[2];
            for (int half = 0; half < 2; half++) {
                int first = (i + half) % 2;
                function call = first ? bare : through;
                t[first] = strcmp(rows[r].kind, "launch") ? round_of(call, rows[r].a, rows[r].b)
                                                          : launches_of(call);
            }
            printf("%s %s %.2f %.2f\n", rows[r].kind, rows[r].name, t[0], t[1]);
        }
    }
    return 0;
}
