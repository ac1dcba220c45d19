# Greatest common divisors and masks in integers, the area of a circle in floats.
import math
import sys

n, total, area = int(sys.argv[1]), 1, 0.0
for i in range(1, n):
    a, b = i, i * 7919 % 1000 + 1
    while b:
        a, b = b, a % b
    total = ((total * 31 + a) ^ (i >> 3)) & 0xFFFFFFFF
    x = i / n
    area += math.sqrt(1.0 - x * x) / n - x**3 * 1e-9
print(total, f"{4 * area:.6f}", pow(total, 99) % 1000003)
