# Lines of a text: gsub, match, gensub, split, sprintf, a dynamic regular expression.
{
    $2 = toupper($2)
    changed += gsub(/[aeiou]+/, "<&>")
    if (match($0, /<[a-z]+>[^<]*<o/)) place += RSTART * RLENGTH
    line = gensub(/(\w+) (\w+)/, "\\2 \\1", "g") sprintf("%05d:%-8s", NR, substr($1, 2, 4))
    for (i = split(line, letters, "<"); i > 0; i -= 4)
        sum = (sum * 31 + length(letters[i])) % 1000003
    if ($1 ~ "^" substr($NF, 1, 1) ".*>") last = last substr($NF, 2, 1) index(line, "th")
}
END { print NR, changed, place, sum, length(last), substr(last, 1, 20) }
