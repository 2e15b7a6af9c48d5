/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Questions to the broker. Each question is one line of JSON on a new connection, and the answer is
 * also one line. A process withdraws a question by closing the connection. The guard takes the
 * result and the sentences for people from the answer. It reads all figures from the page.
 */
#include "guard.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define LOOK_MS 50            /* time between two checks of the gate and of interrupts, and between
                               * two tries to connect */
#define AWAY_NS 4500000000ull /* a call fails if the broker closes every connection at once for this
                               * long */
#define HOME_NS 500000000ull  /* longest wait for the answer to "cancel" or to "home". Neither asks
                               * for a lease, and cuInit waits for "home" */
#define CROWD_MS 4            /* time between two tries to connect while the broker's queue of
                               * connections is full */
#define HELD_NS 1000000000ull /* a connection that ends earlier counts as one that the broker closes
                               * at once */
#define ANSWER_BYTES 4096     /* the guard reads only the first bytes of an answer, because they
                               * contain its type */

/* These are copies of environment variables, because another thread may change the environment
 * while this thread waits. The guard ignores a value that is too long. */
static struct {
    char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
    char session[128], token[512];
} broker;

static void copy(char *to, size_t size, const char *name)
{
    const char *text = getenv(name);
    if (text && strlen(text) < size)
        strcpy(to, text);
}

void broker_remember(void)
{
    copy(broker.socket, sizeof broker.socket, "GPUPOOL_SOCKET");
    copy(broker.session, sizeof broker.session, "GPUPOOL_SESSION");
    copy(broker.token, sizeof broker.token, "GPUPOOL_TOKEN");
    revive_remember();
}

/* ---- text */

struct text {
    char at[5120]; /* one character of a name or token may become six */
    size_t length;
    bool full;
};

static void put(struct text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->at + t->length, sizeof t->at - t->length, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof t->at - t->length)
        t->full = true;
    else
        t->length += (size_t)n;
}

static void put_string(struct text *t, const char *s)
{
    put(t, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\' || c < ' ')
            put(t, "\\u%04x", c);
        else
            put(t, "%c", c);
    }
    put(t, "\"");
}

static void put_head(struct text *t, const char *type)
{
    put(t, "{\"v\":1,\"type\":\"%s\",\"id\":1,\"session\":", type);
    put_string(t, broker.session);
    put(t, ",\"token\":");
    put_string(t, broker.token);
}

/* Returns where the string value of `key` begins in the line, which is one JSON object. `key`
 * includes its quotes. NULL: the object has no such key. A text inside a string cannot look like a
 * key, because the broker escapes quotes in strings. */
static const char *find(const char *line, const char *key)
{
    const char *at = line;
    while ((at = strstr(at, key))) {
        at += strlen(key);
        at += strspn(at, " \t");
        if (*at != ':')
            continue;
        at++;
        at += strspn(at, " \t");
        return *at == '"' ? at + 1 : NULL;
    }
    return NULL;
}

static bool has(const char *line, const char *key, const char *value)
{
    const char *at = find(line, key);
    size_t n = strlen(value);
    return at && !strncmp(at, value, n) && at[n] == '"';
}

/* Append the string value of `key` to `sentence`, which has room for SENTENCE_BYTES. Every byte
 * that is not ASCII becomes "?". */
static void add_text(char *sentence, const char *line, const char *key)
{
    size_t n = strlen(sentence);
    const char *at = find(line, key);
    if (n && at && *at != '"' && n + 1 < SENTENCE_BYTES)
        sentence[n++] = ' ';
    for (; at && *at && *at != '"' && n + 1 < SENTENCE_BYTES; at++) {
        char c = *at;
        if (c == '\\' && at[1]) {
            c = *++at;
            if (c == 'u') {
                c = '?';
                at += strnlen(at, 5) - 1;
            } else if (c != '"' && c != '\\' && c != '/') {
                c = ' ';
            }
        }
        sentence[n++] = c >= ' ' && c < 127 ? c : '?';
    }
    sentence[n] = 0;
}

