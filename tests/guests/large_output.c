/* A megabyte of output in pieces of all sizes, through stdio, write and writev, and some on the
 * error stream.
 *
 * A test of plain system calls: no byte may be lost, doubled or reordered. */
#include <sys/uio.h>
#include <unistd.h>
#include "guest.h"

int main(int argc, char **argv) {
    long n = iterations(argc, argv, 3000);
    uint64_t seed = 1;
    static char block[4096];
    for (size_t i = 0; i < sizeof block; i++) block[i] = (char)('a' + i % 26 - (i % 64 == 63 ? 'a' + i % 26 - '\n' : 0));
    for (long i = 0; i < n; i++) {
        size_t length = next_random(&seed) % 700;
        if (i % 100 == 0) {
            fflush(stdout);
            struct iovec pieces[3] = {{block, length}, {(char *)"|", 1}, {block + 64, 100}};
            ssize_t total = (ssize_t)length + 101;
            CHECK(writev(1, pieces, 3) == total);
            fprintf(stderr, "piece %ld of %zd bytes\n", i, total);
        } else {
            CHECK(fwrite(block, 1, length, stdout) == length);
        }
    }
    printf("\nend\n");
    return 0;
}
