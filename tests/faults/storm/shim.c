/* Loaded before libc into processes of the storm: a clock that is off, a log of what a disk was told to keep, and one
   operation below the root that fails.

   STORM_CLOCK  seconds that CLOCK_REALTIME is off by
   STORM_ROOT   folder below which changes are logged
   STORM_LOG    file of the log, one event a line, fields divided by tabs; folders and files by inode
   STORM_GRAVES folder on the same file system, where what is removed or replaced stays by a hard link
   STORM_FAIL   file of three longs that processes share: operations so far, the number of the one that fails
                (0: none is counted, -1: none fails and all are logged), its errno

   W ino           data of a file changed and not synced
   S ino           a file or folder was synced
   C dir name      a file was created                   M dir name      a folder was created
   R dir name dir name grave   renamed                  L dir name      a hard link was made
   U dir name grave            removed                  D dir name      a folder was removed
   ! what path                 the operation that has failed    ? what path     one that was counted

   A change is logged before it counts as made durable, a sync only after it has succeeded. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MOST 65536

static long offset_seconds(void) {
    static long known = LONG_MIN;
    if (known == LONG_MIN) {
        const char *text = getenv("STORM_CLOCK");
        known = text ? atol(text) : 0;
    }
    return known;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int done = syscall(SYS_clock_gettime, clock, at);
    if (!done && clock == CLOCK_REALTIME) at->tv_sec += offset_seconds();
    return done;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

static int log_file = -2;
static const char *root;
/* Of each descriptor: 0 not known, 1 outside, 2 below the root and synced, 3 below the root and changed. */
static unsigned char kinds[MOST];

static int logging(void) {
    if (log_file == -2) {
        const char *path = getenv("STORM_LOG");
        root = getenv("STORM_ROOT");
        int made = path && root ? syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644) : -1;
        /* High: programs that close or take over low descriptors leave it alone. */
        log_file = made < 0 ? -1 : fcntl(made, F_DUPFD_CLOEXEC, 60000);
        if (made >= 0 && log_file < 0) log_file = fcntl(made, F_DUPFD_CLOEXEC, 900);
        if (made >= 0) syscall(SYS_close, made);
    }
    return log_file >= 0;
}

static void say(const char *format, ...) {
    char line[2 * PATH_MAX];
    va_list rest;
    va_start(rest, format);
    int size = vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    if (syscall(SYS_write, log_file, line, size) != size) abort();
}

static int below(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* Whole path of a folder's descriptor and a name in it; 0 where it is not below the root. */
static int whole(int folder, const char *name, char *path) {
    if (!logging()) return 0;
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        char link[64], base[PATH_MAX];
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t size = readlink(link, base, sizeof base - 1);
            if (size < 0) return 0;
            base[size] = 0;
        }
        if ((size_t)snprintf(path, PATH_MAX, "%s/%s", base, name) >= PATH_MAX) return 0;
    }
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    return below(path);
}

/* Whether the operation on a path is the one that fails; errno is set then. */
static int fails_whole(const char *what, const char *path) {
    static volatile long *shared = NULL;
    if (!shared) {
        const char *name = getenv("STORM_FAIL");
        int fd = name ? syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC) : -1;
        if (fd < 0) return 0;
        shared = mmap(NULL, 3 * sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        syscall(SYS_close, fd);
    }
    if (!shared[1]) return 0;
    long number = __sync_add_and_fetch(&shared[0], 1);
    if (shared[1] < 0) say("?\t%s\t%s\n", what, path);
    if (number != shared[1]) return 0;
    say("!\t%s\t%s\n", what, path);
    errno = strstr("open read stat list", what) ? EIO : shared[2];
    return 1;
}

static int fails_at(const char *what, int folder, const char *name) {
    char path[PATH_MAX];
    int before = errno, done = name && whole(folder, name, path) && fails_whole(what, path);
    if (!done) errno = before;
    return done;
}

static int fails(const char *what, int fd) {
    char link[64], path[PATH_MAX];
    struct stat s;
    if (fd < 0 || fd >= MOST || kinds[fd] == 1 || !logging() || fd == log_file) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    if (size < 0 || !below(path) || syscall(SYS_fstat, fd, &s)) {
        kinds[fd] = 1;
        errno = before;
        return 0;
    }
    int done = fails_whole(what, path);
    if (!done) errno = before;
    return done;
}

static unsigned long inode(const char *path) {
    struct stat s;
    return syscall(SYS_newfstatat, AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW) ? 0 : s.st_ino;
}

/* Inode of the folder of a path; `*name` is what is behind it. */
static unsigned long parent(const char *path, const char **name) {
    char base[PATH_MAX];
    snprintf(base, sizeof base, "%s", path);
    char *slash = strrchr(base, '/');
    *slash = 0;
    *name = path + (slash - base) + 1;
    return inode(base);
}

