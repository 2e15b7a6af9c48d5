/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * The session's page as this process maps it, and this process's slot in it.
 *
 * If the environment names a page and the process cannot use it, every CUDA call fails. Without the
 * gate the process would call the driver while the broker suspends the process. If somebody deletes
 * the file, the page stays mapped and still works. If the owner truncates the file, the processes
 * that map it end (SIGBUS), as with any mapped file. The guard cannot prevent this, because tmpfs
 * cannot seal a file that has a name.
 */
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* GPUPOOL_PAGE has this value instead of a path if the page has no path in this mount namespace.
 * In this case each process asks the broker for the page. */
#define PASSED "passed"

#define KEPT_ABOVE 200 /* the guard keeps the page at a descriptor above this number; see map() */

struct page *guard_page;

struct page_slot *guard_the_slot;
__thread bool guard_slot_user, guard_first;

static struct page_slot leftover; /* takes the place of the slot after this process has given its
                                   * slot back */
static uint32_t users;            /* number of threads that have used the slot, and may write to it
                                   * at any time */
static uint32_t has_first;        /* 1: one living thread of the process owns the word ``first`` */
static pthread_key_t at_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t me; /* this process: pid | low half of the start time << 32, as in page->lock */

/* start_time() returns field 22 of /proc/<pid>/stat: when the process started, in ticks since boot.
 * 0: the process does not exist, or is a zombie. UNKNOWN: the calling process cannot read the file
 * now, perhaps because it has no descriptor left. The other process may then be alive. */
#define UNKNOWN UINT64_MAX

#define LOOK_NS 10000000 /* page_deaths() returns true once in this time, or at once if kill() shows
                          * that a process has ended */

static uint64_t start_time(uint32_t pid)
{
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ESRCH ? 0 : UNKNOWN;
    ssize_t n = read(fd, text, sizeof text - 1);
    int error = n < 0 ? errno : 0;
    close(fd);
    if (n <= 0)
        return !n || error == ESRCH ? 0 : UNKNOWN;
    text[n] = 0;
    /* The process's name is field 2. It is in brackets, and may itself contain brackets. So look
     * for the last bracket. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ' || !at[2])
        return 0;
    at += 2;
    char state = *at;
    long threads = 0;
    for (int field = 3; field < 22 && at; field++) {
        if (field == 20)
            threads = strtol(at, NULL, 10);
        if ((at = strchr(at, ' ')))
            at++;
    }
    /* If a zombie still has other threads, only its first thread has ended, and the process is
     * alive. */
    if (!at || state == 'X' || (state == 'Z' && threads <= 1))
        return 0;
    return strtoull(at, NULL, 10);
}

static bool lives(uint32_t pid, uint64_t started)
{
    uint64_t now = start_time(pid);
    return now == started || now == UNKNOWN;
}

static bool holder_lives(uint64_t holder)
{
    uint64_t started = start_time((uint32_t)holder);
    return started == UNKNOWN || (started && (uint32_t)started == holder >> 32);
}

/* ---- the lock: a mutex excludes this process's other threads, then page->lock excludes the
 * session's other processes */

void page_lock(void)
{
    pthread_mutex_lock(&lock);
    for (unsigned tries = 1;; tries++) {
        uint64_t holder = 0;
        if (__atomic_compare_exchange_n(&guard_page->lock, &holder, me, false, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED))
            return;
        if (holder == me)
            return; /* this process held the lock before an exec(), which ended the thread that held
                     * it */
        if (tries % 256 == 0 && !holder_lives(holder) &&
            __atomic_compare_exchange_n(&guard_page->lock, &holder, me, false, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED))
            return;
        if (tries < 64)
            __builtin_ia32_pause();
        else if (tries < 1024)
            sched_yield();
        else
            nap(1);
    }
}

