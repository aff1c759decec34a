/* Loaded before libc into one process of a drill: bends its wall clock and its disk.

   The orders are four numbers in a file that is mapped into memory, so that the drill changes them
   while the process runs. CLOCK_MONOTONIC and CLOCK_BOOTTIME stay as they are: a step of the wall
   clock does not move them either. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct orders {
  int64_t clock_offset_ns; /* added to CLOCK_REALTIME */
  int64_t sync_delay_us;   /* slept before each fsync and fdatasync */
  int64_t sync_error;      /* errno that they fail with, 0: they do their work */
  int64_t disk_full;       /* files get no further room, and no file system says that it has any */
};

static volatile struct orders *orders;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_fdatasync)(int);
static int (*real_fsync)(int);

__attribute__((constructor)) static void begin(void) {
  real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  real_fdatasync = dlsym(RTLD_NEXT, "fdatasync");
  real_fsync = dlsym(RTLD_NEXT, "fsync");
  const char *path = getenv("DRILL_ORDERS");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0)
    return;
  void *found = mmap(NULL, sizeof(struct orders), PROT_READ, MAP_SHARED, fd, 0);
  if (found != MAP_FAILED)
    orders = found;
  close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *out) {
  if (!real_gettime)
    real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real_gettime(clock, out);
  if (result || !orders || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
    return result;
  int64_t ns = out->tv_sec * 1000000000LL + out->tv_nsec + orders->clock_offset_ns;
  out->tv_sec = ns / 1000000000LL;
  out->tv_nsec = ns % 1000000000LL;
  return 0;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  (void)zone;
  struct timespec now;
  if (clock_gettime(CLOCK_REALTIME, &now))
    return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out)
    *out = now.tv_sec;
  return now.tv_sec;
}

static int bent_sync(int (*real)(int), int fd) {
  if (orders && orders->sync_delay_us) {
    struct timespec wait = {orders->sync_delay_us / 1000000,
                            orders->sync_delay_us % 1000000 * 1000};
    nanosleep(&wait, NULL);
  }
  if (orders && orders->sync_error) {
    errno = (int)orders->sync_error;
    return -1;
  }
  return real(fd);
}

int fdatasync(int fd) { return bent_sync(real_fdatasync, fd); }

int fsync(int fd) { return bent_sync(real_fsync, fd); }

/* A full disk: files that have their room already can still be written where they have it. */

static int (*real_fallocate)(int, off_t, off_t);
static int (*real_fallocate64)(int, off64_t, off64_t);
static ssize_t (*real_write)(int, const void *, size_t);
static int (*real_statvfs)(const char *, struct statvfs *);
static int (*real_statvfs64)(const char *, struct statvfs64 *);
static int (*real_fstatvfs)(int, struct statvfs *);

#define FIND(name, symbol)                                                                         \
  if (!(name))                                                                                     \
  name = dlsym(RTLD_NEXT, symbol)

static int full(void) { return orders && orders->disk_full; }

int posix_fallocate(int fd, off_t offset, off_t size) {
  FIND(real_fallocate, "posix_fallocate");
  return full() ? ENOSPC : real_fallocate(fd, offset, size);
}

int posix_fallocate64(int fd, off64_t offset, off64_t size) {
  FIND(real_fallocate64, "posix_fallocate64");
  return full() ? ENOSPC : real_fallocate64(fd, offset, size);
}

ssize_t write(int fd, const void *data, size_t size) {
  FIND(real_write, "write");
  struct stat about;
  /* What a process logs on its first descriptors goes to another disk. */
  if (full() && fd > 2 && !fstat(fd, &about) && S_ISREG(about.st_mode)) {
    errno = ENOSPC;
    return -1;
  }
  return real_write(fd, data, size);
}

int statvfs(const char *restrict path, struct statvfs *restrict out) {
  FIND(real_statvfs, "statvfs");
  int result = real_statvfs(path, out);
  if (!result && full())
    out->f_bfree = out->f_bavail = 0;
  return result;
}

int statvfs64(const char *restrict path, struct statvfs64 *restrict out) {
  FIND(real_statvfs64, "statvfs64");
  int result = real_statvfs64(path, out);
  if (!result && full())
    out->f_bfree = out->f_bavail = 0;
  return result;
}

int fstatvfs(int fd, struct statvfs *out) {
  FIND(real_fstatvfs, "fstatvfs");
  int result = real_fstatvfs(fd, out);
  if (!result && full())
    out->f_bfree = out->f_bavail = 0;
  return result;
}
