/* Timers of every kind at ten kilohertz and more, during hot loops and waiting calls: deliveries
 * plus overruns must equal the expirations, a computation must not be disturbed, and nothing may
 * hang.
 *
 * Hard for a translator: the kernel counts overruns until the host's delivery, the guest's comes
 * later. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include "guest.h"

static volatile long delivered[65], overruns[65], wrong;
static timer_t timers[4];

/* A running timer: the two times between which it was started, the number of expirations that it
 * has reported, and the time of the last report. */
static struct {
    long period, earliest, latest, total, last;
} running[4];

static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* What it has told of are all expirations until some moment between the last signal's arrival
 * and this one's. */
static void account(int index, int overrun) {
    long arrived = now();
    if (running[index].period == 0) return;
    running[index].total += 1 + overrun;
    long most = (arrived - running[index].earliest) / running[index].period;
    long least = (running[index].last - running[index].latest) / running[index].period;
    wrong += running[index].total > most || running[index].total < least;
    running[index].last = arrived;
}

static void on_timer(int signo, siginfo_t *info, void *context) {
    (void)context;
    int saved = errno;
    delivered[signo]++;
    if (info->si_code == SI_TIMER) {
        overruns[signo] += info->si_overrun;
        CHECK(info->si_overrun >= 0 && info->si_value.sival_int >= 0 && info->si_value.sival_int < 4);
        account(info->si_value.sival_int, info->si_overrun);
    }
    /* The handler changes everything that it may change. */
    volatile double x = delivered[signo];
    __asm__ volatile("movapd %%xmm0, %%xmm1; movapd %%xmm0, %%xmm9; movapd %%xmm0, %%xmm15; fninit; fldpi; fld1; faddp; stc; std; cld"
                     : : "Yz"(x) : "xmm1", "xmm9", "xmm15", "cc", "memory");
    errno = saved;
}

static void handle(int signo, int flags) {
    struct sigaction action = {.sa_sigaction = on_timer, .sa_flags = SA_SIGINFO | flags};
    CHECK(sigaction(signo, &action, NULL) == 0);
}

static uint64_t compute(int rounds) {
    uint64_t a = 1, b = 2, c = 3, d = 4, sum = 0;
    double x = 1.0, y = 0.5;
    uint64_t table[32];
    for (int i = 0; i < 32; i++) table[i] = i * 77;
    for (int i = 0; i < rounds; i++) {
        a = a * 6364136223846793005ULL + 1442695040888963407ULL;
        b ^= b << 13, b ^= b >> 7, b ^= b << 17;
        c += a ^ (b >> 3);
        d = (d << 5 | d >> 59) + (c < a);
        table[a >> 59] += d;
        x = x * 0.999 + y * (double)(a >> 40) * 1e-7;
        y = y * 0.5 + x * 0.25;
        unsigned char carry;
        __asm__("add %2, %0; setc %1" : "+r"(sum), "=q"(carry) : "r"(table[b & 31]));
        sum += carry;
    }
    for (int i = 0; i < 32; i++) sum = mix(sum, table[i]);
    return mix(mix(mix(sum, a ^ b), c ^ d), (uint64_t)(x * 1e9) ^ (uint64_t)(y * 1e9));
}

static long since(const struct timespec *start) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - start->tv_sec) * 1000000000L + now.tv_nsec - start->tv_nsec;
}