/* ---- one question */

/* Connects to the broker without a wait. Returns -1 if no broker listens, or if its queue of
 * connections is full; *full is true in the second case. A blocking connect would wait until the
 * queue has room, and an interrupt of the kernel could not end this wait. */
static int dial(bool *full)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    *full = false;
    if (!broker.socket[0])
        return -1;
    strcpy(address.sun_path, broker.socket);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address)) {
        *full = errno == EAGAIN;
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Read the bytes that have arrived. If a descriptor comes with them, it is the session's page. */
static ssize_t take(int fd, void *to, size_t size)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = to, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room,
                             .msg_controllen = sizeof control.room};
    ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof(int))) {
        int passed;
        memcpy(&passed, CMSG_DATA(c), sizeof passed);
        page_passed(passed);
    }
    return n;
}

/* 1: the answer is complete; 0: not yet; -1: the connection has ended. */
static int receive(int fd, char *answer, size_t *have)
{
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    if (poll(&wait, 1, LOOK_MS) <= 0)
        return 0; /* a time-out or a signal; the caller checks which */
    ssize_t n = take(fd, answer + *have, ANSWER_BYTES - 1 - *have);
    if (n < 0)
        return errno == EINTR || errno == EAGAIN ? 0 : -1;
    if (n == 0)
        return -1;
    *have += (size_t)n;
    answer[*have] = 0;
    return strchr(answer, '\n') || *have == ANSWER_BYTES - 1;
}

/* `through`: this thread's question must reach the broker, so the thread waits for a broker without
 * a time limit. The broker acts on the question as soon as it receives the question. So an
 * interrupt ends the wait only while the thread is not connected to a broker. */
static __thread bool through;

/* Sends the question and waits for the answer. `for_gate`: also end the wait when the gate lets
 * calls pass. `at_most`: the longest wait in nanoseconds; the function then connects only once, and
 * does not wait for a broker if none runs. 0: no such limit. `why`: gets the sentence of the
 * answer, as in broker_land(). */
static enum answer ask(const struct text *question, bool for_gate, uint64_t at_most, char *why)
{
    char answer[ANSWER_BYTES];
    size_t have = 0;
    struct polite p;
    enum answer result;
    uint64_t began = monotonic();
    uint64_t since = 0; /* when the connection began */
    uint64_t away = 0;  /* when this thread first found that no broker listens; 0: a broker
                         * listens */
    uint64_t hung = 0;  /* when the broker began to close every connection at once; 0: it does not
                         * do this */
    int fd = -1;
    if (why)
        *why = 0;
    if (question->full)
        return ANSWER_REFUSED;
    polite_begin(&p);
    for (;;) {
        result = ANSWER_INTERRUPTED;
        if (polite_interrupted(&p) && !(through && fd >= 0))
            break;
        result = ANSWER_OK;
        if (for_gate && gate_lets(true))
            break;
        result = ANSWER_AWAY;
        if (at_most && monotonic() - began >= at_most)
            break;
        if (fd < 0) {
            if (at_most && since)
                break;
            if (away && monotonic() - away >= revive(broker.socket) && !through)
                break;
            if (hung && monotonic() - hung >= AWAY_NS && !through)
                break;
            bool full;
            fd = dial(&full);
            if (fd >= 0 || !full)
                since = monotonic();
            have = 0;
            if (fd >= 0 || full)
                away = 0; /* a broker listens */
            else if (!away) {
                away = since;
                hung = 0; /* the broker has died, so it does not close connections any more */
            }
            if (fd >= 0 && send(fd, question->at, question->length, MSG_NOSIGNAL) !=
                               (ssize_t)question->length) {
                close(fd);
                fd = -1;
            }
            if (fd < 0)
                nap(full ? CROWD_MS : LOOK_MS);
            continue;
        }
        int got = receive(fd, answer, &have);
        if (got > 0 && has(answer, "\"code\"", "busy")) {
            /* This user connects too often. The broker runs, and accepts the question later. */
            hung = 0;
            close(fd);
            fd = -1;
            nap(LOOK_MS);
            continue;
        }
        if (got > 0) {
            result = has(answer, "\"type\"", "ok")      ? ANSWER_OK
                     : has(answer, "\"code\"", "again") ? ANSWER_AGAIN
                                                        : ANSWER_REFUSED;
            if (why) {
                add_text(why, answer, result == ANSWER_OK ? "\"note\"" : "\"message\"");
                if (result != ANSWER_OK)
                    add_text(why, answer, "\"next_step\"");
            }
            break;
        }
        if (got < 0) {
            /* If a broker closes every connection at once, treat it as a broker that is away. */
            if (monotonic() - since >= HELD_NS)
                hung = 0;
            else if (!hung)
                hung = since;
            close(fd);
            fd = -1;
            nap(LOOK_MS);
        }
    }
    if (fd >= 0)
        close(fd);
    polite_end(&p);
    return result;
}

