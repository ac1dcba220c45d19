# A damped rotation in floats, with counters.
BEGIN {
    for (step = 0; step < n; step++) {
        t = step / n; x = 1 + t; y = 0.5
        for (k = 0; k < 30; k++) {
            x1 = x - y * 0.01; y += x * 0.01 - (y > 1) * 0.1; x = x1
            if (k % 7 == 3) sum += int(1000 * x) % 13
        }
        energy += x * x + y ^ 2 + atan2(y, x) + exp(-t)
    }
    printf "%d %.6f\n", sum, energy
}