void page_unlock(void)
{
    __atomic_store_n(&guard_page->lock, 0, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
}

/* ---- slots */

/* Empty the slot, and mark it as free in the last step. Another process may then take it at
 * once. */
static void clear(struct page_slot *s)
{
    memset((char *)s + sizeof s->state, 0, sizeof *s - sizeof s->state);
    __atomic_store_n(&s->state, SLOT_FREE, __ATOMIC_RELEASE);
}

void page_reap(void)
{
    for (int i = 0; i < PAGE_SLOTS; i++) {
        struct page_slot *s = &guard_page->slot[i];
        if (s != guard_slot() && __atomic_load_n(&s->state, __ATOMIC_ACQUIRE) == SLOT_LIVE &&
            !lives(s->pid, s->start_time))
            clear(s);
    }
}

/* Whether to call page_reap(), which reads /proc and takes about 20 us for each process. A check
 * with kill(pid, 0) takes a hundredth of this time, so this function makes it in every call. But
 * kill() succeeds for a zombie, which only page_reap() can find. So the function also returns true
 * once in LOOK_NS. */
bool page_deaths(void)
{
    static uint64_t looked;
    uint64_t now = monotonic(), before = __atomic_load_n(&looked, __ATOMIC_RELAXED);
    if (now - before >= LOOK_NS) {
        __atomic_store_n(&looked, now, __ATOMIC_RELAXED);
        return true;
    }
    for (int i = 0; i < PAGE_SLOTS; i++) {
        const struct page_slot *s = &guard_page->slot[i];
        if (s != guard_slot() && __atomic_load_n(&s->state, __ATOMIC_ACQUIRE) == SLOT_LIVE &&
            kill((pid_t)s->pid, 0) && errno == ESRCH)
            return true;
    }
    return false;
}

static struct page_slot *first(uint32_t state, uint32_t pid)
{
    for (int i = 0; i < PAGE_SLOTS; i++) {
        struct page_slot *s = &guard_page->slot[i];
        if (__atomic_load_n(&s->state, __ATOMIC_ACQUIRE) == state && (!pid || s->pid == pid))
            return s;
    }
    return NULL;
}

/* Returns false if this process cannot read its own start time. If the page has no free slot,
 * guard_slot() is NULL afterwards. */
static bool take_slot(void)
{
    uint32_t pid = (uint32_t)getpid();
    uint64_t started = start_time(pid);
    struct page_slot *s;
    if (!started || started == UNKNOWN)
        /* Without a start time in the slot, the other processes would treat this process as
         * dead. */
        return false;
    me = pid | started << 32;
    page_lock();
    /* Free a slot that this process took before an exec(), or that an earlier process with the
     * same pid left. */
    while ((s = first(SLOT_LIVE, pid)))
        clear(s);
    s = first(SLOT_FREE, 0);
    if (!s) {
        page_reap();
        s = first(SLOT_FREE, 0);
    }
    if (s) {
        clear(s);
        s->pid = pid;
        s->start_time = started;
        __atomic_store_n(&s->state, SLOT_LIVE, __ATOMIC_RELEASE);
    }
    page_unlock();
    __atomic_store_n(&guard_the_slot, s, __ATOMIC_RELEASE);
    return true;
}

static void thread_ends(void *unused)
{
    (void)unused;
    if (guard_slot_user)
        __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
    guard_slot_user = false;
    nvml_calls_thread_ends();
    if (guard_first)
        __atomic_store_n(&has_first, 0, __ATOMIC_SEQ_CST);
    guard_first = false;
}

static void make_key(void)
{
    pthread_key_create(&at_end, thread_ends);
}

void guard_use_slot(void)
{
    guard_slot_user = true;
    /* Count this thread before the thread reads the slot: see give_back(). */
    __atomic_add_fetch(&users, 1, __ATOMIC_SEQ_CST);
    guard_first = !__atomic_exchange_n(&has_first, 1, __ATOMIC_SEQ_CST);
    pthread_once(&once, make_key);
    pthread_setspecific(at_end, &users);
}

void guard_pin(uint32_t pins)
{
    struct page_slot *s = guard_slot();
    if (s && (__atomic_load_n(&s->pins, __ATOMIC_RELAXED) & pins) != pins)
        __atomic_or_fetch(&s->pins, pins, __ATOMIC_RELEASE);
}

/* Called at the end of the process, to give its slot back. (If a process is killed, another process
 * frees its slot.) This function needs no lock, because no other process writes to the slot. It
 * must not wait for the lock, because the process that holds the lock may be stopped. */
__attribute__((destructor)) static void give_back(void)
{
    struct page_slot *s = guard_slot();
    if (!s || s == &leftover || s->pid != (uint32_t)getpid())
        return;
    /* Other threads and the destructors of other libraries may still make calls, which use
     * `leftover`. */
    __atomic_store_n(&guard_the_slot, &leftover, __ATOMIC_SEQ_CST);
    /* Free the slot only if no other thread can still write to it. A thread that has read the
     * slot's address may count a call there at any time, even if another process has taken the
     * slot. A slot that is not freed here stays in use until this process has ended. Then another
     * process frees it. */
    if (__atomic_load_n(&users, __ATOMIC_SEQ_CST) == (guard_slot_user ? 1 : 0) &&
        !__atomic_load_n(&s->inflight, __ATOMIC_SEQ_CST) && !__atomic_load_n(&s->first, __ATOMIC_SEQ_CST) &&
        !__atomic_load_n(&s->waiting, __ATOMIC_SEQ_CST) && !__atomic_load_n(&s->nvml, __ATOMIC_SEQ_CST))
        clear(s);
}

/* ---- the file */

/* Write the reason to stderr if it differs from the last reason. So many calls that fail for one
 * reason write only one line. */
static enum page_state refuse(const char *why)
{
    static const char *shown;
    const char *path = getenv("GPUPOOL_PAGE");
    if (!path || !strcmp(path, PASSED))
        path = "";
    if (shown != why)
        dprintf(2,
                "jupyter_gpupool: CUDA is not available in process %d: the session's page%s%s %s.\n",
                (int)getpid(), *path ? " " : "", path, why);
    shown = why;
    return PAGE_REFUSED;
}

void page_lost(enum answer answer)
{
    refuse(answer == ANSWER_REFUSED ? "is gone: the session has ended. Restart the kernel"
           : answer == ANSWER_AWAY  ? "is gone, and no broker answers. A later CUDA call asks the "
                                      "broker again"
                                    : "is still missing, although the broker put it back. A later "
                                      "CUDA call asks the broker again");
}

#define OPEN_FLAGS (O_RDWR | O_CLOEXEC | O_NONBLOCK)

static int passed = -1;

void page_passed(int fd)
{
    int before = guard_page ? fd : __atomic_exchange_n(&passed, fd, __ATOMIC_ACQ_REL);
    if (before >= 0)
        close(before);
}

/* Open the page. If the file was deleted, the broker puts a link at its path. The link leads to the
 * descriptor of the broker in /proc. So follow only a link that leads to /proc. */
static int open_page(const char *path, bool *link)
{
    char to[64];
    int fd = __atomic_exchange_n(&passed, -1, __ATOMIC_ACQ_REL);
    if (fd >= 0)
        return fd;
    if (!strcmp(path, PASSED)) {
        errno = ENOENT; /* this process has not asked for the page yet */
        return -1;
    }
    fd = open(path, OPEN_FLAGS | O_NOFOLLOW);
    if (fd >= 0 || errno != ELOOP)
        return fd;
    ssize_t n = readlink(path, to, sizeof to);
    *link = n > 6 && !strncmp(to, "/proc/", 6);
    if (*link)
        return open(path, OPEN_FLAGS);
    errno = ELOOP;
    return -1;
}

/* Map the page. Returns NULL, or the reason why this process cannot use the page. *lost tells
 * whether the broker may still have the right page. */
static const char *map(const char *path, bool *lost)
{
    struct stat st;
    bool link = false;
    const char *session = getenv("GPUPOOL_SESSION");
    int fd = open_page(path, &link);
    *lost = fd < 0 ? link || errno == ENOENT : link;
    if (fd < 0)
        return "cannot be opened. Restart the kernel";
    if (fstat(fd, &st) || !S_ISREG(st.st_mode) || st.st_size < (off_t)sizeof(struct page)) {
        close(fd);
        return "is not a file, or is too short. Restart the kernel";
    }
    struct page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED) {
        close(fd);
        return "cannot be mapped. Restart the kernel";
    }
    if (page->magic != PAGE_MAGIC || page->version != PAGE_VERSION ||
        page->devices > PAGE_DEVICES) {
        munmap(page, sizeof *page);
        close(fd);
        return "and the guard are from different versions of jupyter_gpupool. Restart the kernel";
    }
    /* The link contains the number of the broker's descriptor. If the broker now uses this number
     * for another file, the link may lead to the page of another session. This process must not use
     * the gate and the accounts of that page. */
    if (session && strncmp(page->session, session, sizeof page->session - 1)) {
        munmap(page, sizeof *page);
        close(fd);
        *lost = true;
        return "belongs to another session. Restart the kernel";
    }
    /* Keep the file open. If a logout deletes the file and the broker also dies, the next broker
     * finds the page here. The descriptor has a high number, because some programs rely on low
     * numbers. */
    if (fcntl(fd, F_DUPFD_CLOEXEC, KEPT_ABOVE) >= 0)
        close(fd);
    guard_page = page;
    return NULL;
}

