/* Copy from mapped files. A page of a map that its file no longer has, or that the device cannot read,
 * raises SIGBUS in whoever touches it. A handler would be the process's, not ours to install. So a
 * helper copies: a process that shares the memory of the caller, as posix_spawn's child does, but has
 * its own signal handlers and its own end. Its caller waits, as after vfork.
 *
 * Stores past the cache spare the read of each line that is overwritten, which a system call's copy
 * and memcpy do. On an Intel Xeon, 150 KB take 14 us this way, 19 to 23 by memcpy from a map, 28 by
 * pread, 29 by process_vm_readv on the own process, and 32 by pread into a buffer in the L2 cache and
 * streaming from there. The helper takes about 80 us for a batch, so batches below 2 MiB have none.
 *
 * What it does not copy is read with pread: after a missing page, after a page that was not in the page
 * cache, of datasets above 64 GiB (page tables), and where there is no such helper (macOS, ARM, a
 * limit on processes or address space). Its CPU time counts as that of a child. */
#define _GNU_SOURCE
#include "core.h"

#if defined(__linux__) && defined(__x86_64__)

#include <emmintrin.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

/* Room for a signal's frame with all registers, 11 KB where there is AMX. */
#define STACK ((size_t)64 << 10)

/* Bytes to prefetch: the CPU's own prefetching stops at the end of each page. It saves a tenth. */
#define AHEAD 2048

/* Shorter pieces are copied by memcpy: they share cache lines with their neighbors. */
#define STREAMED 4096

static void stream(uint8_t *to, const uint8_t *from, size_t length) {
    size_t head = (size_t)(-(uintptr_t)to & 63);
    memcpy(to, from, head);
    for (to += head, from += head, length -= head; length >= 64; to += 64, from += 64, length -= 64) {
        __m128i *line = (__m128i *)to;
        const __m128i *source = (const __m128i *)from;
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(line, a);
        _mm_stream_si128(line + 1, b);
        _mm_stream_si128(line + 2, c);
        _mm_stream_si128(line + 3, d);
    }
    memcpy(to, from, length);
}

typedef struct {
    const sk_copy *copies;
    size_t count;
    volatile uint8_t *codes;
} job;

static void on_missing_page(int signal) {
    (void)signal;
    _exit(1);
}

/* Whether the helper waited for a device. It waits for each page, while its caller can issue readahead
 * for all images that are left. This takes a tenth of looking for each image in the page cache. */
static int has_waited(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 && usage.ru_majflt > 0;
}

/* Runs in the helper. */
static int copy_all(void *given) {
    const job *work = given;
    struct sigaction missing;
    sigset_t only;

    memset(&missing, 0, sizeof missing);
    missing.sa_handler = on_missing_page;
    sigemptyset(&only);
    sigaddset(&only, SIGBUS);
    if (sigaction(SIGBUS, &missing, NULL) || sigprocmask(SIG_UNBLOCK, &only, NULL)) _exit(1);
    for (size_t n = 0; n < work->count; n++) {
        const sk_copy *copy = &work->copies[n];
        const uint8_t *from = copy->from;
        uint8_t *to = copy->to;
        for (int32_t y = 0; y < copy->lines; y++, from += copy->stride, to += copy->length) {
            if (copy->length < STREAMED)
                memcpy(to, from, copy->length);
            else
                stream(to, from, copy->length);
        }
        work->codes[copy->number] = SK_DONE;
        if (has_waited()) break;
    }
    _mm_sfence();
    _exit(0);
}

int sk_copy_mapped(const sk_copy *copies, size_t count, uint8_t *codes) {
    /* Not CLONE_SIGHAND and not CLONE_THREAD: signals are what must not be shared. No signal tells the
     * parent of its end, so a program's own children are as before. */
    const int shared = CLONE_VM | CLONE_VFORK | CLONE_FILES | CLONE_FS | CLONE_SYSVSEM;
    job work = {copies, count, codes};
    sk_memory stack = {NULL, 0};
    sigset_t all, before;
    pid_t helper;
    int status;

    if (sk_reserve(&stack, STACK) == NULL) return 0;
    for (size_t n = 0; n < count; n++) codes[copies[n].number] = SK_READ;
    /* A handler of this process must not run in the helper. */
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before)) {
        sk_release(&stack);
        return 0;
    }
    helper = clone(copy_all, stack.data + STACK, shared, &work);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (helper >= 0)
        while (waitpid(helper, &status, __WCLONE) < 0 && errno == EINTR) continue;
    sk_release(&stack);
    return helper >= 0;
}

#else

int sk_copy_mapped(const sk_copy *copies, size_t count, uint8_t *codes) {
    (void)copies, (void)count, (void)codes;
    return 0;
}

#endif
