# Queens by recursion with arrays as parameters, and calls through a name.
function place(row, size, columns, up, down,    c, found) {
    if (row == size) return 1
    for (c = 0; c < size; c++)
        if (!(columns[c] || up[row + c] || down[row - c])) {
            columns[c] = up[row + c] = down[row - c] = 1
            found += place(row + 1, size, columns, up, down)
            columns[c] = up[row + c] = down[row - c] = 0
        }
    return found
}
function double(x) { return 2 * x }
function square(x) { return x * x }
function apply(name, x) { return @name(x) }
BEGIN {
    for (i = 0; i < n; i++) {
        delete columns; delete up; delete down
        for (k = 0; k < 100; k++) sum += apply(k % 2 ? "double" : "square", i + k)
        sum = (sum * 3 + place(0, 4 + i % 3, columns, up, down)) % 1000003
    }
    print sum
}
