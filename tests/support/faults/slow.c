/* A slow disk: a library for LD_PRELOAD that delays what is read below one directory.
 *
 * SLOW_ROOT names the directory, SLOW_MICROSECONDS the delay of each positioned read, which is how
 * shards are read. Nothing counts as being in memory: a read that must not wait finds nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int slow(int file) {
    const char *root = getenv("SLOW_ROOT");
    char link[64], path[PATH_MAX];
    if (!root) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0) return 0;
    path[size] = 0;
    return !strncmp(path, root, strlen(root));
}

static void wait_for_disk(int file) {
    if (slow(file)) usleep((useconds_t)atoi(getenv("SLOW_MICROSECONDS")));
}

#define REAL(type, name, parameters)                                      \
    static type(*real_##name) parameters;                                 \
    if (!real_##name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name)

#define VECTOR(name)                                                                        \
    ssize_t name(int file, const struct iovec *parts, int count, off_t offset) {            \
        REAL(ssize_t, name, (int, const struct iovec *, int, off_t));                       \
        wait_for_disk(file);                                                                \
        return real_##name(file, parts, count, offset);                                     \
    }

#define VECTOR_WITH_FLAGS(name)                                                             \
    ssize_t name(int file, const struct iovec *parts, int count, off_t offset, int flags) { \
        REAL(ssize_t, name, (int, const struct iovec *, int, off_t, int));                  \
        if (flags && slow(file)) {                                                          \
            errno = EAGAIN;                                                                 \
            return -1;                                                                      \
        }                                                                                   \
        wait_for_disk(file);                                                                \
        return real_##name(file, parts, count, offset, flags);                              \
    }

VECTOR(preadv)
VECTOR(preadv64)
VECTOR_WITH_FLAGS(preadv2)
VECTOR_WITH_FLAGS(preadv64v2)