/* ---- the questions */

CUresult broker_attach(void)
{
    struct text question = {.length = 0};
    put_head(&question, "attach");
    put(&question, ",\"pid\":%d,\"tid\":%ld}\n", (int)getpid(), syscall(SYS_gettid));
    if (ask(&question, true, 0, NULL) != ANSWER_OK)
        return CUDA_ERROR_SYSTEM_NOT_READY;
    /* The gate may have closed again. In this case wait 1 ms before the caller asks again. */
    if (!gate_lets(true))
        nap(1);
    return CUDA_SUCCESS;
}

void broker_home(void)
{
    struct text question = {.length = 0};
    put_head(&question, "home");
    put(&question, ",\"pid\":%d,\"tid\":%ld}\n", (int)getpid(), syscall(SYS_gettid));
    ask(&question, false, HOME_NS, NULL);
}

enum answer broker_page(void)
{
    struct text question = {.length = 0};
    put_head(&question, "page");
    put(&question, ",\"pid\":%d,\"tid\":%ld}\n", (int)getpid(), syscall(SYS_gettid));
    return ask(&question, false, 0, NULL);
}

CUresult broker_grow(int ordinal, uint64_t more)
{
    struct text question = {.length = 0};
    put_head(&question, "grow");
    put(&question, ",\"device\":%d,\"bytes\":%llu}\n", ordinal, (unsigned long long)more);
    gate_step_out();
    enum answer answer = ask(&question, false, 0, NULL);
    CUresult error = gate_step_in();
    if (error)
        return error; /* the gate closed while this thread asked, and the wait for the next lease
                       * failed */
    if (answer == ANSWER_REFUSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return answer == ANSWER_OK ? CUDA_SUCCESS : CUDA_ERROR_SYSTEM_NOT_READY;
}

CUresult broker_land(const char *step, char *why)
{
    struct text question = {.length = 0};
    put_head(&question, "land");
    put(&question, ",\"step\":\"%s\",\"pid\":%d,\"tid\":%ld}\n", step, (int)getpid(),
        syscall(SYS_gettid));
    through = !strcmp(step, "move");
    /* Only "cancel" has a time limit. If "cancel" does not arrive, the broker still releases the
     * reserved memory, but later. */
    enum answer answer = ask(&question, false, strcmp(step, "cancel") ? 0 : HOME_NS, why);
    through = false;
    return answer == ANSWER_OK        ? CUDA_SUCCESS
           : answer == ANSWER_REFUSED ? CUDA_ERROR_DEVICE_UNAVAILABLE
           : answer == ANSWER_AGAIN   ? CUDA_ERROR_NOT_READY
                                      : CUDA_ERROR_SYSTEM_NOT_READY;
}
