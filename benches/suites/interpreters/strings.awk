# Lines of a text: gsub, match in a loop, substr, concatenation, counts of prefixes.
{
    line = $0
    changed += gsub(/[aeiou][a-z]*/, "(&)", line)
    while (match(line, /\([a-z]+\)/)) {
        word = substr(line, RSTART + 1, RLENGTH - 2)
        if (length(word) > 2) count[substr(word, 1, 2)]++
        line = substr(line, RSTART + RLENGTH)
    }
    back = ""
    for (i = NF; i > 0; i--) back = back toupper(substr($i, 1, 1)) i
    sum = (sum * 31 + length(sprintf("%s-%d", back, NR)) + index(back, "T3")) % 1000003
}
END {
    for (key in count) most = count[key] > most ? count[key] : most
    print NR, changed, most, sum
}
