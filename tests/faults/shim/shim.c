/* Preloaded before libc: counts the file calls below one directory, and lets one of them fail or the process die.
 *
 * A test arms it in the process under test (through ctypes): which calls count, which of them is hit, and by what.
 * Nothing is intercepted before `shim_arm`. Calls that are denied fail always and are not counted: they stand for
 * a file system that lacks them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAX_DENIED 8

static char prefix[PATH_MAX];
static char kinds[256];  /* " open read " : the kinds that count; empty: all */
static long hit_at;      /* the first call that is hit, from 1; 0: none */
static int hit_errno;    /* it fails with this … */
static int hit_signal;   /* … or the process gets this signal, before the call */
static int hit_on;       /* all later calls are hit as well */
static long short_bytes; /* reads and writes move at most this many bytes; 0: all */
static long free_bytes;  /* what statvfs says is free; -1: the truth */
static int log_descriptor = -1;
static int log_all;      /* all calls that count are logged, not only the one that is hit */
static struct { char kind[24]; int number; } denied[MAX_DENIED];
static int num_denied;
static atomic_long count;
static atomic_int armed;

/* Arm. `deny`: "renameat2=22 flock=37". */
void shim_arm(const char *below, const char *only, long nth, int error, int signal_number, int on, long short_io,
              long free_space, const char *deny, int log, int trace)
{
    snprintf(prefix, sizeof prefix, "%s", below);
    kinds[0] = 0;
    if (*only) snprintf(kinds, sizeof kinds, " %s ", only);
    hit_at = nth, hit_errno = error, hit_signal = signal_number, hit_on = on;
    short_bytes = short_io, free_bytes = free_space, log_descriptor = log, log_all = trace;
    num_denied = 0;
    int used = 0;
    while (num_denied < MAX_DENIED
           && sscanf(deny, " %23[^=]=%d%n", denied[num_denied].kind, &denied[num_denied].number, &used) == 2) {
        deny += used;
        num_denied++;
    }
    atomic_store(&count, 0);
    atomic_store(&armed, 1);
}

/* Disarm; return how many calls were counted. */
long shim_disarm(void)
{
    atomic_store(&armed, 0);
    return atomic_load(&count);
}

static int is_below(const char *path)
{
    size_t length = strlen(prefix);
    return !strncmp(path, prefix, length) && (!path[length] || path[length] == '/' || path[length] == ' ');
}

static int path_of(int descriptor, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

/* Return 0 to go on, or the errno to fail with. */
static int judge(const char *kind, const char *path)
{
    if (!is_below(path)) return 0;
    for (int i = 0; i < num_denied; i++)
        if (!strcmp(kind, denied[i].kind)) return denied[i].number;
    char wanted[32];
    snprintf(wanted, sizeof wanted, " %s ", kind);
    if (kinds[0] && !strstr(kinds, wanted)) return 0;
    long now = atomic_fetch_add(&count, 1) + 1;
    int is_hit = hit_at && (now == hit_at || (now > hit_at && hit_on));
    if (log_descriptor >= 0 && (log_all || (is_hit && now == hit_at))) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %s %s\n", now == hit_at ? "hit" : "call", kind, path);
        if (write(log_descriptor, line, (size_t)length) < 0) abort();
    }
    if (!is_hit) return 0;
    if (hit_signal) {
        raise(hit_signal);
        return 0;
    }
    return hit_errno;
}

static int judge_at(const char *kind, int directory, const char *name)
{
    if (!atomic_load(&armed) || !name) return 0;
    if (*name == '/') return judge(kind, name);
    char path[2 * PATH_MAX];
    if (directory == AT_FDCWD ? !getcwd(path, PATH_MAX) : !path_of(directory, path)) return 0;
    if (*name) {
        strcat(path, "/");
        strncat(path, name, PATH_MAX - 2);
    }
    return judge(kind, path);
}

static int judge_descriptor(const char *kind, int descriptor)
{
    char path[PATH_MAX];
    if (!atomic_load(&armed) || !path_of(descriptor, path)) return 0;
    return judge(kind, path);
}

static int is_watched(int descriptor)
{
    char path[PATH_MAX];
    return atomic_load(&armed) && path_of(descriptor, path) && is_below(path);
}

