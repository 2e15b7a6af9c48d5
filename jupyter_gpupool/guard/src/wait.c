/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * How a thread waits while the interpreter's other threads run, until its wait ends or is
 * interrupted.
 */
#include "guard.h"

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define SHORT_NAPS 1000 /* the first naps of a wait last 1 ms each, so 1 s together. A longer wait
                         * will probably last much longer */
#define LONG_NAP_MS 10

/* ---- the interpreter's lock
 *
 * The guard looks up these functions in the process, where they exist if the process runs CPython.
 * All of them belong to the stable ABI, except the older name of PyThreadState_GetUnchecked. So the
 * same guard works with all versions of CPython, including the free-threaded builds. */

struct python {
    void *(*current)(void);    /* this thread's state if it is attached, NULL if not */
    void *(*of_thread)(void);  /* this thread's state, attached or not */
    void *(*save)(void);
    void (*restore)(void *);
};

static bool find_python(struct python *py)
{
    *(void **)&py->current = dlsym(RTLD_DEFAULT, "PyThreadState_GetUnchecked"); /* 3.13 */
    if (!py->current)
        *(void **)&py->current = dlsym(RTLD_DEFAULT, "_PyThreadState_UncheckedGet");
    *(void **)&py->of_thread = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
    *(void **)&py->save = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    *(void **)&py->restore = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    return py->current && py->of_thread && py->save && py->restore;
}

/* This thread has the lock for certain only if the current state is not NULL and belongs to this
 * thread. Two simpler tests are not enough. After a second interpreter has run in the process,
 * PyGILState_Check() is true in all threads. Up to Python 3.11, the current state may belong to
 * another thread. If this test fails although the thread has the lock, the thread keeps the lock,
 * and the interpreter's other threads also wait. */
void *interpreter_release(void)
{
    struct python py;
    if (!find_python(&py))
        return NULL;
    void *current = py.current();
    return current && current == py.of_thread() ? py.save() : NULL;
}

void interpreter_take(void *thread)
{
    struct python py;
    if (thread && find_python(&py))
        py.restore(thread);
}

bool polite_finalizing(void)
{
    int (*finalizing)(void);
    *(void **)&finalizing = dlsym(RTLD_DEFAULT, "Py_IsFinalizing"); /* 3.13 */
    if (!finalizing)
        *(void **)&finalizing = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return finalizing && finalizing();
}

/* ---- interrupts
 *
 * While a thread waits, the guard's handler for SIGINT counts each interrupt, and then calls the
 * program's own handler (the next paragraph describes an exception). In a process without a
 * handler, the guard changes nothing: the signal ends the process or is ignored.
 *
 * A thread that the interpreter does not know is a foreign thread: it belongs to a library. JAX
 * gives such a thread arrays to reuse (donated arguments). If an interrupt makes the thread's call
 * fail, these arrays are lost. If the program gets the interrupt and the call then succeeds, the
 * exception drops the call's result. So the guard hides the first interrupt from the program if
 * only foreign threads wait. The second interrupt ends their waits. The guard does this only in a
 * process with a context. */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t watching, interrupts;
static uint32_t forced;        /* number of interrupts that also end the waits of foreign threads */
static uint32_t foreign, held; /* `foreign`: number of foreign threads that wait. `held`: 1 if they
                                * still wait after an interrupt */
static struct page_slot *held_slot;
static struct sigaction before;
static struct sigaction under; /* the program may set a new handler, and the new handler may call
                                * ours. Our handler then calls this one */
/* Whether our handler is installed. If several threads wait, the first wait installs it. */
static bool installed;
static __thread volatile sig_atomic_t nested;

/* Returns whether to hide this interrupt from the program. Runs in a signal handler. */
static bool hold_back(void)
{
    uint32_t unknown = __atomic_load_n(&foreign, __ATOMIC_SEQ_CST);
    if (!unknown)
        return false;
    if (__atomic_exchange_n(&held, 1, __ATOMIC_SEQ_CST)) {
        __atomic_add_fetch(&forced, 1, __ATOMIC_SEQ_CST);
        return false;
    }
    struct page_slot *slot = __atomic_load_n(&held_slot, __ATOMIC_ACQUIRE);
    if (slot)
        __atomic_store_n(&slot->held, 1, __ATOMIC_RELEASE);
    if (__atomic_load_n(&watching, __ATOMIC_SEQ_CST) != unknown)
        return false;
    /* In a notebook the agent shows its own message instead of this one. */
    static const char told[] =
        "\nGPU pool: a library's thread waits for a GPU slice. The interrupt did not end its CUDA "
        "call, because the program could lose arrays that the call may reuse. Interrupt once more "
        "to end the call.\n";
    if (isatty(STDERR_FILENO))
        (void)!write(STDERR_FILENO, told, sizeof told - 1);
    return true;
}

static void on_interrupt(int number, siginfo_t *info, void *where)
{
    int error = errno, outer = nested;
    const struct sigaction *next = outer ? &under : &before;
    if (!outer && hold_back()) {
        errno = error;
        return;
    }
    nested = 1;
    if (!outer)
        __atomic_add_fetch(&interrupts, 1, __ATOMIC_SEQ_CST);
    if (next->sa_flags & SA_SIGINFO)
        next->sa_sigaction(number, info, where);
    else if (next->sa_handler != SIG_DFL && next->sa_handler != SIG_IGN)
        next->sa_handler(number);
    nested = outer;
    errno = error;
}

