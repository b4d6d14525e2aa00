/* Faults on the way to the disk: a library for LD_PRELOAD that stands before the C library's calls.
 *
 * It counts every call by which anything reaches the disk below one directory, from Python and from
 * C libraries (HDF5, LMDB) alike, and at a chosen one it sends a signal, tears the write, or lets
 * the call fail. It can also write down what was done, to tell later what a power cut would leave.
 * On request it counts Python's calls that read files, folders and attributes there instead.
 *
 * It is told what to do by a file that all processes of a test map (`struct control`, whose twin is
 * `Control` in faulty.py), named by the environment variable FAULTS_CONTROL. So processes started
 * by others share one count, and the one that a call belongs to by its session. Without the
 * variable it does nothing.
 *
 * Not seen: writes through a writable memory map, io_uring, and stdio inside of the C library.
 * Nothing in shardkit uses them: LMDB maps its file for reading only.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, SIGNAL_BEFORE, SIGNAL_AFTER, TEAR, FAIL, SHORTEN };
enum { SELF, MAIN, GROUP };          /* whom a signal is sent to */
enum { ALL, ONLY_MAIN, ONLY_OTHERS }; /* whose calls are counted */

/* All numbers have 64 bits, so that the twin in Python cannot differ in padding. */
struct control {
    int64_t count;   /* calls so far */
    int64_t at;      /* the first call that something happens to, from 1 on */
    int64_t times;   /* the number of calls that it happens to */
    int64_t action;  /* one of the first enum */
    int64_t code;    /* the signal, or the error */
    int64_t target;  /* one of the second enum */
    int64_t whose;   /* one of the third enum */
    int64_t session; /* calls of this session's processes count; its leader is the main one */
    int64_t quick;   /* whether syncs are left out: they take time, and only a power cut tells */
    int64_t acted;   /* calls that something happened to */
    int64_t reads;   /* whether calls that read files, folders and attributes count instead */
    char root[1024];  /* calls on paths below it count */
    char trace[1024]; /* the file to write down calls in, or "" */
    char keep[1024];  /* a folder for links to files that are removed or replaced, or "" */
};

static struct control *control;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("FAULTS_CONTROL");
    int file = name ? open(name, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) control = map;
    close(file);
}

