/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * A faster suspend: host memory in huge pages, filled by several threads.
 *
 * The driver's checkpoint maps host memory for all of the process's device memory with one
 * populated mmap() (MAP_POPULATE), in pages of 4 KiB, and then copies. One thread does both. With
 * 580.159.04 on an H200, making the pages takes two thirds of the time. The process calls this
 * mmap() instead of the C library's. This mmap() gives the mapping huge pages if the kernel makes
 * them quickly, and lets several threads populate it.
 *
 * This mmap() makes all other mappings as the C library does: smaller mappings, mappings with other
 * flags, and all mappings of a process that has no context or has a slice (the broker closes the
 * gate before each suspend). Nothing else changes for the caller. The control group counts the same
 * bytes, and all bytes are zero. An error while populating is ignored, as mmap(2) documents for
 * MAP_POPULATE.
 */
#include "cuda_abi.h"
#include "guard.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define POPULATED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)
#define LEAST (32ul << 20) /* smaller mappings would gain too little time */
#define HUGE (2ul << 20)
#define STEP (16ul << 20)
/* A speed in bytes per ns. If a thread populates huge pages more slowly, small pages are as fast:
 * the kernel makes and zeroes a small page (4 KiB) in 2 to 4 us. */
#define SLOWEST 1u
#define THREADS 8
#define STACK (256ul << 10)

/* Does the same as the C library's mmap() on this platform. To call the C library's mmap(), the
 * guard would need dlsym(), which takes the loader's lock. Another thread may hold this lock and
 * wait for this thread. */
static void *map_plainly(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return (void *)syscall(SYS_mmap, at, bytes, prot, flags, fd, offset);
}

/* The processor time of this thread. On a busy machine the elapsed time would also contain the time
 * in which the thread waits for a processor. */
static uint64_t worked_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

struct part {
    char *begin;
    size_t bytes;
    pthread_t thread;
    bool started;
};

/* Populate the part in steps. If no huge page is free, the kernel moves or drops other pages to
 * make one. That can take longer than all small pages of a step, so after a slow step the rest of
 * the part gets small pages. */
static void *populate_part(void *with)
{
    struct part *part = with;
    char *at = part->begin, *end = at + part->bytes;
    size_t step = STEP;
    while (at < end) {
        size_t bytes = (size_t)(end - at) < step ? (size_t)(end - at) : step;
        uint64_t begun = worked_ns();
        if (madvise(at, bytes, MADV_POPULATE_WRITE))
            break; /* no memory is left */
        at += bytes;
        if (step == STEP && at < end && worked_ns() - begun > bytes / SLOWEST) {
            madvise(at, (size_t)(end - at), MADV_NOHUGEPAGE);
            step = SIZE_MAX;
        }
    }
    return NULL;
}

static unsigned processors(void)
{
    cpu_set_t set;
    int found = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    return found < 1 ? 1 : found > THREADS ? THREADS : (unsigned)found;
}

static void populate(char *begin, size_t bytes)
{
    struct part parts[THREADS];
    unsigned count = processors();
    size_t each = (bytes / count + HUGE) / HUGE * HUGE;
    pthread_attr_t attributes;
    sigset_t all, before;
    int cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* mmap() is not a cancellation point */
    bool threads = !pthread_attr_init(&attributes);
    if (threads)
        threads = !pthread_attr_setstacksize(&attributes, STACK);
    sigfillset(&all); /* the new threads inherit this mask, so only the program's threads get
                       * signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    char *end = begin + bytes;
    for (unsigned i = 0; i < count; i++) {
        parts[i] = (struct part){.begin = begin};
        /* Every part except the first begins at the boundary of a huge page. */
        char *until = (char *)(((uintptr_t)begin + each) / HUGE * HUGE);
        if (until > end || i + 1 == count)
            until = end;
        parts[i].bytes = (size_t)(until - begin);
        begin = until;
        if (i && parts[i].bytes)
            parts[i].started = threads && !pthread_create(&parts[i].thread, &attributes, populate_part, &parts[i]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    for (unsigned i = 0; i < count; i++)
        if (parts[i].bytes && !parts[i].started)
            populate_part(&parts[i]);
    for (unsigned i = 0; i < count; i++)
        if (parts[i].started)
            pthread_join(parts[i].thread, NULL);
    if (threads)
        pthread_attr_destroy(&attributes);
    pthread_setcancelstate(cancel, NULL);
}

EXPORT void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    if (__builtin_expect(flags != POPULATED || bytes < LEAST || prot != (PROT_READ | PROT_WRITE), 1))
        return map_plainly(at, bytes, prot, flags, fd, offset);
    if (!guard_blocked())
        return map_plainly(at, bytes, prot, flags, fd, offset);
    char *found = map_plainly(at, bytes, prot, flags & ~MAP_POPULATE, fd, offset);
    if (found == MAP_FAILED)
        return found;
    int error = errno;
    madvise(found, bytes, MADV_HUGEPAGE); /* a kernel without huge pages refuses this call, and
                                           * makes small pages */
    if (madvise(found, HUGE, MADV_POPULATE_WRITE) && errno == EINVAL) { /* too old a kernel */
        munmap(found, bytes);
        errno = error;
        return map_plainly(at, bytes, prot, flags, fd, offset);
    }
    populate(found, bytes);
    errno = error;
    return found;
}

/* On this platform mmap64() is the same function as mmap(). */
EXPORT void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
