/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * A faster suspend: host memory in huge pages, filled by several threads.
 *
 * The driver's checkpoint maps host memory for all of the process's device memory with one populated mmap()
 * (MAP_POPULATE), in pages of 4 KiB, and then copies; one thread does both. With 580.159.04 on an H200 the pages
 * take two thirds of the time. This mmap() stands before the C library's: it gives such a mapping huge pages, as
 * many as are free, and lets several threads populate it. All other mappings are as the C library makes them.
 *
 * Nothing else changes for the caller: the same bytes count for a control group, all zero, and an error while
 * populating is ignored, as mmap(2) says of MAP_POPULATE.
 */
#include "cuda_abi.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define POPULATED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)
#define LEAST (32ul << 20) /* smaller mappings gain nothing that a person would notice */
#define HUGE (2ul << 20)
#define HUGE_ORDER 9 /* of pages of 4 KiB */
#define THREADS 8
#define STACK (256ul << 10)

/* As the C library's on this platform. To look that one up would take the loader's lock, which a thread may hold
 * that waits for this one. */
static void *map_plainly(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    return (void *)syscall(SYS_mmap, at, bytes, prot, flags, fd, offset);
}

/* Bytes that are free now in blocks of a huge page or more; 0 if the kernel does not tell. To make more, it would
 * move or drop other pages, which can take longer than all small pages together. The zones below 4 GiB do not
 * count, as the kernel keeps most of them for others. */
static size_t free_in_huge_pages(void)
{
    char text[8192];
    int fd = open("/proc/buddyinfo", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    size_t bytes = 0;
    /* Node 0, zone   Normal   <free blocks of order 0>  <of order 1> ... */
    for (char *at = strstr(text, "zone"); at; at = strstr(at, "zone")) {
        at += strlen("zone");
        at += strspn(at, " ");
        bool low = !strncmp(at, "DMA", 3);
        at += strcspn(at, " \n");
        char *after;
        for (int order = 0;; order++, at = after) {
            at += strspn(at, " ");
            size_t blocks = strtoul(at, &after, 10);
            if (after == at)
                break;
            if (order >= HUGE_ORDER && !low)
                bytes += blocks << (12 + order);
        }
    }
    return bytes;
}

struct part {
    char *begin;
    size_t bytes;
    pthread_t thread;
    bool started;
};

static void *populate_part(void *with)
{
    struct part *part = with;
    madvise(part->begin, part->bytes, MADV_POPULATE_WRITE);
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
    bool threads = !pthread_attr_init(&attributes);
    if (threads)
        threads = !pthread_attr_setstacksize(&attributes, STACK);
    sigfillset(&all); /* signals belong to the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    char *end = begin + bytes;
    for (unsigned i = 0; i < count; i++) {
        parts[i] = (struct part){.begin = begin};
        /* All but the first part begin with a huge page. */
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
}

EXPORT void *mmap(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    if (__builtin_expect(flags != POPULATED || bytes < LEAST || prot != (PROT_READ | PROT_WRITE), 1))
        return map_plainly(at, bytes, prot, flags, fd, offset);
    char *found = map_plainly(at, bytes, prot, flags & ~MAP_POPULATE, fd, offset);
    if (found == MAP_FAILED)
        return found;
    int error = errno;
    size_t huge = free_in_huge_pages() / 10 * 9 / HUGE * HUGE;
    if (huge) /* refused by a kernel without huge pages: then small ones */
        madvise(found, huge < bytes ? huge : bytes, MADV_HUGEPAGE);
    if (madvise(found, HUGE, MADV_POPULATE_WRITE) && errno == EINVAL) { /* an older kernel */
        munmap(found, bytes);
        return map_plainly(at, bytes, prot, flags, fd, offset);
    }
    populate(found, bytes);
    errno = error;
    return found;
}

/* On this platform the two are one. */
EXPORT void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));
