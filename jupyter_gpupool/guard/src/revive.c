/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * What happens if the broker has died: this part starts the next broker, and returns how long a
 * call waits for it. It runs a separate program (`python -m jupyter_gpupool.starting`), which reads
 * the record that the dead broker left beside its socket. startrecord.py describes the files.
 */
#include "guard.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define AWAY_NS 4500000000ull   /* longest wait of a call if this process cannot start a broker, so
                                 * that the call fails within 5 s */
#define START_NS 90000000000ull /* longest wait for a broker that starts: it loads the driver and
                                 * tests every device */
#define AGAIN_NS 2000000000ull  /* time between two attempts of this process */
#define ATTEMPTS 3              /* after this many failed starts in a row, calls fail at once */

/* The shell command that starts a broker, from GPUPOOL_REVIVE. The guard keeps a copy, because
 * another thread may change the environment. */
static char command[2048];
static char copy[1024]; /* path of the start record's copy, which is beside the journal: see
                         * startrecord.py */
static uint64_t attempt_at; /* when this process may make its next attempt */

void revive_remember(void)
{
    const char *text = getenv("GPUPOOL_REVIVE");
    if (text && strlen(text) < sizeof command)
        strcpy(command, text);
    text = getenv("GPUPOOL_START_RECORD");
    if (text && strlen(text) < sizeof copy)
        strcpy(copy, text);
}

static bool beside(char *path, size_t size, const char *socket, const char *ending)
{
    int n = snprintf(path, size, "%s%s", socket, ending);
    return n > 0 && (size_t)n < size;
}

/* Whether the broker at this socket is a service. Only the service manager may start such a
 * broker. */
static bool is_service(const char *socket)
{
    return !strncmp(socket, "/run/", 5) && strncmp(socket, "/run/user/", 10);
}

static bool being_started(const char *socket)
{
    char path[256];
    if (!beside(path, sizeof path, socket, ".start"))
        return false;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return false;
    bool held = flock(fd, LOCK_SH | LOCK_NB) && errno == EWOULDBLOCK;
    close(fd);
    return held;
}

static double member(const char *text, const char *name)
{
    const char *at = strstr(text, name);
    return at ? strtod(at + strlen(name), NULL) : 0;
}

/* Whether the last ATTEMPTS starts have failed and the next attempt is not due yet. */
static bool given_up(const char *socket)
{
    char path[256], text[512];
    struct stat found;
    struct timespec now;
    if (!beside(path, sizeof path, socket, ".start.failed"))
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return false;
    ssize_t n = -1;
    if (!fstat(fd, &found) && S_ISREG(found.st_mode) && found.st_uid == geteuid())
        n = read(fd, text, sizeof text - 1); /* the figures are at the beginning */
    close(fd);
    if (n <= 0)
        return false;
    text[n] = 0;
    clock_gettime(CLOCK_REALTIME, &now);
    return member(text, "\"count\": ") >= ATTEMPTS && member(text, "\"due\": ") > (double)now.tv_sec;
}

/* Uses posix_spawn, because it allocates nothing and runs no handlers of fork(). This process may
 * have many threads and much mapped memory. The shell returns at once, and the broker does not
 * become a child of this process. */
static void start(void)
{
    char *arguments[] = {"/bin/sh", "-c", command, NULL};
    char *environment[] = {"PATH=/usr/local/bin:/usr/bin:/bin", NULL};
    posix_spawnattr_t attributes;
    /* Set the default actions of these signals. Otherwise the shell and the broker would ignore the
     * signals that this process ignores. */
    static const int usual[] = {SIGINT, SIGQUIT, SIGPIPE, SIGCHLD, SIGHUP, SIGTERM};
    sigset_t none, defaults;
    pid_t child;
    if (posix_spawnattr_init(&attributes))
        return;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    sigemptyset(&defaults);
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++)
        sigaddset(&defaults, usual[i]);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP |
                                              POSIX_SPAWN_SETSIGDEF);
    if (!posix_spawn(&child, arguments[0], NULL, &attributes, arguments, environment))
        while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
            ;
    posix_spawnattr_destroy(&attributes);
}

/* Whether this thread may start a broker now. Only one thread of this process gets true within
 * AGAIN_NS. */
static bool my_turn(void)
{
    uint64_t now = monotonic(), at = __atomic_load_n(&attempt_at, __ATOMIC_ACQUIRE);
    return now >= at && __atomic_compare_exchange_n(&attempt_at, &at, now + AGAIN_NS, false,
                                                    __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

/* Called if the start record is missing. Returns whether `command` can still start a broker: the
 * record has a copy, and the socket's folder exists or can be made again. */
static bool can_restore(const char *socket)
{
    char folder[256];
    if (!*copy || access(copy, F_OK) || !beside(folder, sizeof folder, socket, ""))
        return false;
    for (int up = 0; up < 2; up++) {
        char *end = strrchr(folder, '/');
        if (!end || end == folder)
            return false;
        *end = 0;
        if (!access(folder, up ? W_OK | X_OK : F_OK))
            return true;
    }
    return false;
}

uint64_t revive(const char *socket)
{
    char record[256];
    if (!*socket)
        return AWAY_NS;
    if (is_service(socket))
        return START_NS;
    if (!beside(record, sizeof record, socket, ".start.json"))
        return AWAY_NS;
    /* If the record and its copy are both missing, the broker has ended normally. In this case a
     * waiting call does not start the next broker. */
    if (being_started(socket))
        return START_NS;
    if (!*command || (access(record, F_OK) && !can_restore(socket)))
        return AWAY_NS;
    if (given_up(socket))
        return 0;
    if (my_turn())
        start();
    return START_NS;
}
