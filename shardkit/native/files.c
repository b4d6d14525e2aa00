/* Read files as a source lists them. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "convert.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#ifdef __APPLE__
#define MTIME st_mtimespec
#else
#define MTIME st_mtim
#endif

int sk_read_range(int file, int64_t offset, uint8_t *to, size_t length) {
    while (length) {
        ssize_t part = pread(file, to, length, (off_t)offset);
        if (part < 0 && errno == EINTR) continue;
        if (part <= 0) return 0;
        to += part;
        offset += part;
        length -= (size_t)part;
    }
    return 1;
}

static int64_t stamp_of(const struct stat *status) {
    return (int64_t)status->MTIME.tv_sec * 1000000000 + status->MTIME.tv_nsec;
}

/* O_NONBLOCK: if it is a pipe now, do not wait for the other end. */
static int open_file(const char *path) { return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); }

enum sk_code sk_read_file(const char *path, int64_t size, int64_t stamp, const uint8_t *head,
                          size_t head_size, uint8_t *data) {
    enum sk_code code = SK_READ;
    uint8_t start[SK_MOST_HEAD];
    struct stat status;
    int file = open_file(path);
    if (file < 0) return SK_READ;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == size &&
        stamp_of(&status) == stamp && head_size <= sizeof start && (int64_t)head_size <= size &&
        sk_read_range(file, 0, start, head_size) &&
        (head_size == 0 || memcmp(start, head, head_size) == 0) &&
        sk_read_range(file, (int64_t)head_size, data, (size_t)size - head_size))
        code = SK_DONE;
    close(file);
    return code;
}

enum sk_code sk_read_head(const char *path, size_t length, uint8_t *head, int64_t *size,
                          int64_t *stamp) {
    enum sk_code code = SK_READ;
    struct stat status;
    int file = open_file(path);
    if (file < 0) return SK_READ;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) &&
        sk_read_range(file, 0, head, length)) {
        *size = status.st_size;
        *stamp = stamp_of(&status);
        code = SK_DONE;
    }
    close(file);
    return code;
}
