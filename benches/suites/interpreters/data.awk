# Heap sort in an array; counts by string keys.
function sift(root, size,    child, value) {
    value = heap[root]
    for (; (child = 2 * root) <= size; root = child) {
        if (child < size && heap[child + 1] > heap[child]) child++
        if (heap[child] <= value) break
        heap[root] = heap[child]
    }
    heap[root] = value
}
BEGIN {
    for (i = 1; i <= n; i++) { heap[i] = x = (x * 16807 + i) % 2147483647; count["b" x % 5003]++ }
    for (i = int(n / 2); i > 0; i--) sift(i, n)
    for (i = n; i > 1; i--) { t = heap[1]; heap[1] = heap[i]; heap[i] = t; sift(1, i - 1) }
    for (i = 1; i <= n; i++) sum = (sum * 31 + heap[i]) % 1000003
    for (key in count) { split(key, parts, "b"); most += parts[2] * count[key]; delete count[key] }
    print sum, most, length(count), heap[1], heap[n]
}