int main(int argc, char **argv) {
    long milliseconds = iterations(argc, argv, 150);
    uint64_t expected = compute(2000);

    /* POSIX timers: real-time and ordinary signals, to the process and to the thread, together. */
    int signals[4] = {SIGRTMIN, SIGRTMIN + 1, SIGALRM, SIGRTMIN};
    handle(SIGRTMIN, SA_RESTART), handle(SIGRTMIN + 1, SA_RESTART), handle(SIGALRM, SA_RESTART);
    long periods[4] = {100000, 70000, 130000, 250000};
    struct timespec start;
    for (int i = 0; i < 4; i++) {
        struct sigevent e = {.sigev_notify = i & 1 ? SIGEV_THREAD_ID : SIGEV_SIGNAL, .sigev_signo = signals[i], .sigev_value.sival_int = i};
        e._sigev_un._tid = (int)syscall(SYS_gettid);
        CHECK(timer_create(CLOCK_MONOTONIC, &e, &timers[i]) == 0);
    }
    sigset_t some, old;
    sigfillset(&some);
    CHECK(sigprocmask(SIG_SETMASK, &some, &old) == 0);
    for (int i = 0; i < 4; i++) {
        struct itimerspec spec = {{0, periods[i]}, {0, periods[i]}};
        running[i].earliest = now();
        CHECK(timer_settime(timers[i], 0, &spec, NULL) == 0);
        running[i].latest = running[i].last = now();
        running[i].period = periods[i];
    }
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    clock_gettime(CLOCK_MONOTONIC, &start);
    long bad = 0, sleeps = 0;
    while (since(&start) < milliseconds * 1000000 || running[0].total < 100 || running[1].total < 100 || running[2].total < 100 || running[3].total < 100) {
        bad += compute(2000) != expected;
        struct timespec moment = {0, 300000};
        sleeps += nanosleep(&moment, NULL) == 0 || errno == EINTR;
    }
    for (int i = 0; i < 4; i++) CHECK(timer_delete(timers[i]) == 0);
    memset(running, 0, sizeof running);
    printf("computations %ld wrong, %ld sums wrong, slept %d\n", bad, wrong, sleeps > 0);

    /* Blocked: one signal per timer waits, and says how many expirations it stands for. */
    struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 2, .sigev_value.sival_int = 0};
    CHECK(timer_create(CLOCK_MONOTONIC, &e, &timers[0]) == 0);
    handle(SIGRTMIN + 2, 0);
    sigemptyset(&some);
    sigaddset(&some, SIGRTMIN + 2);
    CHECK(sigprocmask(SIG_BLOCK, &some, &old) == 0);
    struct itimerspec fast = {{0, 100000}, {0, 100000}}, none = {{0, 0}, {0, 0}};
    /* It was started between these two. */
    struct timespec started;
    clock_gettime(CLOCK_MONOTONIC, &start);
    CHECK(timer_settime(timers[0], 0, &fast, NULL) == 0);
    clock_gettime(CLOCK_MONOTONIC, &started);
    while (since(&start) < 20000000) bad += compute(2000) != expected;
    long at_least = since(&started) / 100000;
    siginfo_t info;
    CHECK(sigwaitinfo(&some, &info) == SIGRTMIN + 2 && info.si_code == SI_TIMER);
    long at_most = since(&start) / 100000;
    printf("waited for: %d\n", info.si_overrun + 1 >= at_least && info.si_overrun + 1 <= at_most);
    clock_gettime(CLOCK_MONOTONIC, &start);
    while (since(&start) < 10000000) {}
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    printf("let in: %d, overruns %d\n", delivered[SIGRTMIN + 2] > 0, overruns[SIGRTMIN + 2] > 0);
    CHECK(timer_settime(timers[0], 0, &none, NULL) == 0 && timer_delete(timers[0]) == 0);

    /* One-shot timers, each waited for: none is lost, however early it expires. */
    handle(SIGRTMIN + 3, 0);
    e.sigev_signo = SIGRTMIN + 3;
    CHECK(timer_create(CLOCK_MONOTONIC, &e, &timers[0]) == 0);
    sigemptyset(&some);
    sigaddset(&some, SIGRTMIN + 3);
    CHECK(sigprocmask(SIG_BLOCK, &some, &old) == 0);
    for (int i = 0; i < 400; i++) {
        struct itimerspec once = {{0, 0}, {0, 1000 + 100 * (i % 200)}};
        CHECK(timer_settime(timers[0], 0, &once, NULL) == 0);
        compute(i % 50);
        struct timespec long_time = {20, 0};
        int fd = -1;
        switch (i % 5) {
            case 0: CHECK(sigsuspend(&old) == -1 && errno == EINTR); break;
            case 1: CHECK(ppoll(NULL, 0, &long_time, &old) == -1 && errno == EINTR); break;
            case 2: CHECK(pselect(0, NULL, NULL, NULL, &long_time, &old) == -1 && errno == EINTR); break;
            case 3: CHECK(sigtimedwait(&some, NULL, &long_time) == SIGRTMIN + 3); delivered[SIGRTMIN + 3]++; break;
            default: {
                struct signalfd_siginfo out;
                fd = signalfd(-1, &some, 0);
                CHECK(read(fd, &out, sizeof out) == sizeof out && out.ssi_signo == (unsigned)SIGRTMIN + 3);
                close(fd);
                delivered[SIGRTMIN + 3]++;
            }
        }
        CHECK(delivered[SIGRTMIN + 3] == i + 1);
    }
    CHECK(timer_delete(timers[0]) == 0);
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    printf("one-shots: %ld\n", delivered[SIGRTMIN + 3]);

    /* Timers of processor time, and a descriptor. */
    handle(SIGVTALRM, SA_RESTART), handle(SIGPROF, SA_RESTART);
    struct itimerval virtual = {{0, 4000}, {0, 4000}}, stop = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_VIRTUAL, &virtual, NULL) == 0 && setitimer(ITIMER_PROF, &virtual, NULL) == 0);
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    long expirations = 0;
    /* Before the timer begins: it may expire more often than is seen from after that on. */
    clock_gettime(CLOCK_MONOTONIC, &start);
    CHECK(timerfd_settime(fd, 0, &fast, NULL) == 0);
    /* All these signals may come before the descriptor is read for the second time. */
    while (delivered[SIGVTALRM] < 3 || delivered[SIGPROF] < 3 || expirations == 0) {
        uint64_t count = 0;
        bad += compute(2000) != expected;
        if (read(fd, &count, sizeof count) == sizeof count) expirations += (long)count;
    }
    long elapsed = since(&start) / 100000;
    setitimer(ITIMER_VIRTUAL, &stop, NULL), setitimer(ITIMER_PROF, &stop, NULL);
    printf("processor time: 1, descriptor: %d, wrong %ld\n", expirations > 0 && expirations <= elapsed + 1, bad);
    return 0;
}
