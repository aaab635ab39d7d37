/* A pool of threads that share loops whose items are independent.
 *
 * Items are claimed by a counter, and a loop waits only for threads that have joined it: one that the system has not
 * scheduled costs nothing. Waits spin for some microseconds, as long as the gaps within a forward, and then sleep, so that
 * they take no time from other processes.
 */
#ifndef FOREDRAFT_POOL_H
#define FOREDRAFT_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_THREADS 256
#define SPINS 2000

#if defined(__x86_64__)
#include <xmmintrin.h>
#define PAUSE() _mm_pause()
typedef unsigned FloatMode;
static inline FloatMode default_float_mode(void) { /* sets it; returns the mode before */
    FloatMode before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
}
static inline void restore_float_mode(FloatMode before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
typedef uint64_t FloatMode;
static inline void restore_float_mode(FloatMode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
static inline FloatMode default_float_mode(void) {
    FloatMode before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    restore_float_mode(0);
    return before;
}
#else
#define PAUSE() ((void)0)
typedef int FloatMode;
static inline FloatMode default_float_mode(void) { return 0; }
static inline void restore_float_mode(FloatMode mode) { (void)mode; }
#endif

/* Items [first, last) of a loop, by thread number ``thread``. */
typedef void (*Work)(void *context, int64_t first, int64_t last, int thread);

typedef struct {
    _Atomic uint64_t state; /* number of the loop << 32, CLOSED, threads that have joined it */
    _Atomic int64_t next;
    Work work;
    void *context;
    int64_t items, grain;
    _Atomic int sleepers, stop, waiting;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    int workers; /* threads that have been started */
    pid_t process;
    pthread_t threads[MOST_THREADS];
} Pool;

#define CLOSED ((uint64_t)1 << 31)
#define JOINED(state) ((state) & (CLOSED - 1))
#define NUMBER(state) ((state) >> 32)

typedef struct {
    Pool *pool;
    int thread;
} Worker;

/* Take a share of what is left, ``grain`` items at least, until nothing is: long runs of items are fetched well, and short
 * ones at the end keep all threads busy.
 */
static void claim(Pool *pool, int thread) {
    int64_t first = atomic_load(&pool->next);
    while (first < pool->items) {
        int64_t left = pool->items - first, share = left / (pool->workers + 1);
        int64_t last = first + (share > pool->grain ? share : pool->grain < left ? pool->grain : left);
        if (!atomic_compare_exchange_weak(&pool->next, &first, last)) continue;
        pool->work(pool->context, first, last, thread);
        first = atomic_load(&pool->next);
    }
}

static void *work_on(void *argument) {
    Worker own = *(Worker *)argument;
    Pool *pool = own.pool;
    free(argument);
    default_float_mode();
    uint64_t seen = 0;
    for (int spins = 0; !atomic_load(&pool->stop);) {
        uint64_t state = atomic_load(&pool->state);
        if (NUMBER(state) == seen) {
            if (spins++ < SPINS) {
                PAUSE();
                continue;
            }
            pthread_mutex_lock(&pool->lock);
            atomic_fetch_add(&pool->sleepers, 1);
            while (NUMBER(atomic_load(&pool->state)) == seen && !atomic_load(&pool->stop))
                pthread_cond_wait(&pool->wake, &pool->lock);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->lock);
            spins = 0;
        } else if (state & CLOSED) {
            seen = NUMBER(state); /* too late for this one */
        } else if (atomic_compare_exchange_weak(&pool->state, &state, state + 1)) {
            seen = NUMBER(state);
            claim(pool, own.thread);
            uint64_t after = atomic_fetch_sub(&pool->state, 1) - 1;
            if ((after & CLOSED) && !JOINED(after) && atomic_load(&pool->waiting)) {
                pthread_mutex_lock(&pool->lock);
                pthread_cond_signal(&pool->done);
                pthread_mutex_unlock(&pool->lock);
            }
            spins = 0;
        }
    }
    return NULL;
}

static void pool_begin(Pool *pool) {
    memset(pool, 0, sizeof *pool);
    atomic_store(&pool->state, CLOSED);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->process = getpid();
}

static void pool_end(Pool *pool) {
    if (pool->process != getpid()) return; /* threads do not survive a fork */
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->stop, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->workers; i++) pthread_join(pool->threads[i], NULL);
}

/* Start or stop threads until there are so many, the caller's included; fewer if the system refuses. */
static void pool_resize(Pool *pool, int threads) {
    int wanted = threads < 1 ? 0 : threads > MOST_THREADS ? MOST_THREADS - 1 : threads - 1;
    if (pool->process != getpid()) {
        pool_begin(pool);
    } else if (pool->workers != wanted) {
        pool_end(pool);
        pool_begin(pool);
    }
    while (pool->workers < wanted) {
        Worker *own = malloc(sizeof *own);
        if (!own) return;
        *own = (Worker){pool, pool->workers + 1};
        if (pthread_create(&pool->threads[pool->workers], NULL, work_on, own)) {
            free(own);
            return;
        }
        pool->workers++;
    }
}

/* Do all items, ``grain`` at a time, in all threads of the pool. */
static void parallel(Pool *pool, Work work, void *context, int64_t items, int64_t grain) {
    if (!pool->workers || items <= grain) {
        work(context, 0, items, 0);
        return;
    }
    pool->work = work, pool->context = context, pool->items = items, pool->grain = grain;
    atomic_store(&pool->next, 0);
    uint64_t number = NUMBER(atomic_load(&pool->state)) + 1;
    atomic_store(&pool->state, number << 32);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
    claim(pool, 0);
    atomic_fetch_or(&pool->state, CLOSED);
    for (int spins = 0; JOINED(atomic_load(&pool->state)) && spins < SPINS; spins++) PAUSE();
    if (!JOINED(atomic_load(&pool->state))) return;
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->waiting, 1);
    while (JOINED(atomic_load(&pool->state))) pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->waiting, 0);
    pthread_mutex_unlock(&pool->lock);
}

#endif
