/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Creates, maps and locks the shared machine file.
 */
#include "machine.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct machine *machine;

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static int open_result = -1;
static char state_dir[PATH_MAX / 2];
static int lock_fd = -1;

const char *machine_state_dir(void) { return state_dir; }

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

void sleep_until(uint64_t ns)
{
    if (now_ns() >= ns) /* this check saves a system call, which would take 20 us */
        return;
    struct timespec t = {(time_t)(ns / 1000000000ull), (long)(ns % 1000000000ull)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

void futex_wait(const uint32_t *word, uint32_t value, int64_t timeout_ns, bool shared)
{
    struct timespec t = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value,
            timeout_ns < 0 ? NULL : &t, NULL, 0);
}

void futex_wake(const uint32_t *word, bool shared)
{
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void uuid_text(const uint8_t u[16], char out[41])
{
    snprintf(out, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12],
             u[13], u[14], u[15]);
}

void device_name(char *out, size_t size)
{
    uint64_t mib = machine->spec.memory / MIB;
    if (mib % 1024)
        snprintf(out, size, "EMULATED NVIDIA GPU %llu MiB", (unsigned long long)mib);
    else
        snprintf(out, size, "EMULATED NVIDIA GPU %llu GiB", (unsigned long long)mib / 1024);
}

void pci_bus_id(unsigned device, char *out, size_t size)
{
    snprintf(out, size, "00000000:%02X:00.0", device + 1);
}

/* The UUIDs are deterministic: a state directory always has the same devices. */
static void make_uuid(unsigned device, uint8_t out[16])
{
    uint64_t h = 0xcbf29ce484222325ull; /* FNV-1a hashes the path; splitmix64 then makes each
                                         * half */
    for (const char *p = state_dir; *p; p++)
        h = (h ^ (uint8_t)*p) * 0x100000001b3ull;
    for (unsigned half = 0; half < 2; half++) {
        uint64_t z = h + (device * 2 + half + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        memcpy(out + 8 * half, &z, 8);
    }
    out[6] = (uint8_t)((out[6] & 0x0f) | 0x40);
    out[8] = (uint8_t)((out[8] & 0x3f) | 0x80);
}

static void init_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attr);
    pthread_mutexattr_destroy(&attr);
}

static struct machine *map_file(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return NULL;
    struct stat st;
    struct machine *m = MAP_FAILED;
    if (!fstat(fd, &st) && (size_t)st.st_size == sizeof *m)
        m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (m == MAP_FAILED)
        return NULL;
    if (m->magic == MACHINE_MAGIC && m->abi == MACHINE_ABI && m->size == sizeof *m)
        return m;
    munmap(m, sizeof *m);
    return NULL;
}

/* The caller holds the exclusive lock, so no other process uses the machine. */
static struct machine *create_file(const char *path, const struct spec *spec)
{
    char temporary[PATH_MAX + 16];
    snprintf(temporary, sizeof temporary, "%s.%d", path, (int)getpid());
    int fd = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return NULL;
    /* Every user who may enter the directory may use the machine. By default the directory is
     * private. */
    (void)!fchmod(fd, 0666);
    struct machine *m = MAP_FAILED;
    if (!ftruncate(fd, sizeof *m))
        m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (m == MAP_FAILED) {
        unlink(temporary);
        return NULL;
    }
    m->magic = MACHINE_MAGIC;
    m->abi = MACHINE_ABI;
    m->size = sizeof *m;
    m->spec = *spec;
    m->faults_touch = 1; /* differs from faults_seen, so that the first process reads the faults
                          * file: the file may be older than the machine */
    init_mutex(&m->lock);
    for (unsigned i = 0; i < spec->count; i++)
        make_uuid(i, m->uuid[i]);
    if (rename(temporary, path)) {
        unlink(temporary);
        munmap(m, sizeof *m);
        return NULL;
    }
    return m;
}

static int prepare_state_dir(void)
{
    const char *dir = getenv("EMUCUDA_STATE");
    char fallback[64], resolved[PATH_MAX];
    snprintf(fallback, sizeof fallback, "/dev/shm/emucuda-%u", (unsigned)geteuid());
    bool own = !dir || !*dir;
    if (own)
        dir = fallback;
    if (mkdir(dir, 0700) && errno != EEXIST)
        return -1;
    struct stat st;
    if (lstat(dir, &st))
        return -1;
    /* The default directory has a predictable name in /dev/shm, where every user can write. So
     * accept the directory only if it belongs to this user. */
    if (own && (!S_ISDIR(st.st_mode) || st.st_uid != geteuid()))
        return -1;
    if (!realpath(dir, resolved) || strlen(resolved) >= sizeof state_dir)
        return -1;
    strcpy(state_dir, resolved);
    return 0;
}

