/* The calls of libc that a rule can have fail, and the recording of those that change files.
 *
 * A record is a header, up to two paths and the data, appended to the file `record` of the lab. The
 * lock of the lab is held while a recorded call is made, so that the records are in its order. It is
 * written before the call: a process that is killed in between has changed nothing more. A call that
 * fails or writes less is followed by a record of its result. A sync has two: what was written before
 * the first is on disk from the second on.
 */
#define _GNU_SOURCE
#include "rules.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

enum kind { RESULT, OPEN, WRITE, TRUNCATE, SYNC, SYNCED, RENAME, LINK, UNLINK, MKDIR, RMDIR };

struct record {
    uint32_t magic, kind;
    uint64_t order;
    int64_t number; /* offset, length, flags or result */
    uint32_t pid, size_path, size_other, size_data;
};

static int fail(int error) {
    errno = error;
    return -1;
}

static int end(struct outcome outcome, int result) {
    if (outcome.kills) end_process(outcome.exit_code);
    return result;
}

/* Return the absolute path of what a call names, or NULL. */
static const char *path_at(int folder, const char *path, char *text) {
    char link[64];
    if (path != NULL && *path == '/') return path;
    if (folder == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, text, MAX_TEXT - 1);
    if (size < 0) return NULL;
    text[size] = '\0';
    if (path != NULL && *path) snprintf(text + size, MAX_TEXT - size, "/%s", path);
    return text;
}

static const char *path_of(int file, char *text) { return path_at(file, NULL, text); }

static void lock(struct shared *lab) {
    if (pthread_mutex_lock(&lab->lock) == EOWNERDEAD) pthread_mutex_consistent(&lab->lock);
}

static void unlock(struct shared *lab) { pthread_mutex_unlock(&lab->lock); }

/* Append a record; the lock is held. */
static uint64_t record(enum kind kind, int64_t number, const char *path, const char *other,
                       const struct iovec *data, int count, size_t size) {
    struct record header = {.magic = 0xFA171AB5, .kind = kind, .order = ++lab()->order, .number = number,
        .pid = getpid(), .size_path = path ? strlen(path) : 0, .size_other = other ? strlen(other) : 0, .size_data = size};
    struct iovec parts[3 + 64] = {{&header, sizeof header}, {(void *)path, header.size_path}, {(void *)other, header.size_other}};
    int num = 3;
    for (int i = 0; i < count && num < 3 + 64 && size; i++) {
        parts[num] = data[i];
        if (parts[num].iov_len > size) parts[num].iov_len = size;
        size -= parts[num++].iov_len;
    }
    int file = lab_file("record", O_WRONLY | O_APPEND | O_CREAT);
    if (file >= 0) {
        syscall(SYS_writev, file, parts, num);
        syscall(SYS_close, file);
    }
    return header.order;
}

static void record_result(uint64_t order, int64_t result) {
    struct iovec data = {&order, sizeof order};
    record(RESULT, result, NULL, NULL, &data, 1, sizeof order);
}

/* ---- writes ------------------------------------------------------------------------------------ */

static ssize_t make_write(int file, const struct iovec *data, int count, off_t offset) {
    return offset < 0 ? syscall(SYS_writev, file, data, count)
                      : syscall(SYS_pwritev, file, data, count, offset, 0L);
}

static ssize_t any_write(const char *name, int file, const struct iovec *given, int count, off_t offset) {
    if (lab() == NULL || !watches("write", name)) return make_write(file, given, count, offset);
    char text[MAX_TEXT];
    const char *path = path_of(file, text);
    struct outcome outcome = outcome_of("write", name, path, NULL);
    if (outcome.error) return end(outcome, fail(outcome.error));
    struct iovec data[64];
    size_t size = 0;
    count = count < 64 ? count : 64; /* the caller writes the rest, as after any short write */
    for (int i = 0; i < count; i++) data[i] = given[i], size += given[i].iov_len;
    if (outcome.is_short && size > 1) {
        size_t rest = outcome.limit && outcome.limit < size ? outcome.limit : size / 2;
        size = rest;
        for (int i = 0; i < count; i++) {
            if (data[i].iov_len > rest) data[i].iov_len = rest;
            rest -= data[i].iov_len;
        }
    }
    ssize_t result;
    if (is_recorded(path)) {
        lock(lab());
        off_t at = offset;
        if (at < 0) {
            struct stat found;
            bool appends = syscall(SYS_fcntl, file, F_GETFL, 0L) & O_APPEND;
            at = appends && !fstat(file, &found) ? found.st_size : lseek(file, 0, SEEK_CUR);
        }
        uint64_t order = record(WRITE, at, path_of(file, text), NULL, data, count, size);
        result = make_write(file, data, count, offset);
        int error = errno;
        if (result != (ssize_t)size) record_result(order, result);
        unlock(lab());
        errno = error;
    } else {
        result = make_write(file, data, count, offset);
    }
    if (outcome.kills) end_process(outcome.exit_code);
    return result;
}