static size_t shortened(int descriptor, size_t nbytes)
{
    if (!short_bytes || nbytes <= (size_t)short_bytes) return nbytes;
    return is_watched(descriptor) ? (size_t)short_bytes : nbytes;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(verdict)          \
    do {                          \
        int number_ = (verdict);  \
        if (number_) {            \
            errno = number_;      \
            return -1;            \
        }                         \
    } while (0)

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...)                            \
    {                                                                     \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = va_arg(rest, mode_t);                               \
        va_end(rest);                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_at("open", AT_FDCWD, path));                        \
        return real(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                      \
    int name(int directory, const char *path, int flags, ...)             \
    {                                                                     \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = va_arg(rest, mode_t);                               \
        va_end(rest);                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_at("open", directory, path));                       \
        return real(directory, path, flags, mode);                        \
    }
OPENAT(openat)
OPENAT(openat64)

/* openat2 has no function in libc. */
long syscall(long number, ...)
{
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    REAL(syscall);
#ifdef SYS_openat2
    if (number == SYS_openat2) FAIL_IF(judge_at("open", (int)a, (const char *)b));
#endif
    return real(number, a, b, c, d, e, f);
}

ssize_t read(int descriptor, void *buffer, size_t nbytes)
{
    REAL(read);
    FAIL_IF(judge_descriptor("read", descriptor));
    return real(descriptor, buffer, shortened(descriptor, nbytes));
}

ssize_t write(int descriptor, const void *buffer, size_t nbytes)
{
    REAL(write);
    FAIL_IF(judge_descriptor("write", descriptor));
    return real(descriptor, buffer, shortened(descriptor, nbytes));
}

#define PREAD(name, off_type)                                             \
    ssize_t name(int descriptor, void *buffer, size_t nbytes, off_type offset) \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_descriptor("read", descriptor));                    \
        return real(descriptor, buffer, shortened(descriptor, nbytes), offset); \
    }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define PWRITE(name, off_type)                                            \
    ssize_t name(int descriptor, const void *buffer, size_t nbytes, off_type offset) \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_descriptor("write", descriptor));                   \
        return real(descriptor, buffer, shortened(descriptor, nbytes), offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

/* Short vectors: the first bytes of the first buffer that has any. */
#define VECTOR(name, kind, parameters, ...)                               \
    ssize_t name parameters                                               \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_descriptor(kind, descriptor));                      \
        if (short_bytes && is_watched(descriptor))                        \
            for (int i = 0; i < number; i++)                              \
                if (buffers[i].iov_len) {                                 \
                    struct iovec one = buffers[i];                        \
                    if (one.iov_len > (size_t)short_bytes) one.iov_len = (size_t)short_bytes; \
                    buffers = &one, number = 1;                           \
                    return real(__VA_ARGS__);                             \
                }                                                         \
        return real(__VA_ARGS__);                                         \
    }
VECTOR(preadv, "read", (int descriptor, const struct iovec *buffers, int number, off_t offset), descriptor, buffers, number,
       offset)
VECTOR(preadv64, "read", (int descriptor, const struct iovec *buffers, int number, off64_t offset), descriptor, buffers, number,
       offset)
VECTOR(pwritev, "write", (int descriptor, const struct iovec *buffers, int number, off_t offset), descriptor, buffers, number,
       offset)
VECTOR(pwritev64, "write", (int descriptor, const struct iovec *buffers, int number, off64_t offset), descriptor, buffers, number,
       offset)

VECTOR(preadv2, "read", (int descriptor, const struct iovec *buffers, int number, off_t offset, int flags), descriptor,
       buffers, number, offset, flags)
VECTOR(preadv64v2, "read", (int descriptor, const struct iovec *buffers, int number, off64_t offset, int flags),
       descriptor, buffers, number, offset, flags)
VECTOR(pwritev2, "write", (int descriptor, const struct iovec *buffers, int number, off_t offset, int flags), descriptor,
       buffers, number, offset, flags)
VECTOR(pwritev64v2, "write", (int descriptor, const struct iovec *buffers, int number, off64_t offset, int flags),
       descriptor, buffers, number, offset, flags)

