/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Finds a library of the driver where the dynamic loader would find it if the guard did not exist.
 * The guard opens the library by its path, because the loader returns the guard for the library's
 * name.
 */
#include "find.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CACHE "/etc/ld.so.cache"

/* Whether the file is a 64-bit library for this processor and not the guard. The loader also
 * ignores libraries for other processors. */
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
    /* Every copy of the guard is smaller than 16 MiB, even if it is built with a sanitizer. Today's
     * drivers are larger, so a larger file needs no search for the mark. */
    if (good && st.st_size < 16 << 20) {
        void *text = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (text != MAP_FAILED) {
            good = !memmem(text, (size_t)st.st_size, FIND_MARK, sizeof FIND_MARK - 1);
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

/* Search the loader's directories. Without `defaults`, these are the directories of LD_LIBRARY_PATH
 * at the start of the process. With `defaults`, these are the system's directories. */
static void *search_directories(const char *soname, bool defaults)
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
                    (size_t)snprintf(path, sizeof path, "%s/%s", folder, soname) < sizeof path)
                    found = open_path(path);
            }
    }
    dlclose(self);
    return found;
}

/* The part of ld.so.cache in the format that ldconfig has written since glibc 2.2. In some files, a
 * part in the older format comes before it. */
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

static void *search_cache(const char *soname)
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
        (size_t)(end - at) - sizeof *cache >= cache->count * sizeof cache->entry[0])
        for (uint32_t i = 0; i < cache->count && !found; i++) {
            /* Check that the strings end inside the file. The last byte of the file may be
             * non-zero, because other data may follow the strings. */
            uint64_t key = cache->entry[i].key, value = cache->entry[i].value;
            size_t room = (size_t)(end - at), length = strlen(soname) + 1;
            if (cache->entry[i].flags == CACHE_X86_64 && key + length <= room && value < room &&
                !memcmp(at + key, soname, length) && memchr(at + value, 0, room - value))
                found = open_path(at + value);
        }
    munmap(text, (size_t)st.st_size);
    return found;
}

void *find_library(const char *soname, const char *named)
{
    if (named && *named)
        return open_path(named);
    void *found = search_directories(soname, false);
    if (!found)
        found = search_cache(soname);
    return found ? found : search_directories(soname, true);
}