static void keep(const char *path, char *grave) {
    static unsigned long count;
    const char *graves = getenv("STORM_GRAVES");
    strcpy(grave, "-");
    if (!graves) return;
    char target[PATH_MAX], name[64];
    snprintf(name, sizeof name, "%d-%lu", getpid(), __sync_fetch_and_add(&count, 1));
    snprintf(target, sizeof target, "%s/%s", graves, name);
    if (!syscall(SYS_linkat, AT_FDCWD, path, AT_FDCWD, target, 0)) strcpy(grave, name);
}

static void forget(int fd) {
    if (fd >= 0 && fd < MOST) kinds[fd] = 0;
}

static void changed(int fd) {
    if (fd < 0 || fd >= MOST || kinds[fd] == 1 || !logging() || fd == log_file) return;
    if (kinds[fd] == 3) return;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = 0;
    struct stat s;
    if (size < 0 || !below(path) || fstat(fd, &s) || !S_ISREG(s.st_mode)) {
        kinds[fd] = 1;
        return;
    }
    kinds[fd] = 3;
    say("W\t%lu\n", (unsigned long)s.st_ino);
}

static int synced(int fd, int done) {
    struct stat s;
    if (!done && logging() && !fstat(fd, &s)) {
        /* Another descriptor of the file may still say "changed": the next write of each is logged again. */
        say("S\t%lu\n", (unsigned long)s.st_ino);
        memset(kinds, 0, sizeof kinds);
    }
    return done;
}

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    if (fails_at(flags & O_ACCMODE ? "open to write" : flags & O_DIRECTORY ? "list" : "open", folder, name)) return -1;
    int ours = (flags & (O_CREAT | O_TRUNC)) && whole(folder, name, path);
    unsigned long before = ours ? inode(path) : 0;
    int fd = syscall(SYS_openat, folder, name, flags, mode);
    forget(fd);
    if (fd >= 0 && ours && !before && (flags & O_CREAT)) {
        const char *last;
        unsigned long dir = parent(path, &last);
        say("C\t%lu\t%s\n", dir, last);
    }
    if (fd >= 0 && ours && (flags & O_TRUNC || !before)) changed(fd);
    return fd;
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int d, const char *name, int flags, ...) { MODE(flags) return opened(d, name, flags, mode); }
int openat64(int d, const char *name, int flags, ...) { MODE(flags) return opened(d, name, flags, mode); }
int creat(const char *name, mode_t mode) { return opened(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int close(int fd) {
    if (fd == log_file && fd >= 0) return 0;
    forget(fd);
    return REAL(close)(fd);
}
int dup2(int from, int to) { forget(to); return REAL(dup2)(from, to); }
int dup3(int from, int to, int flags) { forget(to); return REAL(dup3)(from, to, flags); }

ssize_t write(int fd, const void *data, size_t size) { if (fails("write", fd)) return -1; changed(fd); return REAL(write)(fd, data, size); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { if (fails("write", fd)) return -1; changed(fd); return REAL(pwrite)(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { if (fails("write", fd)) return -1; changed(fd); return REAL(pwrite64)(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { if (fails("write", fd)) return -1; changed(fd); return REAL(writev)(fd, parts, count); }
ssize_t sendfile(int to, int from, off_t *at, size_t size) { if (fails("write", to)) return -1; changed(to); return REAL(sendfile)(to, from, at, size); }
ssize_t sendfile64(int to, int from, off_t *at, size_t size) { if (fails("write", to)) return -1; changed(to); return REAL(sendfile64)(to, from, at, size); }
ssize_t copy_file_range(int from, off_t *a, int to, off_t *b, size_t size, unsigned flags) {
    if (fails("write", to)) return -1;
    changed(to);
    return REAL(copy_file_range)(from, a, to, b, size, flags);
}
int ftruncate(int fd, off_t size) { if (fails("truncate", fd)) return -1; changed(fd); return REAL(ftruncate)(fd, size); }
int ftruncate64(int fd, off_t size) { if (fails("truncate", fd)) return -1; changed(fd); return REAL(ftruncate64)(fd, size); }

int fsync(int fd) { if (fails("sync", fd)) return -1; return synced(fd, REAL(fsync)(fd)); }
int fdatasync(int fd) { if (fails("sync", fd)) return -1; return synced(fd, REAL(fdatasync)(fd)); }

static int made(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (fails_at("make folder", folder, name)) return -1;
    int done = syscall(SYS_mkdirat, folder, name, mode);
    if (!done && whole(folder, name, path)) {
        const char *last;
        unsigned long dir = parent(path, &last);
        say("M\t%lu\t%s\n", dir, last);
    }
    return done;
}
int mkdir(const char *name, mode_t mode) { return made(AT_FDCWD, name, mode); }
int mkdirat(int d, const char *name, mode_t mode) { return made(d, name, mode); }

static int renamed(int a, const char *old, int b, const char *new, unsigned flags) {
    char from[PATH_MAX], to[PATH_MAX], grave[64];
    const char *first, *second;
    if (fails_at("rename", b, new)) return -1;
    int ours = whole(a, old, from) && whole(b, new, to);
    if (ours) keep(to, grave);
    int done = syscall(SYS_renameat2, a, old, b, new, flags);
    if (!done && ours) {
        unsigned long source = parent(from, &first), target = parent(to, &second);
        say("R\t%lu\t%s\t%lu\t%s\t%s\n", source, first, target, second, grave);
    }
    return done;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int a, const char *old, int b, const char *new) { return renamed(a, old, b, new, 0); }
int renameat2(int a, const char *old, int b, const char *new, unsigned flags) { return renamed(a, old, b, new, flags); }

static int linked(int a, const char *old, int b, const char *new, int flags) {
    char to[PATH_MAX];
    if (fails_at("link", b, new)) return -1;
    int done = syscall(SYS_linkat, a, old, b, new, flags);
    if (!done && whole(b, new, to)) {
        const char *last;
        unsigned long dir = parent(to, &last);
        say("L\t%lu\t%s\n", dir, last);
    }
    return done;
}
int link(const char *old, const char *new) { return linked(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int a, const char *old, int b, const char *new, int flags) { return linked(a, old, b, new, flags); }

static int removed(int folder, const char *name, int flags) {
    char path[PATH_MAX], grave[64];
    const char *last;
    if (fails_at(flags & AT_REMOVEDIR ? "remove folder" : "remove", folder, name)) return -1;
    int ours = whole(folder, name, path);
    unsigned long dir = ours ? parent(path, &last) : 0;
    if (ours && !(flags & AT_REMOVEDIR)) keep(path, grave);
    int done = syscall(SYS_unlinkat, folder, name, flags);
    if (!done && ours && flags & AT_REMOVEDIR) say("D\t%lu\t%s\n", dir, last);
    if (!done && ours && !(flags & AT_REMOVEDIR)) say("U\t%lu\t%s\t%s\n", dir, last, grave);
    return done;
}
int unlink(const char *name) { return removed(AT_FDCWD, name, 0); }
int unlinkat(int d, const char *name, int flags) { return removed(d, name, flags); }
int rmdir(const char *name) { return removed(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat s;
    int folder = !syscall(SYS_newfstatat, AT_FDCWD, name, &s, AT_SYMLINK_NOFOLLOW) && S_ISDIR(s.st_mode);
    return removed(AT_FDCWD, name, folder ? AT_REMOVEDIR : 0);
}

ssize_t read(int fd, void *data, size_t size) { return fails("read", fd) ? -1 : REAL(read)(fd, data, size); }
ssize_t pread(int fd, void *data, size_t size, off_t at) { return fails("read", fd) ? -1 : REAL(pread)(fd, data, size, at); }
ssize_t pread64(int fd, void *data, size_t size, off_t at) {
    return fails("read", fd) ? -1 : REAL(pread64)(fd, data, size, at);
}
DIR *opendir(const char *name) { return fails_at("list", AT_FDCWD, name) ? NULL : REAL(opendir)(name); }
FILE *fopen(const char *name, const char *mode) {
    return fails_at(*mode == 'r' ? "open" : "open to write", AT_FDCWD, name) ? NULL : REAL(fopen)(name, mode);
}
FILE *fopen64(const char *name, const char *mode) {
    return fails_at(*mode == 'r' ? "open" : "open to write", AT_FDCWD, name) ? NULL : REAL(fopen64)(name, mode);
}
int chmod(const char *name, mode_t mode) { return fails_at("chmod", AT_FDCWD, name) ? -1 : REAL(chmod)(name, mode); }
int access(const char *name, int mode) { return fails_at("stat", AT_FDCWD, name) ? -1 : REAL(access)(name, mode); }
#define STAT(function, type) \
    int function(const char *name, struct type *s) { \
        return fails_at("stat", AT_FDCWD, name) ? -1 : REAL(function)(name, s); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
int fstatat(int d, const char *name, struct stat *s, int flags) {
    return fails_at("stat", d, name) ? -1 : REAL(fstatat)(d, name, s, flags);
}
int fstatat64(int d, const char *name, struct stat64 *s, int flags) {
    return fails_at("stat", d, name) ? -1 : REAL(fstatat64)(d, name, s, flags);
}
int statx(int d, const char *restrict name, int flags, unsigned mask, struct statx *restrict s) {
    return fails_at("stat", d, name) ? -1 : REAL(statx)(d, name, flags, mask, s);
}
