# Recursion: one and two arguments, two functions that call each other, arrays as parameters.
function fib(n) { return n < 2 ? n : fib(n - 1) + fib(n - 2) }
function gcd(a, b) { return b == 0 ? a : gcd(b, a % b) }
function even(n) { return n == 0 ? 1 : odd(n - 1) }
function odd(n) { return n == 0 ? 0 : even(n - 1) }
function fill(array, size, start,    i) { for (; i < size; i++) array[i] = start + i; return size }
function total(array, size) { return size == 0 ? 0 : array[size - 1] + total(array, size - 1) }
BEGIN {
    for (i = 1; i <= n; i++) {
        sum += fib(i % 15) + gcd(i * 7919, 10007 - i % 9) + 3 * even(i % 20)
        sum = (sum + total(numbers, fill(numbers, 10, i))) % 1000003
    }
    print sum
}