static bool is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_interrupt;
}

/* Whether `action` is the handler that was set before ours. An IPython kernel sets its handler
 * again for each cell, even while a thread of an earlier cell waits. (All handlers of Python look
 * the same to the system.) install() replaces such a handler with ours again. It leaves a different
 * handler in place, because that handler may call ours. */
static bool is_before(const struct sigaction *action)
{
    return ((action->sa_flags ^ before.sa_flags) & SA_SIGINFO) == 0 &&
           (action->sa_flags & SA_SIGINFO ? action->sa_sigaction == before.sa_sigaction
                                          : action->sa_handler == before.sa_handler);
}

/* If the program has a handler, install our handler, which calls the program's handler. The caller
 * holds the lock. */
static void install(void)
{
    struct sigaction now;
    if (sigaction(SIGINT, NULL, &now) || is_ours(&now))
        return;
    if (!installed)
        before = now;
    else if (!is_before(&now))
        return;
    if (!(now.sa_flags & SA_SIGINFO) && (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN))
        return;
    now.sa_sigaction = on_interrupt;
    now.sa_flags = (now.sa_flags | SA_SIGINFO) & ~SA_RESETHAND;
    installed = !sigaction(SIGINT, &now, NULL);
}

static void watch(bool unknown)
{
    pthread_mutex_lock(&lock);
    /* Add to `watching` first. Otherwise, if an interrupt came between the two additions,
     * hold_back() could see only foreign threads while a known thread waits. */
    __atomic_add_fetch(&watching, 1, __ATOMIC_SEQ_CST);
    if (unknown)
        __atomic_add_fetch(&foreign, 1, __ATOMIC_SEQ_CST);
    install();
    pthread_mutex_unlock(&lock);
}

/* Restore the old handler if the present handler is ours. Otherwise the program has set another
 * handler. Leave it in place, because it may call ours. After the next install(), our handler may
 * then run twice for one interrupt: first the system calls it, and then the program's handler. In
 * the second run, our handler calls `under`. */
static void put_back(void)
{
    struct sigaction now;
    if (!installed || sigaction(SIGINT, NULL, &now))
        return;
    installed = false;
    if (is_ours(&now))
        sigaction(SIGINT, &before, NULL);
    else if (!is_before(&now))
        under = before;
}

static void unheld(void)
{
    __atomic_store_n(&held, 0, __ATOMIC_SEQ_CST);
    if (held_slot)
        __atomic_store_n(&held_slot->held, 0, __ATOMIC_RELEASE);
}

static void unwatch(bool unknown)
{
    pthread_mutex_lock(&lock);
    if (unknown && foreign && !__atomic_sub_fetch(&foreign, 1, __ATOMIC_SEQ_CST))
        unheld();
    if (watching && !__atomic_sub_fetch(&watching, 1, __ATOMIC_SEQ_CST))
        put_back();
    pthread_mutex_unlock(&lock);
}

bool polite_interrupted(const struct polite *p)
{
    if (p->foreign ? __atomic_load_n(&forced, __ATOMIC_SEQ_CST) != p->forced
                   : __atomic_load_n(&interrupts, __ATOMIC_SEQ_CST) != p->interrupts)
        return true;
    /* Install our handler again at each check, because the program may have replaced it. */
    pthread_mutex_lock(&lock);
    install();
    pthread_mutex_unlock(&lock);
    return false;
}

/* ---- both together: a wait */

void polite_begin(struct polite *p)
{
    struct python py;
    p->interrupts = __atomic_load_n(&interrupts, __ATOMIC_SEQ_CST);
    p->forced = __atomic_load_n(&forced, __ATOMIC_SEQ_CST);
    p->naps = 0;
    p->foreign = guard_has_context() && find_python(&py) && !py.of_thread();
    p->slot = guard_slot(); /* the handler needs the slot in `held_slot`, because it may run in
                             * another thread */
    __atomic_store_n(&held_slot, p->slot, __ATOMIC_RELEASE);
    watch(p->foreign);
    if (p->slot)
        __atomic_add_fetch(&p->slot->waiting, 1, __ATOMIC_SEQ_CST);
    p->thread = interpreter_release();
}

void polite_end(struct polite *p)
{
    if (p->slot)
        __atomic_sub_fetch(&p->slot->waiting, 1, __ATOMIC_SEQ_CST);
    unwatch(p->foreign);
    interpreter_take(p->thread);
}

void polite_nap(struct polite *p)
{
    nap(p->naps++ < SHORT_NAPS ? 1 : LONG_NAP_MS);
}

void nap(int milliseconds)
{
    poll(NULL, 0, milliseconds);
}

void wait_fork(enum fork_when when)
{
    if (when == FORK_PREPARE) {
        pthread_mutex_lock(&lock);
        return;
    }
    if (when == FORK_CHILD && watching) {
        /* The waiting threads exist only in the parent. */
        watching = foreign = held = 0;
        put_back();
    }
    pthread_mutex_unlock(&lock);
}
