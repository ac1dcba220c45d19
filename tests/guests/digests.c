/* CRC-32, Adler-32, MD5, SHA-1 and SHA-256, each checked against a published value.
 *
 * Hard for a translator: long blocks of rotates and shifts with more live values than registers. */
#include <math.h>
#include "guest.h"

static uint32_t crc_table[256];
static uint32_t crc32(const unsigned char *p, size_t n) {
    uint32_t c = ~0u;
    while (n--) c = crc_table[(c ^ *p++) & 255] ^ c >> 8;
    return ~c;
}

static uint32_t adler32(const unsigned char *p, size_t n) {
    uint32_t a = 1, b = 0;
    while (n--) {
        a = (a + *p++) % 65521;
        b = (b + a) % 65521;
    }
    return b << 16 | a;
}

static uint32_t rol(uint32_t x, int n) { return x << n | x >> (32 - n); }
static uint32_t ror(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* Pads to whole blocks of 64 bytes; the length is written in the given byte order. */
static size_t pad(unsigned char *to, const unsigned char *p, size_t n, int big_endian) {
    size_t total = (n + 9 + 63) / 64 * 64;
    memset(to, 0, total);
    memcpy(to, p, n);
    to[n] = 0x80;
    for (int i = 0; i < 8; i++) to[total - 8 + (size_t)i] = (unsigned char)((uint64_t)n * 8 >> 8 * (big_endian ? 7 - i : i));
    return total;
}

static unsigned char block_buffer[4096];

static void md5(const unsigned char *p, size_t n, uint32_t out[4]) {
    static const int shifts[4][4] = {{7, 12, 17, 22}, {5, 9, 14, 20}, {4, 11, 16, 23}, {6, 10, 15, 21}};
    uint32_t s[4] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476};
    size_t total = pad(block_buffer, p, n, 0);
    for (size_t o = 0; o < total; o += 64) {
        uint32_t m[16], a = s[0], b = s[1], c = s[2], d = s[3];
        memcpy(m, block_buffer + o, 64);
        for (int i = 0; i < 64; i++) {
            uint32_t f, g;
            switch (i / 16) {
                case 0: f = (b & c) | (~b & d); g = (uint32_t)i; break;
                case 1: f = (d & b) | (~d & c); g = (5u * (uint32_t)i + 1) % 16; break;
                case 2: f = b ^ c ^ d; g = (3u * (uint32_t)i + 5) % 16; break;
                default: f = c ^ (b | ~d); g = 7u * (uint32_t)i % 16; break;
            }
            uint32_t k = (uint32_t)(int64_t)floor(fabs(sin(i + 1)) * 4294967296.0);
            uint32_t t = d;
            d = c;
            c = b;
            b = b + rol(a + f + k + m[g], shifts[i / 16][i % 4]);
            a = t;
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d;
    }
    for (int i = 0; i < 4; i++) out[i] = __builtin_bswap32(s[i]);
}

static void sha1(const unsigned char *p, size_t n, uint32_t s[5]) {
    static const uint32_t start[5] = {0x67452301, 0xefcdab89, 0x98badcfe, 0x10325476, 0xc3d2e1f0};
    memcpy(s, start, 20);
    size_t total = pad(block_buffer, p, n, 1);
    for (size_t o = 0; o < total; o += 64) {
        uint32_t w[80], a = s[0], b = s[1], c = s[2], d = s[3], e = s[4];
        for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(((uint32_t *)(block_buffer + o))[i]);
        for (int i = 16; i < 80; i++) w[i] = rol(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
        for (int i = 0; i < 80; i++) {
            uint32_t f = i < 20 ? (b & c) | (~b & d) : i < 40 ? b ^ c ^ d : i < 60 ? (b & c) | (b & d) | (c & d) : b ^ c ^ d;
            uint32_t k = i < 20 ? 0x5a827999 : i < 40 ? 0x6ed9eba1 : i < 60 ? 0x8f1bbcdc : 0xca62c1d6;
            uint32_t t = rol(a, 5) + f + e + k + w[i];
            e = d, d = c, c = rol(b, 30), b = a, a = t;
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e;
    }
}

static uint32_t fraction(int number, int cube) {
    double r = cube ? cbrt(number) : sqrt(number);
    return (uint32_t)((r - floor(r)) * 4294967296.0);
}

static void sha256(const unsigned char *p, size_t n, uint32_t s[8]) {
    uint32_t k[64];
    for (int i = 0, prime = 2; i < 64; prime++) {
        int is_prime = 1;
        for (int d = 2; d * d <= prime; d++) is_prime &= prime % d != 0;
        if (!is_prime) continue;
        if (i < 8) s[i] = fraction(prime, 0);
        k[i++] = fraction(prime, 1);
    }
    size_t total = pad(block_buffer, p, n, 1);
    for (size_t o = 0; o < total; o += 64) {
        uint32_t w[64], v[8];
        for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(((uint32_t *)(block_buffer + o))[i]);
        for (int i = 16; i < 64; i++)
            w[i] = w[i - 16] + (ror(w[i - 15], 7) ^ ror(w[i - 15], 18) ^ w[i - 15] >> 3) + w[i - 7] +
                   (ror(w[i - 2], 17) ^ ror(w[i - 2], 19) ^ w[i - 2] >> 10);
        memcpy(v, s, 32);
        for (int i = 0; i < 64; i++) {
            uint32_t t1 = v[7] + (ror(v[4], 6) ^ ror(v[4], 11) ^ ror(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[i] + w[i];
            uint32_t t2 = (ror(v[0], 2) ^ ror(v[0], 13) ^ ror(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            memmove(v + 1, v, 28);
            v[4] += t1;
            v[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++) s[i] += v[i];
    }
}

static void show(const char *name, const uint32_t *words, int n) {
    printf("%-7s ", name);
    for (int i = 0; i < n; i++) printf("%08x", words[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    size_t n = (size_t)iterations(argc, argv, 1000);
    if (n > 3900) n = 3900;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xedb88320 ^ c >> 1 : c >> 1;
        crc_table[i] = c;
    }
    const unsigned char *abc = (const unsigned char *)"abc", *digits = (const unsigned char *)"123456789";
    uint32_t m[4], s1[5], s2[8];
    CHECK(crc32(digits, 9) == 0xcbf43926);
    CHECK(adler32(digits, 9) == 0x091e01de);
    md5(abc, 3, m);
    CHECK(m[0] == 0x90015098 && m[3] == 0x28e17f72);
    sha1(abc, 3, s1);
    CHECK(s1[0] == 0xa9993e36 && s1[4] == 0x9cd0d89d);
    sha256(abc, 3, s2);
    CHECK(s2[0] == 0xba7816bf && s2[7] == 0xf20015ad);
    unsigned char *data = malloc(n);
    uint64_t seed = 77;
    for (size_t i = 0; i < n; i++) data[i] = (unsigned char)next_random(&seed);
    uint32_t crc = crc32(data, n), adler = adler32(data, n);
    md5(data, n, m);
    sha1(data, n, s1);
    sha256(data, n, s2);
    show("crc32", &crc, 1);
    show("adler", &adler, 1);
    show("md5", m, 4);
    show("sha1", s1, 5);
    show("sha256", s2, 8);
    return 0;
}
