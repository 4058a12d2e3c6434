/* Counts files that are opened: a line of RLHF_OPENS for each open of a path below RLHF_OPENS_BELOW.
   Preloaded into every process of a command, so that opens from C++ and Rust count too. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void note(const char *path, int flags) {
  const char *log = getenv("RLHF_OPENS"), *below = getenv("RLHF_OPENS_BELOW");
  if (!log || !below || !path || (flags & O_DIRECTORY) || strncmp(path, below, strlen(below))) return;
  char line[PATH_MAX + 4];
  int length = snprintf(line, sizeof line, "%c %s\n", flags & (O_WRONLY | O_RDWR) ? 'w' : 'r', path + strlen(below));
  /* Opened each time: a number that is kept may be another file's by then. */
  int file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0 || write(file, line, length) != length) abort();
  syscall(SYS_close, file);
}

static int opened(int folder, const char *path, int flags, va_list rest) {
  int mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0;
  int file = syscall(SYS_openat, folder, path, flags, mode);
  if (file >= 0) note(path, flags);
  return file;
}

#define OPEN(name)                                   \
  int name(const char *path, int flags, ...) {       \
    va_list rest;                                    \
    va_start(rest, flags);                           \
    int file = opened(AT_FDCWD, path, flags, rest);  \
    va_end(rest);                                    \
    return file;                                     \
  }
#define OPENAT(name)                                       \
  int name(int folder, const char *path, int flags, ...) { \
    va_list rest;                                          \
    va_start(rest, flags);                                 \
    int file = opened(folder, path, flags, rest);          \
    va_end(rest);                                          \
    return file;                                           \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
