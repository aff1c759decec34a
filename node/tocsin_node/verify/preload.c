/* Loaded before libc into one process of a drill: bends its wall clock and its disk.

   The orders are three numbers in a file that is mapped into memory, so that the drill changes them
   while the process runs. CLOCK_MONOTONIC and CLOCK_BOOTTIME stay as they are: a step of the wall
   clock does not move them either. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct orders {
  int64_t clock_offset_ns; /* added to CLOCK_REALTIME */
  int64_t sync_delay_us;   /* slept before each fsync and fdatasync */
  int64_t sync_error;      /* errno that they fail with, 0: they do their work */
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
