/* CRC-32 with a table, byte by byte: one long dependency through loads, xor and shifts. */
#include "kernel.h"

enum { SIZE = 1 << 16 };
static uint32_t table[256];
static unsigned char data[SIZE];

static uint32_t crc(uint32_t value, const unsigned char *bytes, size_t size) {
    value = ~value;
    while (size--) value = table[(value ^ *bytes++) & 255] ^ (value >> 8);
    return ~value;
}

int main(int argc, char **argv) {
    long n = rounds(argc, argv, 4000);
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int k = 0; k < 8; k++) value = value & 1 ? 0xedb88320u ^ (value >> 1) : value >> 1;
        table[i] = value;
    }
    for (int i = 0; i < SIZE; i++) data[i] = (unsigned char)(i * 31 + (i >> 8));
    uint32_t value = 0;
    for (long r = 0; r < n; r++) value = crc(value, data, SIZE);
    return report("crc32", n, value);
}