static enum page_state find_page(void)
{
    static bool remembered;
    const char *path = getenv("GPUPOOL_PAGE"), *why = NULL;
    bool lost = false;
    if (!path || !*path)
        return PAGE_READY;
    pthread_mutex_lock(&lock); /* the first call of CUDA and the first call of NVML may come at the
                                * same time */
    if (!guard_page) {
        if (!remembered)
            broker_remember(); /* only once: at a second time, another thread could be asking the
                                * broker and reading the stored values */
        remembered = true;
        why = map(path, &lost);
        if (!why)
            gate_at_exit();
    }
    pthread_mutex_unlock(&lock);
    /* If somebody has deleted the file while the session lives, for example by a logout, the broker
     * still has the page. */
    return why && lost ? PAGE_LOST : why ? refuse(why) : PAGE_READY;
}

enum page_state page_settle(void)
{
    enum page_state state = guard_page ? PAGE_READY : find_page();
    if (state != PAGE_READY || !guard_page)
        return state;
    nvml_calls_began(guard_page);
    if (!take_slot())
        return refuse("cannot be used, because this process cannot read /proc/self/stat. A later "
                      "call tries again");
    return guard_slot() ? PAGE_READY
                        : refuse("has no room for more than 256 processes. End some of the "
                                 "session's processes");
}

/* Returns the session's page to the NVML library of the guard. That library has no connection to
 * the broker, so it cannot find a page that has no path. The function does not load the driver and
 * does not take a slot. It asks the broker at most once, because this thread perhaps only reads
 * figures and must not wait. */
__attribute__((visibility("default"))) const struct page *gpupool_page(void);
const struct page *gpupool_page(void)
{
    if (!guard_page && find_page() == PAGE_LOST && broker_page() == ANSWER_OK)
        find_page();
    return guard_page;
}

void page_fork(enum fork_when when)
{
    if (when == FORK_PREPARE) {
        pthread_mutex_lock(&lock);
        return;
    }
    if (when == FORK_CHILD) {
        guard_the_slot = NULL;
        users = guard_slot_user ? 1 : 0;
        has_first = guard_first ? 1 : 0;
    }
    pthread_mutex_unlock(&lock);
}
