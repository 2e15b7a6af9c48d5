/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The real driver: where it is, and the table of its functions. Opened at the first call, not when
 * the guard is loaded: shells and compilers that inherit LD_PRELOAD never get here.
 */
#define ENTRIES_TABLE
#include "guard.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SONAME "libcuda.so.1"
#define CACHE "/etc/ld.so.cache"

/* Exported, and the only name that is not the driver's: tells a copy of the guard from a driver, in
 * a process by dlsym() and in a file by its text. */
#define MARK "gpupool-guard-copy"
__attribute__((visibility("default"))) extern const char gpupool_guard[];
const char gpupool_guard[] = MARK " 1";

extern const int32_t guard_entry_at[];

void *guard_real[E_COUNT + E_SPARES];
uint8_t guard_unloaded HIDDEN = 1;

static pthread_mutex_t publishing = PTHREAD_MUTEX_INITIALIZER;
static bool driver_missing, handed_over;
static bool settled;
static CUresult refusal;

static CUresult not_in_driver(void)
{
    return CUDA_ERROR_NOT_FOUND;
}

bool guard_has(int entry)
{
    return guard_real[entry] != (void *)not_in_driver;
}

const char *guard_name(int entry)
{
    return entry_names + entry_table[entry].name;
}

void *guard_exported(int entry)
{
    return (char *)guard_entry_at + guard_entry_at[entry];
}

static int compare(const char *name, size_t length, int entry)
{
    size_t base = entry_table[entry].base;
    int order = memcmp(name, guard_name(entry), length < base ? length : base);
    return order ? order : (length > base) - (length < base);
}

int guard_find(const char *name, int version, bool per_thread)
{
    size_t length = strlen(name);
    int low = 0, high = E_COUNT, found = -1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (compare(name, length, middle) > 0)
            low = middle + 1;
        else
            high = middle;
    }
    for (int i = low; i < E_COUNT && !compare(name, length, i); i++) {
        int since = (int)entry_table[i].since;
        /* Sorted by variant, then by version: the last that fits is the one. */
        if (since && since <= version && (!entry_table[i].per_thread || per_thread))
            found = i;
    }
    return found;
}

/* ---- finding it as the dynamic loader would have */

/* A 64-bit library for this processor (the loader passes over others) that is not the guard. */
static bool is_driver(const char *path)
{
    struct stat st;
    Elf64_Ehdr head;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool good = !fstat(fd, &st) && S_ISREG(st.st_mode) &&
                pread(fd, &head, sizeof head, 0) == sizeof head &&
                !memcmp(head.e_ident, ELFMAG, SELFMAG) && head.e_ident[EI_CLASS] == ELFCLASS64 &&
                head.e_machine == EM_X86_64;
    /* Copies of the guard are small, also instrumented ones; drivers of today are not. */
    if (good && st.st_size < 16 << 20) {
        void *text = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (text != MAP_FAILED) {
            good = !memmem(text, (size_t)st.st_size, MARK, sizeof MARK - 1);
            munmap(text, (size_t)st.st_size);
        }
    }
    close(fd);
    return good;
}

