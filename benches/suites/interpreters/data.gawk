# Counts by string keys, an array of two dimensions, asort with a comparison function, deletion.
function by_value(i, a, j, b) { return a - b }
BEGIN {
    for (round = 1; round <= n; round++) {
        delete count; delete grid
        for (i = 1; i <= 20000; i++) {
            count["k" i * (7919 + round) % 1009] += i
            grid[i % 50, i % 31] += i
        }
        for (cell in grid) { split(cell, at, SUBSEP); sum += at[1] * at[2] * grid[cell] % 1009 }
        size = asort(count, sorted, "by_value")
        for (i = 1; i <= size; i += 10) sum = (sum * 3 + sorted[i]) % 1000003
        for (key in count) if (key ~ /7$/) delete count[key]
        sum += length(count)
    }
    print sum
}