ssize_t write(int file, const void *data, size_t size) {
    if (lab() == NULL || !watches("write", "write")) return syscall(SYS_write, file, data, size);
    return any_write("write", file, &(struct iovec){(void *)data, size}, 1, -1);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) {
    return any_write("pwrite", file, &(struct iovec){(void *)data, size}, 1, offset);
}
ssize_t pwrite64(int file, const void *data, size_t size, off_t offset) { return pwrite(file, data, size, offset); }
ssize_t writev(int file, const struct iovec *data, int count) { return any_write("writev", file, data, count, -1); }
ssize_t pwritev(int file, const struct iovec *data, int count, off_t offset) {
    return any_write("pwritev", file, data, count, offset);
}
ssize_t pwritev64(int file, const struct iovec *data, int count, off_t offset) { return pwritev(file, data, count, offset); }

/* What copies inside the kernel has no data to record: the caller reads and writes instead. */
ssize_t sendfile(int target, int source, off_t *offset, size_t size) {
    char text[MAX_TEXT];
    if (lab() != NULL && watches("write", "sendfile") && is_recorded(path_of(target, text))) return fail(EINVAL);
    return syscall(SYS_sendfile, target, source, offset, size);
}
ssize_t sendfile64(int target, int source, off_t *offset, size_t size) { return sendfile(target, source, offset, size); }
ssize_t copy_file_range(int source, off_t *from, int target, off_t *to, size_t size, unsigned flags) {
    char text[MAX_TEXT];
    if (lab() != NULL && watches("write", "copy_file_range") && is_recorded(path_of(target, text))) return fail(EXDEV);
    return syscall(SYS_copy_file_range, source, from, target, to, size, flags);
}

/* ---- calls with a result of 0 or -1 ------------------------------------------------------------- */

struct change {
    enum kind kind;
    int64_t number;
    const char *group, *name, *path, *other;
    long call, arguments[5];
};

static int make_change(struct change change) {
    long *a = change.arguments;
    if (lab() == NULL || !watches(change.group, change.name)) return syscall(change.call, a[0], a[1], a[2], a[3], a[4]);
    struct outcome outcome = outcome_of(change.group, change.name, change.path, change.other);
    if (outcome.error) return end(outcome, fail(outcome.error));
    if (!is_recorded(change.path) && !is_recorded(change.other))
        return end(outcome, syscall(change.call, a[0], a[1], a[2], a[3], a[4]));
    lock(lab());
    uint64_t order = record(change.kind, change.number, change.path, change.other, NULL, 0, 0);
    int result, error;
    if (change.kind == SYNC) {
        unlock(lab());
        result = syncs() ? syscall(change.call, a[0]) : 0;
        error = errno;
        lock(lab());
        if (result == 0) record(SYNCED, (int64_t)order, change.path, NULL, NULL, 0, 0);
    } else {
        result = syscall(change.call, a[0], a[1], a[2], a[3], a[4]);
        error = errno;
        if (result < 0) record_result(order, result);
    }
    unlock(lab());
    errno = error;
    return end(outcome, result);
}

static int sync_file(const char *name, long call, int file) {
    char text[MAX_TEXT];
    bool is_seen = lab() != NULL && watches("sync", name);
    return make_change((struct change){SYNC, 0, "sync", name, is_seen ? path_of(file, text) : NULL, NULL, call, {file}});
}
int fsync(int file) { return sync_file("fsync", SYS_fsync, file); }
int fdatasync(int file) { return sync_file("fdatasync", SYS_fdatasync, file); }