#define POSIX_FALLOCATE(name, off_type)                                   \
    int name(int descriptor, off_type offset, off_type nbytes)            \
    {                                                                     \
        REAL(name);                                                       \
        int number = judge_descriptor("fallocate", descriptor);           \
        return number ? number : real(descriptor, offset, nbytes);        \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define ON_DESCRIPTOR(name, kind, parameters, ...)                        \
    int name parameters                                                   \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_descriptor(kind, descriptor));                      \
        return real(__VA_ARGS__);                                         \
    }
ON_DESCRIPTOR(fallocate, "fallocate", (int descriptor, int mode, off_t offset, off_t nbytes), descriptor, mode, offset,
              nbytes)
ON_DESCRIPTOR(fallocate64, "fallocate", (int descriptor, int mode, off64_t offset, off64_t nbytes), descriptor, mode,
              offset, nbytes)
ON_DESCRIPTOR(ftruncate, "ftruncate", (int descriptor, off_t nbytes), descriptor, nbytes)
ON_DESCRIPTOR(ftruncate64, "ftruncate", (int descriptor, off64_t nbytes), descriptor, nbytes)
ON_DESCRIPTOR(fsync, "fsync", (int descriptor), descriptor)
ON_DESCRIPTOR(fdatasync, "fsync", (int descriptor), descriptor)
ON_DESCRIPTOR(flock, "flock", (int descriptor, int operation), descriptor, operation)
ON_DESCRIPTOR(fstat, "stat", (int descriptor, struct stat *status), descriptor, status)
ON_DESCRIPTOR(fstat64, "stat", (int descriptor, struct stat64 *status), descriptor, status)

#define ON_PATH(name, kind, directory, path, parameters, ...)             \
    int name parameters                                                   \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_at(kind, directory, path));                         \
        return real(__VA_ARGS__);                                         \
    }
ON_PATH(rename, "rename", AT_FDCWD, old, (const char *old, const char *new), old, new)
ON_PATH(renameat, "rename", from, old, (int from, const char *old, int to, const char *new), from, old, to, new)
ON_PATH(renameat2, "renameat2", from, old, (int from, const char *old, int to, const char *new, unsigned flags), from,
        old, to, new, flags)
ON_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
ON_PATH(mkdirat, "mkdir", directory, path, (int directory, const char *path, mode_t mode), directory, path, mode)
ON_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(unlinkat, "unlink", directory, path, (int directory, const char *path, int flags), directory, path, flags)
ON_PATH(rmdir, "unlink", AT_FDCWD, path, (const char *path), path)
ON_PATH(stat, "stat", AT_FDCWD, path, (const char *restrict path, struct stat *restrict status), path, status)
ON_PATH(stat64, "stat", AT_FDCWD, path, (const char *restrict path, struct stat64 *restrict status), path, status)
ON_PATH(lstat, "stat", AT_FDCWD, path, (const char *restrict path, struct stat *restrict status), path, status)
ON_PATH(lstat64, "stat", AT_FDCWD, path, (const char *restrict path, struct stat64 *restrict status), path, status)
ON_PATH(fstatat, "stat", directory, path,
        (int directory, const char *restrict path, struct stat *restrict status, int flags), directory, path, status,
        flags)
ON_PATH(fstatat64, "stat", directory, path,
        (int directory, const char *restrict path, struct stat64 *restrict status, int flags), directory, path, status,
        flags)

DIR *opendir(const char *path)
{
    REAL(opendir);
    int number = judge_at("list", AT_FDCWD, path);
    if (!number) return real(path);
    errno = number;
    return NULL;
}

#define STATVFS(name, type)                                               \
    int name(const char *restrict path, struct type *restrict status)     \
    {                                                                     \
        REAL(name);                                                       \
        FAIL_IF(judge_at("statvfs", AT_FDCWD, path));                     \
        int result = real(path, status);                                  \
        if (!result && free_bytes >= 0 && atomic_load(&armed))            \
            status->f_bavail = status->f_bfree = (fsblkcnt_t)free_bytes / status->f_frsize; \
        return result;                                                    \
    }
STATVFS(statvfs, statvfs)
STATVFS(statvfs64, statvfs64)
