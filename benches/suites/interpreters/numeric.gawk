# Roots, sines and logarithms; greatest common divisors. The integers stay exact in doubles.
BEGIN {
    for (i = 1; i <= n; i++) {
        x = (x * 16807 + 12345) % 2147483648
        y = sqrt(x) - int(sqrt(x))
        if (i % 3 == 0) total += sin(y) ^ 2 + cos(y / 2); else total -= exp(-y) * log(1 + y)
        a = i; b = x % 1000
        while (b) { t = a % b; a = b; b = t }
        divisors += a
    }
    printf "%d %.6f %d\n", x, total, divisors
}