static int two_paths(enum kind kind, const char *group, const char *name, long call, int from, const char *path, int to,
                     const char *other, unsigned flags) {
    char text[MAX_TEXT], more[MAX_TEXT];
    return make_change((struct change){kind, flags, group, name, path_at(from, path, text), path_at(to, other, more), call,
        {from, (long)path, to, (long)other, flags}});
}
int renameat2(int from, const char *path, int to, const char *other, unsigned flags) {
    return two_paths(RENAME, "rename", "renameat2", SYS_renameat2, from, path, to, other, flags);
}
int renameat(int from, const char *path, int to, const char *other) { return renameat2(from, path, to, other, 0); }
int rename(const char *path, const char *other) { return renameat2(AT_FDCWD, path, AT_FDCWD, other, 0); }
int linkat(int from, const char *path, int to, const char *other, int flags) {
    return two_paths(LINK, "link", "linkat", SYS_linkat, from, path, to, other, flags);
}
int link(const char *path, const char *other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }

int unlinkat(int folder, const char *path, int flags) {
    char text[MAX_TEXT];
    enum kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    return make_change((struct change){kind, 0, "unlink", "unlinkat", path_at(folder, path, text), NULL, SYS_unlinkat,
        {folder, (long)path, flags}});
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int mkdirat(int folder, const char *path, mode_t mode) {
    char text[MAX_TEXT];
    return make_change((struct change){MKDIR, mode, "mkdir", "mkdirat", path_at(folder, path, text), NULL, SYS_mkdirat,
        {folder, (long)path, mode}});
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int ftruncate(int file, off_t length) {
    char text[MAX_TEXT];
    bool is_seen = lab() != NULL && watches("truncate", "ftruncate");
    return make_change((struct change){TRUNCATE, length, "truncate", "ftruncate", is_seen ? path_of(file, text) : NULL, NULL,
        SYS_ftruncate, {file, length}});
}
int ftruncate64(int file, off_t length) { return ftruncate(file, length); }
int truncate(const char *path, off_t length) {
    char text[MAX_TEXT];
    return make_change((struct change){TRUNCATE, length, "truncate", "truncate", path_at(AT_FDCWD, path, text), NULL,
        SYS_truncate, {(long)path, length}});
}
int truncate64(const char *path, off_t length) { return truncate(path, length); }

/* ---- open --------------------------------------------------------------------------------------- */

static int any_open(int folder, const char *path, int flags, mode_t mode) {
    if (lab() == NULL || !watches("open", "open")) return syscall(SYS_openat, folder, path, flags, mode);
    char text[MAX_TEXT];
    const char *whole = path_at(folder, path, text);
    struct outcome outcome = outcome_of("open", "open", whole, NULL);
    if (outcome.error) return end(outcome, fail(outcome.error));
    if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !is_recorded(whole))
        return end(outcome, syscall(SYS_openat, folder, path, flags, mode));
    lock(lab());
    uint64_t order = record(OPEN, flags, whole, NULL, NULL, 0, 0);
    int result = syscall(SYS_openat, folder, path, flags, mode), error = errno;
    if (result < 0) record_result(order, -1);
    unlock(lab());
    errno = error;
    return end(outcome, result);
}

#define OPEN_LIKE(name, folder, ...)                                                   \
    int name(__VA_ARGS__, int flags, ...) {                                            \
        mode_t mode = 0;                                                               \
        if (flags & (O_CREAT | O_TMPFILE)) {                                           \
            va_list rest;                                                              \
            va_start(rest, flags);                                                     \
            mode = va_arg(rest, mode_t);                                               \
            va_end(rest);                                                              \
        }                                                                              \
        return any_open(folder, path, flags, mode);                                    \
    }
OPEN_LIKE(open, AT_FDCWD, const char *path)
OPEN_LIKE(open64, AT_FDCWD, const char *path)
OPEN_LIKE(openat, folder, int folder, const char *path)
OPEN_LIKE(openat64, folder, int folder, const char *path)
int __open_2(const char *path, int flags) { return any_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return any_open(AT_FDCWD, path, flags, 0); }
int creat(const char *path, mode_t mode) { return any_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* libstdc++ opens by it, and writes by the calls above. */
static FILE *any_fopen(const char *name, const char *path, const char *mode) {
    FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, name);
    if (lab() == NULL || !watches("open", name)) return real(path, mode);
    char text[MAX_TEXT];
    const char *whole = path_at(AT_FDCWD, path, text);
    struct outcome outcome = outcome_of("open", name, whole, NULL);
    if (outcome.error) {
        end(outcome, fail(outcome.error));
        return NULL;
    }
    if (*mode == 'r' || !is_recorded(whole)) return real(path, mode);
    lock(lab());
    uint64_t order = record(OPEN, O_CREAT | (*mode == 'w' ? O_TRUNC : 0), whole, NULL, NULL, 0, 0);
    FILE *result = real(path, mode);
    if (result == NULL) record_result(order, -1);
    unlock(lab());
    return result;
}
FILE *fopen(const char *path, const char *mode) { return any_fopen("fopen", path, mode); }
FILE *fopen64(const char *path, const char *mode) { return any_fopen("fopen64", path, mode); }

/* ---- locks, connections and processes ------------------------------------------------------------ */

static int gate(const char *group, const char *name, const char *path, struct outcome *outcome) {
    *outcome = (struct outcome){.exit_code = -1};
    if (lab() == NULL || !watches(group, name)) return 0;
    *outcome = outcome_of(group, name, path, NULL);
    return outcome->error;
}

int flock(int file, int operation) {
    char text[MAX_TEXT];
    struct outcome outcome;
    int error = operation == LOCK_UN ? 0 : gate("lock", "flock", lab() ? path_of(file, text) : NULL, &outcome);
    if (operation == LOCK_UN) return syscall(SYS_flock, file, operation);
    return end(outcome, error ? fail(error) : (int)syscall(SYS_flock, file, operation));
}

static int any_fcntl(int file, int command, long argument) {
    bool locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
    if (!locks || ((struct flock *)argument)->l_type == F_UNLCK) return syscall(SYS_fcntl, file, command, argument);
    char text[MAX_TEXT];
    struct outcome outcome;
    int error = gate("lock", "fcntl", lab() ? path_of(file, text) : NULL, &outcome);
    return end(outcome, error ? fail(error) : (int)syscall(SYS_fcntl, file, command, argument));
}
int fcntl(int file, int command, ...) {
    va_list rest;
    va_start(rest, command);
    long argument = va_arg(rest, long);
    va_end(rest);
    return any_fcntl(file, command, argument);
}
int fcntl64(int file, int command, ...) {
    va_list rest;
    va_start(rest, command);
    long argument = va_arg(rest, long);
    va_end(rest);
    return any_fcntl(file, command, argument);
}

int connect(int file, const struct sockaddr *address, socklen_t size) {
    char text[256] = "other:", host[64];
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof host);
        snprintf(text, sizeof text, "tcp:%s:%d", host, ntohs(in->sin_port));
    } else if (address->sa_family == AF_UNIX && size > sizeof(sa_family_t)) {
        snprintf(text, sizeof text, "unix:%.107s", ((const struct sockaddr_un *)address)->sun_path);
    }
    struct outcome outcome;
    int error = gate("connect", "connect", text, &outcome);
    return end(outcome, error ? fail(error) : (int)syscall(SYS_connect, file, address, size));
}