/* The function of this name that would be called without this library. */
#define REAL(type, name, parameters)                                      \
    static type(*real_##name) parameters;                                 \
    if (!real_##name) *(void **)&real_##name = dlsym(RTLD_NEXT, #name)

/* --- which calls count --- */

static int below(const char *path) {
    size_t size = strlen(control->root);
    return !strncmp(path, control->root, size) && (path[size] == '/' || path[size] == 0);
}

static int watched(void) {
    if (!control || !control->session || getsid(0) != control->session) return 0;
    int main_process = getpid() == control->session;
    return control->whose == ALL || (control->whose == ONLY_MAIN) == main_process;
}

static void path_of(int descriptor, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(name, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
}

/* Write to `full` the path that `folder` and `path` mean together. */
static void join(int folder, const char *path, char *full) {
    char start[PATH_MAX] = "";
    if (*path != '/' && folder == AT_FDCWD && !getcwd(start, sizeof start)) *start = 0;
    if (*path != '/' && folder != AT_FDCWD) path_of(folder, start);
    if (snprintf(full, PATH_MAX, "%s%s%s", start, *start ? "/" : "", path) >= PATH_MAX) *full = 0;
}

/* --- what happens to a call --- */

struct call {
    int64_t number;  /* 0 if it does not count */
    int action;
    char path[PATH_MAX];
};

static void hit(void) {
    pid_t whom = control->target == SELF ? getpid() : (pid_t)control->session;
    kill(control->target == GROUP ? -whom : whom, (int)control->code);
    /* Others than ourselves may take a moment to die; nothing may be done meanwhile. */
    if (control->code == SIGKILL && control->target == GROUP) pause();
}

static void note(const char *kind, int64_t number, const char *text, int64_t size) {
    if (!*control->trace) return;
    char line[3 * PATH_MAX];
    int length = snprintf(line, sizeof line, "%lld\t%s\t%lld\t%s\n", (long long)number, kind,
                          (long long)size, text);
    REAL(int, openat, (int, const char *, int, ...));
    REAL(ssize_t, write, (int, const void *, size_t));
    int saved = errno;
    int file = real_openat(AT_FDCWD, control->trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
                           0644);
    if (file >= 0 && real_write(file, line, (size_t)length) != length) abort();
    if (file >= 0) close(file);
    errno = saved;
}

/* Errors that tell of too little room come only from calls that take some. */
static int fits(int takes_room) {
    return takes_room || (control->code != ENOSPC && control->code != EDQUOT);
}

/* Count a call on call->path, and send the signal if its turn has come; `writes` if it can be torn,
 * `room` if it takes some. Return whether it fails, with errno set. */
static int arrive(struct call *call, int writes, int room) {
    call->number = 0;
    call->action = NOTHING;
    if (!watched() || control->reads || !below(call->path)) return 0;
    call->number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (call->number < control->at || call->number >= control->at + control->times) return 0;
    call->action = (int)control->action;
    if (call->action == TEAR && !writes) call->action = SIGNAL_BEFORE;
    if (call->action == SHORTEN && !writes) call->action = NOTHING;
    if (call->action == FAIL && !fits(room)) call->action = NOTHING;
    if (call->action == NOTHING) return 0;
    __atomic_add_fetch(&control->acted, 1, __ATOMIC_SEQ_CST);
    if (call->action == SIGNAL_BEFORE) hit();
    if (call->action != FAIL) return 0;
    errno = (int)control->code;
    return 1;
}

/* Count a call that reads; return whether it fails, with errno set. Only calls that open anything
 * can lack a descriptor, and only those that take a name can lack the permission. */
static int arrive_read(const char *kind, const char *path, int opens, int name) {
    if (!below(path)) return 0;
    int64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    note(kind, number, path, 0);
    if (number < control->at || number >= control->at + control->times) return 0;
    if (control->action != FAIL) return 0;
    if (control->code == EMFILE && !opens) return 0;
    if (control->code == EACCES && !name) return 0;
    __atomic_add_fetch(&control->acted, 1, __ATOMIC_SEQ_CST);
    errno = (int)control->code;
    return 1;
}

static int reading(void) { return watched() && control->reads; }

static int read_fails(const char *kind, int file) {
    char path[PATH_MAX];
    if (!reading()) return 0;
    path_of(file, path);
    return arrive_read(kind, path, 0, 0);
}

static int name_fails(const char *kind, int folder, const char *name, int opens) {
    char path[PATH_MAX];
    if (!reading()) return 0;
    join(folder, name, path);
    return arrive_read(kind, path, opens, 1);
}

static void leave(const struct call *call) {
    int saved = errno;
    if (call->action == SIGNAL_AFTER || call->action == TEAR) hit();
    errno = saved;
}

/* --- what is written down --- */

/* "inode" of a descriptor, and its size. */
static void note_file(const char *kind, const struct call *call, int descriptor) {
    struct stat status;
    char text[64];
    if (!call->number || !*control->trace || fstat(descriptor, &status)) return;
    snprintf(text, sizeof text, "%llu", (unsigned long long)status.st_ino);
    note(kind, call->number, text, (int64_t)status.st_size);
}

/* "inode of the folder, name, inode" of a path, and whether it is a folder; the last may be gone,
 * and its inode is then given. */
static void note_entry(const char *kind, const struct call *call, const char *path, ino_t gone) {
    struct stat folder, status;
    char parent[PATH_MAX], text[PATH_MAX + 64];
    const char *name = strrchr(path, '/');
    if (!call->number || !*control->trace || !name) return;
    snprintf(parent, sizeof parent, "%.*s", name == path ? 1 : (int)(name - path), path);
    if (stat(parent, &folder)) return;
    status.st_mode = 0;
    if (gone) status.st_ino = gone;
    else if (lstat(path, &status)) return;
    snprintf(text, sizeof text, "%llu\t%s\t%llu", (unsigned long long)folder.st_ino, name + 1,
             (unsigned long long)status.st_ino);
    note(kind, call->number, text, S_ISDIR(status.st_mode) ? 1 : 0);
}

/* Keep what `path` names by a further link, before it is removed or replaced; return its inode. */
static ino_t keep(const char *path) {
    struct stat status;
    char place[PATH_MAX];
    REAL(int, linkat, (int, const char *, int, const char *, int));
    if (!control || !watched() || !*control->keep || lstat(path, &status)) return 0;
    int saved = errno;
    snprintf(place, sizeof place, "%s/%llu", control->keep, (unsigned long long)status.st_ino);
    if (S_ISREG(status.st_mode) && real_linkat(AT_FDCWD, path, AT_FDCWD, place, 0)) errno = saved;
    return status.st_ino;
}

/* --- open --- */

static int open_any(int folder, const char *path, int flags, mode_t mode) {
    REAL(int, openat, (int, const char *, int, ...));
    struct call call = {0};
    int changes = flags & (O_CREAT | O_TRUNC) || (flags & O_TMPFILE) == O_TMPFILE;
    if (!changes && name_fails("open", folder, path, 1)) return -1;
    if (!changes || !watched()) return real_openat(folder, path, flags, mode);
    join(folder, path, call.path);
    if (arrive(&call, 0, 1)) return -1;
    int there = !faccessat(folder, path, F_OK, AT_SYMLINK_NOFOLLOW);
    int file = real_openat(folder, path, flags, mode);
    if (file >= 0 && flags & O_TRUNC) note_file("write", &call, file);
    if (file >= 0 && !there && flags & O_CREAT) note_entry("enter", &call, call.path, 0);
    leave(&call);
    return file;
}

#define OPEN(name)                                                 \
    int name(const char *path, int flags, ...) {                   \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        mode_t mode = va_arg(rest, mode_t);                        \
        va_end(rest);                                              \
        return open_any(AT_FDCWD, path, flags, mode);              \
    }
#define OPENAT(name)                                               \
    int name(int folder, const char *path, int flags, ...) {       \
        va_list rest;                                              \
        va_start(rest, flags);                                     \
        mode_t mode = va_arg(rest, mode_t);                        \
        va_end(rest);                                              \
        return open_any(folder, path, flags, mode);                \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

int creat(const char *path, mode_t mode) {
    return open_any(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* --- write --- */

/* Write, from where the file stands if offset is -1, as many bytes as the fault lets through. */
static ssize_t write_any(int file, const struct iovec *pieces, int count, off_t offset) {
    REAL(ssize_t, writev, (int, const struct iovec *, int));
    REAL(ssize_t, pwritev, (int, const struct iovec *, int, off_t));
    struct call call = {0};
    struct iovec part[IOV_MAX];
    size_t left = 0;
    int used = count;
    if (watched()) {
        path_of(file, call.path);
        /* A disk that becomes full takes a part first; `times` says how often it then fails. */
        int first = control->action == FAIL && control->code != EINTR;
        for (int i = 0; i < count; i++) left += pieces[i].iov_len;
        int fails = arrive(&call, 1, 1);
        if (fails && !(first && call.number == control->at && left > 1)) return -1;
        if (fails) __atomic_add_fetch(&control->times, 1, __ATOMIC_SEQ_CST);
        if (count <= IOV_MAX && left > 1 &&
            (fails || call.action == TEAR || call.action == SHORTEN)) {
            left /= 2;
            for (used = 0; left; used++) {
                part[used] = pieces[used];
                if (part[used].iov_len > left) part[used].iov_len = left;
                left -= part[used].iov_len;
            }
            pieces = part;
        }
    }
    ssize_t done = offset < 0 ? real_writev(file, pieces, used)
                              : real_pwritev(file, pieces, used, offset);
    if (done > 0) note_file("write", &call, file);
    leave(&call);
    return done;
}

ssize_t write(int file, const void *bytes, size_t size) {
    REAL(ssize_t, write, (int, const void *, size_t));
    struct iovec piece = {(void *)bytes, size};
    return watched() ? write_any(file, &piece, 1, -1) : real_write(file, bytes, size);
}
ssize_t writev(int file, const struct iovec *pieces, int count) {
    return write_any(file, pieces, count, -1);
}
ssize_t pwrite(int file, const void *bytes, size_t size, off_t offset) {
    struct iovec piece = {(void *)bytes, size};
    return write_any(file, &piece, 1, offset);
}
ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t offset) {
    return pwrite(file, bytes, size, offset);
}
ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t offset) {
    return write_any(file, pieces, count, offset);
}
ssize_t pwritev64(int file, const struct iovec *pieces, int count, off64_t offset) {
    return write_any(file, pieces, count, offset);
}
ssize_t pwritev2(int file, const struct iovec *pieces, int count, off_t offset, int flags) {
    (void)flags;
    return write_any(file, pieces, count, offset);
}
ssize_t pwritev64v2(int file, const struct iovec *pieces, int count, off64_t offset, int flags) {
    return pwritev2(file, pieces, count, offset, flags);
}

/* Copies within the kernel: torn at a call's border only. */
ssize_t copy_file_range(int from, off64_t *start, int to, off64_t *offset, size_t size,
                        unsigned int flags) {
    REAL(ssize_t, copy_file_range, (int, off64_t *, int, off64_t *, size_t, unsigned int));
    struct call call = {0};
    if (watched()) path_of(to, call.path);
    if (arrive(&call, 0, 1)) return -1;
    ssize_t done = real_copy_file_range(from, start, to, offset, size, flags);
    if (done > 0) note_file("write", &call, to);
    leave(&call);
    return done;
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    REAL(ssize_t, sendfile64, (int, int, off64_t *, size_t));
    struct call call = {0};
    if (watched()) path_of(to, call.path);
    if (arrive(&call, 0, 1)) return -1;
    ssize_t done = real_sendfile64(to, from, offset, size);
    if (done > 0) note_file("write", &call, to);
    leave(&call);
    return done;
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    return sendfile64(to, from, offset, size);
}

/* --- sizes --- */

int ftruncate(int file, off_t size) {
    REAL(int, ftruncate, (int, off_t));
    struct call call = {0};
    struct stat status;
    if (watched()) path_of(file, call.path);
    int grows = !fstat(file, &status) && size > status.st_size;
    if (arrive(&call, 0, grows)) return -1;
    int failed = real_ftruncate(file, size);
    if (!failed) note_file("size", &call, file);
    leave(&call);
    return failed;
}
int ftruncate64(int file, off64_t size) { return ftruncate(file, size); }

int posix_fallocate(int file, off_t offset, off_t size) {
    REAL(int, posix_fallocate, (int, off_t, off_t));
    struct call call = {0};
    if (watched()) path_of(file, call.path);
    if (arrive(&call, 0, 1)) return errno; /* this one returns its error */
    int error = real_posix_fallocate(file, offset, size);
    if (!error) note_file("size", &call, file);
    leave(&call);
    return error;
}
int posix_fallocate64(int file, off64_t offset, off64_t size) {
    return posix_fallocate(file, offset, size);
}

int fallocate(int file, int mode, off_t offset, off_t size) {
    REAL(int, fallocate, (int, int, off_t, off_t));
    struct call call = {0};
    if (watched()) path_of(file, call.path);
    if (arrive(&call, 0, 1)) return -1;
    int failed = real_fallocate(file, mode, offset, size);
    if (!failed) note_file("size", &call, file);
    leave(&call);
    return failed;
}
int fallocate64(int file, int mode, off64_t offset, off64_t size) {
    return fallocate(file, mode, offset, size);
}

/* --- syncs --- */

static int sync_any(int file, int (*real)(int)) {
    struct call call = {0};
    if (watched()) path_of(file, call.path);
    if (arrive(&call, 0, 1)) return -1;
    int failed = call.number && control->quick ? 0 : real(file);
    if (!failed) note_file("sync", &call, file);
    leave(&call);
    return failed;
}
int fsync(int file) {
    REAL(int, fsync, (int));
    return sync_any(file, real_fsync);
}
int fdatasync(int file) {
    REAL(int, fdatasync, (int));
    return sync_any(file, real_fdatasync);
}

/* --- names --- */

static int make_folder(int folder, const char *path, mode_t mode) {
    REAL(int, mkdirat, (int, const char *, mode_t));
    struct call call = {0};
    if (watched()) join(folder, path, call.path);
    if (arrive(&call, 0, 1)) return -1;
    int failed = real_mkdirat(folder, path, mode);
    if (!failed) note_entry("enter", &call, call.path, 0);
    leave(&call);
    return failed;
}
int mkdir(const char *path, mode_t mode) { return make_folder(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return make_folder(folder, path, mode); }

static int remove_any(int folder, const char *path, int flags) {
    REAL(int, unlinkat, (int, const char *, int));
    struct call call = {0};
    if (watched()) join(folder, path, call.path);
    if (arrive(&call, 0, 0)) return -1;
    ino_t gone = call.number ? keep(call.path) : 0;
    int failed = real_unlinkat(folder, path, flags);
    if (!failed && gone) note_entry("leave", &call, call.path, gone);
    leave(&call);
    return failed;
}
int unlink(const char *path) { return remove_any(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return remove_any(folder, path, flags); }
int rmdir(const char *path) { return remove_any(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) {
    int failed = remove_any(AT_FDCWD, path, 0);
    return failed && errno == EISDIR ? rmdir(path) : failed;
}

static int rename_any(int from, const char *old, int to, const char *new, unsigned int flags) {
    REAL(int, renameat2, (int, const char *, int, const char *, unsigned int));
    struct call call = {0};
    char source[PATH_MAX] = "";
    if (watched()) {
        join(to, new, call.path);
        join(from, old, source);
    }
    if (arrive(&call, 0, 1)) return -1;
    struct stat status;
    int known = call.number && !lstat(source, &status);
    int exchange = flags & RENAME_EXCHANGE;
    if (call.number && !exchange) keep(call.path);
    int failed = real_renameat2(from, old, to, new, flags);
    if (!failed && known && exchange) { /* what each name stands for from now on */
        note_entry("exchange", &call, source, 0);
        note_entry("exchange", &call, call.path, 0);
    } else if (!failed && known) {
        note_entry("leave", &call, source, status.st_ino);
        note_entry("enter", &call, call.path, 0);
    }
    leave(&call);
    return failed;
}
int rename(const char *old, const char *new) {
    return rename_any(AT_FDCWD, old, AT_FDCWD, new, 0);
}
int renameat(int from, const char *old, int to, const char *new) {
    return rename_any(from, old, to, new, 0);
}
int renameat2(int from, const char *old, int to, const char *new, unsigned int flags) {
    return rename_any(from, old, to, new, flags);
}

int linkat(int from, const char *old, int to, const char *new, int flags) {
    REAL(int, linkat, (int, const char *, int, const char *, int));
    struct call call = {0};
    if (watched()) join(to, new, call.path);
    if (arrive(&call, 0, 1)) return -1;
    int failed = real_linkat(from, old, to, new, flags);
    if (!failed) note_entry("enter", &call, call.path, 0);
    leave(&call);
    return failed;
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

/* --- reads --- */

/* A function of the C library that fails if `test` does, and is called otherwise. */
#define READ(type, name, parameters, arguments, test, failed)     \
    type name parameters {                                         \
        REAL(type, name, parameters);                              \
        return test ? failed : real_##name arguments;              \
    }
READ(ssize_t, read, (int file, void *into, size_t size), (file, into, size),
     read_fails("read", file), -1)
READ(ssize_t, pread64, (int file, void *into, size_t size, off64_t from), (file, into, size, from),
     read_fails("read", file), -1)
READ(ssize_t, preadv64v2, (int file, const struct iovec *into, int count, off64_t from, int flags),
     (file, into, count, from, flags), read_fails("read", file), -1)
READ(int, fstat64, (int file, struct stat64 *into), (file, into), read_fails("stat", file), -1)
READ(int, stat64, (const char *path, struct stat64 *into), (path, into),
     name_fails("stat", AT_FDCWD, path, 0), -1)
READ(int, lstat64, (const char *path, struct stat64 *into), (path, into),
     name_fails("stat", AT_FDCWD, path, 0), -1)
READ(int, fstatat64, (int folder, const char *path, struct stat64 *into, int flags),
     (folder, path, into, flags), name_fails("stat", folder, path, 0), -1)
READ(int, access, (const char *path, int mode), (path, mode),
     name_fails("access", AT_FDCWD, path, 0), -1)
READ(DIR *, opendir, (const char *path), (path), name_fails("list", AT_FDCWD, path, 1), NULL)
READ(struct dirent64 *, readdir64, (DIR *folder), (folder), read_fails("list", dirfd(folder)), NULL)
