/* Read files as a source lists them. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include "convert.h"

#include <errno.h>
#include <fcntl.h>
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

enum sk_code sk_read_file(const char *path, int64_t size, int64_t stamp, uint8_t *data) {
    enum sk_code code = SK_READ;
    struct stat status;
    /* O_NONBLOCK: if it is a pipe now, do not wait for the other end. */
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) return SK_READ;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == size &&
        (int64_t)status.MTIME.tv_sec * 1000000000 + status.MTIME.tv_nsec == stamp &&
        sk_read_range(file, 0, data, (size_t)size))
        code = SK_DONE;
    close(file);
    return code;
}