int execve(const char *path, char *const arguments[], char *const environment[]) {
    struct outcome outcome;
    int error = gate("spawn", "execve", path, &outcome);
    return error ? fail(error) : (int)syscall(SYS_execve, path, arguments, environment);
}

extern char **environ;
int execv(const char *path, char *const arguments[]) { return execve(path, arguments, environ); }

pid_t fork(void) {
    static pid_t (*real)(void);
    struct outcome outcome;
    int error = gate("spawn", "fork", NULL, &outcome);
    if (real == NULL) real = (pid_t(*)(void))dlsym(RTLD_NEXT, "fork");
    return error ? fail(error) : real();
}

typedef int spawn_call(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *, char *const[],
                       char *const[]);

static int any_spawn(const char *name, pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                     const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {
    struct outcome outcome;
    int error = gate("spawn", name, path, &outcome);
    spawn_call *real = (spawn_call *)dlsym(RTLD_NEXT, name);
    return error ? error : real(pid, path, actions, attributes, arguments, environment);
}
int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                char *const arguments[], char *const environment[]) {
    return any_spawn("posix_spawn", pid, path, actions, attributes, arguments, environment);
}
int posix_spawnp(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                 char *const arguments[], char *const environment[]) {
    return any_spawn("posix_spawnp", pid, path, actions, attributes, arguments, environment);
}
