/* Copyright (c) jupyter_gpupool developers.
 * Distributed under the terms of the Modified BSD License.
 *
 * Threads that the interpreter does not know. Each makes one call of the driver. The file also has
 * a handler of interrupts that calls the handler it has replaced.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

static pthread_t thread[8];
static int threads;

static void *call(void *unused)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*synchronise)(void);
    (void)unused;
    *(void **)&synchronise = dlsym(driver, "cuCtxSynchronize");
    return synchronise() == 201 ? NULL : driver; /* 201: the thread has no current context */
}

static struct sigaction replaced;
int called;

static void chained(int number, siginfo_t *info, void *where)
{
    called++;
    if (replaced.sa_flags & SA_SIGINFO)
        replaced.sa_sigaction(number, info, where);
    else
        replaced.sa_handler(number);
}

int begin(void);
int join(void);
int chain(void);

int chain(void)
{
    struct sigaction ours = {.sa_sigaction = chained, .sa_flags = SA_SIGINFO};
    return sigaction(SIGINT, &ours, &replaced);
}

int begin(void)
{
    return pthread_create(&thread[threads++], NULL, call, NULL);
}

int join(void)
{
    int wrong = 0;
    while (threads) {
        void *result;
        pthread_join(thread[--threads], &result);
        wrong += result != NULL;
    }
    return wrong;
}
