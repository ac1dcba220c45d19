# Fermat's test by modular powers in integers; a sum of roots and sines in floats.
use strict; use warnings;
my ($n, $primes, $area) = (shift, 0, 0);
for my $p (3 .. $n) {
    my ($result, $base, $e) = (1, 2, $p - 1);
    while ($e > 0) {
        $result = $result * $base % $p if $e & 1;
        $base = $base * $base % $p;
        $e >>= 1;
    }
    $primes++ if $result == 1;
    $area += sqrt($p) * sin($p / 10) ** 2 / ($p + 0.5);
}
printf "%d %.6f\n", $primes, $area;
