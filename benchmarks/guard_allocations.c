/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * guard_allocations DRIVER ROUNDS: nanoseconds of allocating and of freeing, through the guard and
 * straight to the driver (the library at DRIVER, which is the one that the guard has opened), in
 * turns in one process. Prints lines of NAME ALLOC_GUARD ALLOC_BARE FREE_GUARD FREE_BARE, and of what
 * a refusal takes: refused GUARD BARE.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define AT_ONCE 64

typedef unsigned long long address;

struct calls {
    int (*alloc)(address *, size_t);
    int (*release)(address);
    int (*alloc_async)(address *, size_t, void *);
    int (*free_async)(address, void *);
};

static void *need(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s is not there\n", name);
        exit(2);
    }
    return found;
}

static struct calls look_up(void *library)
{
    return (struct calls){need(library, "cuMemAlloc_v2"), need(library, "cuMemFree_v2"),
                          need(library, "cuMemAllocAsync"), need(library, "cuMemFreeAsync")};
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void check(int error)
{
    if (error) {
        fprintf(stderr, "the driver says %d\n", error);
        exit(2);
    }
}

static void *stream;

/* Returns the nanoseconds of an allocation of 1 TiB, which the guard and the driver both refuse. */
static double refused(const struct calls *c)
{
    address p;
    double begin = now();
    for (int i = 0; i < AT_ONCE; i++)
        if (c->alloc(&p, (size_t)1 << 40) != 2) {
            fprintf(stderr, "it is not refused\n");
            exit(2);
        }
    return (now() - begin) / AT_ONCE;
}

static void round_of(const struct calls *c, size_t bytes, int async, double *alloc, double *release)
{
    address p[AT_ONCE];
    double begin = now();
    for (int i = 0; i < AT_ONCE; i++)
        check(async ? c->alloc_async(&p[i], bytes, stream) : c->alloc(&p[i], bytes));
    double middle = now();
    for (int i = 0; i < AT_ONCE; i++)
        check(async ? c->free_async(p[i], stream) : c->release(p[i]));
    double end = now();
    *alloc = (middle - begin) / AT_ONCE;
    *release = (end - middle) / AT_ONCE;
}

int main(int argc, char **argv)
{
    void *context, *guard = dlopen("libcuda.so.1", RTLD_NOW);
    if (argc != 3 || !guard)
        return 2;
    check(((int (*)(unsigned))need(guard, "cuInit"))(0));
    check(((int (*)(void **, int))need(guard, "cuDevicePrimaryCtxRetain"))(&context, 0));
    check(((int (*)(void *))need(guard, "cuCtxSetCurrent"))(context));
    check(((int (*)(void **, unsigned))need(guard, "cuStreamCreate"))(&stream, 1));
    void *driver = dlopen(argv[1], RTLD_NOW);
    if (!driver)
        return 2;
    static const struct {
        const char *name;
        size_t bytes;
        int async;
    } rows[] = {{"cuMemAlloc-512", 512, 0}, {"cuMemAlloc-2MiB", 2 << 20, 0}, {"cuMemAllocAsync-512", 512, 1},
                {"cuMemAllocAsync-2MiB", 2 << 20, 1}};
    struct calls through = look_up(guard), bare = look_up(driver);
    int rounds = atoi(argv[2]);
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
        for (int i = 0; i < rounds; i++) {
            double t[4];
            /* The second measurement of a round finds warm tables. So the guard and the driver
             * take turns as the first. */
            for (int half = 0; half < 2; half++)
                if ((i + half) % 2)
                    round_of(&through, rows[r].bytes, rows[r].async, &t[0], &t[2]);
                else
                    round_of(&bare, rows[r].bytes, rows[r].async, &t[1], &t[3]);
            printf("%s %.1f %.1f %.1f %.1f\n", rows[r].name, t[0], t[1], t[2], t[3]);
        }
    for (int i = 0; i < rounds; i++)
        printf("refused %.1f %.1f\n", refused(&through), refused(&bare));
    return 0;
}