static int attach(const struct spec *spec)
{
    char path[PATH_MAX], lock[PATH_MAX];
    snprintf(path, sizeof path, "%s/machine", state_dir);
    snprintf(lock, sizeof lock, "%s/lock", state_dir);
    lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (lock_fd < 0)
        return MACHINE_BAD;
    (void)!fchmod(lock_fd, 0666);
    for (int attempt = 0; attempt < 100; attempt++) {
        struct machine *m = NULL;
        if (!flock(lock_fd, LOCK_EX | LOCK_NB)) {
            m = map_file(path);
            if (!m || memcmp(&m->spec, spec, sizeof *spec)) {
                if (m)
                    munmap(m, sizeof *m);
                m = create_file(path, spec);
                if (!m)
                    return MACHINE_BAD;
            }
            munmap(m, sizeof *m);
        }
        /* flock() changes the exclusive lock to a shared lock in two steps. Another process may
         * take the lock between the steps and create the machine again. So check the file again. */
        while (flock(lock_fd, LOCK_SH) && errno == EINTR)
            ;
        m = map_file(path);
        if (!m)
            continue;
        if (memcmp(&m->spec, spec, sizeof *spec)) {
            munmap(m, sizeof *m);
            flock(lock_fd, LOCK_UN);
            return MACHINE_CONFLICT;
        }
        machine = m;
        return MACHINE_OK;
    }
    return MACHINE_BAD;
}

/* Describes the POSIX lock of one byte of the lock file. Each slot has its own byte. These locks
 * are independent of the flock() of the whole file. A child of a fork() does not inherit them. The
 * end of the process or an execve() releases them. F_GETLK returns the holder's pid in the PID
 * namespace of the process that asks. */
static struct flock byte_of(unsigned slot)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
}

void machine_hold(unsigned slot)
{
    struct flock lock = byte_of(slot);
    (void)!fcntl(lock_fd, F_SETLK, &lock);
}

pid_t machine_holder(unsigned slot)
{
    struct flock lock = byte_of(slot);
    if (fcntl(lock_fd, F_GETLK, &lock) || lock.l_type == F_UNLCK)
        return -1;
    return lock.l_pid > 0 ? lock.l_pid : 0;
}

uint64_t machine_space(void)
{
    static uint64_t space;
    struct stat st;
    uint64_t found = __atomic_load_n(&space, __ATOMIC_RELAXED);
    if (!found && !stat("/proc/self/ns/pid", &st)) {
        found = st.st_ino;
        __atomic_store_n(&space, found, __ATOMIC_RELAXED);
    }
    return found;
}

/* Opens or closes a file. `*fd` is negative while the file is closed. The caller holds
 * open_mutex. */
static void hold_file(int *fd, const char *name, bool open_it)
{
    char path[PATH_MAX];
    if (open_it && *fd < 0) {
        snprintf(path, sizeof path, "%s/%s", state_dir, name);
        *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (*fd >= 0)
            (void)!fchmod(*fd, 0666);
    } else if (!open_it && *fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

static int control_fd = -1;
static int gpu_fd[MAX_DEVICES]; /* descriptor plus 1; 0: the file is closed */

void machine_gpu_file(unsigned index)
{
    char name[32];
    snprintf(name, sizeof name, "nvidia%u", index);
    pthread_mutex_lock(&open_mutex);
    int fd = gpu_fd[index] - 1;
    hold_file(&fd, name, true);
    gpu_fd[index] = fd + 1;
    pthread_mutex_unlock(&open_mutex);
}

void machine_device_file(bool open_it)
{
    pthread_mutex_lock(&open_mutex);
    hold_file(&control_fd, "nvidiactl", open_it);
    for (unsigned i = 0; !open_it && i < MAX_DEVICES; i++) {
        int fd = gpu_fd[i] - 1;
        hold_file(&fd, "", false);
        gpu_fd[i] = fd + 1;
    }
    pthread_mutex_unlock(&open_mutex);
}

int machine_open(void)
{
    pthread_mutex_lock(&open_mutex);
    if (open_result < 0 || open_result == MACHINE_CONFLICT) {
        const char *text = getenv("EMUCUDA_MACHINE");
        struct spec spec;
        char error[300];
        memset(&spec, 0, sizeof spec);
        if (!text || !*text) {
            open_result = MACHINE_NONE;
        } else if (spec_parse(text, &spec, error, sizeof error)) {
            fprintf(stderr,
                    "emucuda: EMUCUDA_MACHINE: %s; write for example 2x16GiB or "
                    "2x16GiB,context=256MiB,bandwidth=8GB/s\n", error);
            open_result = MACHINE_BAD;
        } else if (prepare_state_dir()) {
            fprintf(stderr, "emucuda: the state directory cannot be used: %s; "
                    "set EMUCUDA_STATE to a directory of yours\n", strerror(errno));
            open_result = MACHINE_BAD;
        } else {
            open_result = attach(&spec);
            if (open_result)
                fprintf(stderr, open_result == MACHINE_CONFLICT
                        ? "emucuda: programs already use %s for a machine that differs from "
                          "EMUCUDA_MACHINE=%s; set EMUCUDA_STATE to another directory\n"
                        : "emucuda: cannot create the machine in %s "
                          "for EMUCUDA_MACHINE=%s\n", state_dir, text);
            if (open_result && lock_fd >= 0) {
                close(lock_fd);
                lock_fd = -1;
            }
        }
    }
    int result = open_result;
    pthread_mutex_unlock(&open_mutex);
    return result;
}