static void *open_path(const char *path)
{
    return is_driver(path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
}

/* The loader's own list: LD_LIBRARY_PATH as it was when the process began, and the system's
 * directories (`defaults`), between which comes the cache. */
static void *search_directories(bool defaults)
{
    _Alignas(Dl_serinfo) char room[32768];
    Dl_serinfo *list = (Dl_serinfo *)room, size;
    char path[PATH_MAX];
    void *found = NULL, *self = dlopen(NULL, RTLD_LAZY);
    if (!self)
        return NULL;
    if (!dlinfo(self, RTLD_DI_SERINFOSIZE, &size) && size.dls_size <= sizeof room) {
        list->dls_size = size.dls_size;
        list->dls_cnt = size.dls_cnt;
        if (!dlinfo(self, RTLD_DI_SERINFO, list))
            for (unsigned i = 0; i < list->dls_cnt && !found; i++) {
                const char *folder = list->dls_serpath[i].dls_name;
                if (!!(list->dls_serpath[i].dls_flags & LA_SER_DEFAULT) == defaults && *folder &&
                    (size_t)snprintf(path, sizeof path, "%s/" SONAME, folder) < sizeof path)
                    found = open_path(path);
            }
    }
    dlclose(self);
    return found;
}

/* The format of glibc's ldconfig since 2.2, also where it follows the older one in the file. */
struct cache {
    char magic[20]; /* "glibc-ld.so.cache1.1" */
    uint32_t count, strings;
    uint32_t unused[5];
    struct {
        int32_t flags;
        uint32_t key, value, osversion;
        uint64_t hwcap;
    } entry[];
};
_Static_assert(sizeof(struct cache) == 48, "ld.so.cache");
#define CACHE_X86_64 0x0303

static void *search_cache(void)
{
    struct stat st;
    void *found = NULL;
    int fd = open(CACHE, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    char *text = fstat(fd, &st) ? MAP_FAILED
                                : mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (text == MAP_FAILED)
        return NULL;
    const char *end = text + st.st_size;
    const char *at = memmem(text, (size_t)st.st_size, "glibc-ld.so.cache1.1", 20);
    const struct cache *cache = (const struct cache *)(const void *)at;
    if (at && (size_t)(end - at) > sizeof *cache &&
        (size_t)(end - at) - sizeof *cache >= cache->count * sizeof cache->entry[0] && !end[-1])
        for (uint32_t i = 0; i < cache->count && !found; i++) {
            uint64_t key = cache->entry[i].key, value = cache->entry[i].value;
            if (cache->entry[i].flags == CACHE_X86_64 && key < (uint64_t)(end - at) &&
                value < (uint64_t)(end - at) && !strcmp(at + key, SONAME))
                found = open_path(at + value);
        }
    munmap(text, (size_t)st.st_size);
    return found;
}

/* Another copy of the guard that was loaded before this one, under the driver's name. */
static void *first_guard(void)
{
    void *loaded = dlopen(SONAME, RTLD_NOLOAD | RTLD_LAZY);
    if (!loaded)
        return NULL;
    const void *mark = dlsym(loaded, "gpupool_guard");
    if (mark && mark != gpupool_guard)
        return loaded;
    dlclose(loaded);
    return NULL;
}

static void *open_driver(void)
{
    const char *told = getenv("GPUPOOL_REAL_LIBCUDA");
    if (told && *told)
        return open_path(told);
    void *found = search_directories(false);
    if (!found)
        found = search_cache();
    return found ? found : search_directories(true);
}

/* ---- the table */

static void load(void)
{
    /* No lock while the loader works: it has its own, which a constructor that calls CUDA in
     * another thread may hold already. Whoever is first publishes; all find the same. */
    void *table[E_COUNT];
    void *handle = first_guard();
    bool second = handle != NULL;
    if (!handle)
        handle = open_driver();
    if (handle)
        for (int i = 0; i < E_COUNT; i++) {
            table[i] = dlsym(handle, guard_name(i));
            if (!table[i])
                table[i] = (void *)not_in_driver;
        }
    pthread_mutex_lock(&publishing);
    if (guard_unloaded && !driver_missing) {
        if (handle)
            for (int i = 0; i < E_COUNT; i++)
                __atomic_store_n(&guard_real[i], table[i], __ATOMIC_RELAXED);
        for (int i = E_COUNT; i < E_COUNT + E_SPARES; i++)
            guard_real[i] = (void *)not_in_driver;
        handed_over = second;
        __atomic_store_n(&driver_missing, !handle, __ATOMIC_RELEASE);
        procaddr_ready();
        guard_at_fork();
        __atomic_store_n(&guard_unloaded, !handle, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&publishing);
}

/* Without a driver every call says what it says on a machine without a GPU: programs know that
 * answer, and go on without one, as they do where the library itself is missing. */
static bool loaded(void)
{
    if (!__atomic_load_n(&guard_unloaded, __ATOMIC_ACQUIRE))
        return true;
    if (!__atomic_load_n(&driver_missing, __ATOMIC_ACQUIRE))
        load();
    return !__atomic_load_n(&guard_unloaded, __ATOMIC_ACQUIRE);
}

CUresult guard_settle(void)
{
    if (__atomic_load_n(&settled, __ATOMIC_ACQUIRE))
        return refusal;
    if (!loaded())
        return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&publishing);
    if (!settled) {
        /* The first copy of the guard gates and counts: this one only passes on. */
        refusal = handed_over ? CUDA_SUCCESS : page_settle();
        if (!refusal)
            guard_gates(guard_page ? &guard_page->gate : &guard_open, &guard_open);
        __atomic_store_n(&settled, true, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&publishing);
    return refusal;
}

CUresult guard_slow_never(void)
{
    return loaded() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

void real_fork(enum fork_when when)
{
    if (when == FORK_PREPARE) {
        pthread_mutex_lock(&publishing);
        return;
    }
    if (when == FORK_CHILD && !driver_missing)
        settled = false;
    pthread_mutex_unlock(&publishing);
}
